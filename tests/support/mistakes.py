"""Recipes for the checks before the first step: a right one, its mistakes, and other shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from flyte_ddp.recipes import Recipe

NUM_SAMPLES = 40


class Line(Recipe):
    """A regression, without a mistake."""

    defaults = {"epochs": 2, "global_batch_size": 8, "learning_rate": 0.01}

    def prepare(self, source, directory):
        return "points of a line"

    def samples(self):
        inputs = torch.linspace(-1, 1, NUM_SAMPLES).unsqueeze(1)
        return inputs, 2 * inputs.squeeze(1) + 1

    def datasets(self, directory):
        return TensorDataset(*self.samples()), TensorDataset(*self.samples())

    def model(self):
        return nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))

    def losses(self, outputs, targets):
        return functional.mse_loss(outputs, targets, reduction="none")

    def num_correct(self, outputs, targets):
        return (outputs - targets).abs() < 0.1


class Averaged(Line):
    def losses(self, outputs, targets):
        return functional.mse_loss(outputs, targets)


class PrepareWithoutReturn(Line):
    def prepare(self, source, directory):
        pass


class _Samples(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return self.make(index)


class TwoRates(Line):
    """Correct: its weight has a rate of its own, its bias the config's."""

    def optimizer_groups(self, model):
        return [
            {"params": [model[0].weight], "lr": 0.3, "name": "weight"},
            {"params": [model[0].bias]},
        ]


class Masks(Line):
    """A segmentation with pixels that do not count."""

    def samples(self):
        images = torch.rand(NUM_SAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        masks = (images[:, 0] > 0.5).long()
        for index in range(NUM_SAMPLES):
            masks[index].view(-1)[: index % 5] = -100
        return images, masks

    def model(self):
        return nn.Conv2d(1, 2, 1)

    def losses(self, outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none").flatten(1).sum(1)

    def num_correct(self, outputs, targets):
        return (outputs.argmax(1) == targets).flatten(1).sum(1)

    def num_targets(self, targets):
        return (targets != -100).flatten(1).sum(1)


class LoadedMasks(Masks):
    """The same, read sample by sample."""

    def datasets(self, directory):
        images, masks = self.samples()
        data = _Samples(lambda index: (images[index], masks[index]))
        return data, data


@dataclass
class Ad:
    """A sample with named parts."""

    words: torch.Tensor
    price: float


class TwoInputs(Line):
    """A model with two inputs and two targets, as a dataclass and a dict."""

    defaults = {**Line.defaults, "epochs": 40, "global_batch_size": 2, "learning_rate": 0.05}

    def datasets(self, directory):
        return _Samples(_ad), _Samples(_ad)

    def model(self):
        return _AdModel()

    def losses(self, outputs, targets):
        return sum((outputs[name] - targets[name].float()) ** 2 for name in targets)

    def num_correct(self, outputs, targets):
        return sum((outputs[name] - targets[name]).abs() < 0.1 for name in targets)

    def num_targets(self, targets):
        return torch.full_like(targets["clicks"], 2)


def _ad(index):
    targets = {"clicks": torch.tensor(index % 4 / 2), "cost": torch.tensor(index / NUM_SAMPLES * 3)}
    return Ad(torch.tensor([index % 4, 3]), index / NUM_SAMPLES), targets


class _AdModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(4, 8)
        self.clicks, self.cost = nn.Linear(8, 1), nn.Linear(1, 1)

    def forward(self, ad):
        price = ad.price.float().unsqueeze(1)
        return {
            "clicks": self.clicks(self.words(ad.words)).squeeze(1),
            "cost": self.cost(price).squeeze(1),
        }
