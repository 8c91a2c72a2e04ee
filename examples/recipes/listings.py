"""Samples of several parts: a listing's words and price, and two numbers to predict. The listings
are made up.

cp examples/recipes/listings.py recipes/
pyflyte run workflows/single_node.py single_node_training_wf --recipe recipes.listings.Shop
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

from flyte_ddp import Recipe


@dataclass
class Listing:
    words: torch.Tensor
    price: float


class Listings(Dataset):
    """Any data set with a length and items. `data_workers` in the config are processes that read
    it.
    """

    def __init__(self, first, last):
        self.numbers = range(first, last)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        words = torch.tensor([number % 7, number % 5])
        return Listing(words, number / 100), {"clicks": float(number % 7), "sold": number / 100}


class Model(nn.Module):
    """Takes a batch in the shape of a sample: a `Listing` of words (B, 2) and prices (B,)."""

    def __init__(self):
        super().__init__()
        self.words, self.clicks, self.sold = nn.EmbeddingBag(7, 8), nn.Linear(8, 1), nn.Linear(1, 1)

    def forward(self, listing):
        price = listing.price.float().unsqueeze(1)
        return {
            "clicks": self.clicks(self.words(listing.words)).squeeze(1),
            "sold": self.sold(price).squeeze(1),
        }


class Shop(Recipe):
    defaults = {"epochs": 20, "global_batch_size": 20, "learning_rate": 0.05}

    def prepare(self, source, directory):
        return "100 listings that are made up"

    def datasets(self, directory):
        return Listings(0, 80), Listings(80, 100)

    def model(self):
        return Model()

    def losses(self, outputs, targets):
        return sum((outputs[name] - targets[name].float()) ** 2 for name in targets)

    def num_targets(self, targets):
        return torch.full_like(targets["clicks"], 2)

    def metrics(self):
        def absolute_errors(outputs, targets):
            """Return a number for each sample: the sum over its two targets, (B,)."""
            return sum((outputs[name] - targets[name]).abs() for name in targets)

        return {"mae": absolute_errors}
