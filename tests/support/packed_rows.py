"""A recipe on packed rows of chats."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from flyte_ddp.data import Packed, Shards
from flyte_ddp.recipes import Recipe
from tests.support.documents import draw_lengths, make_documents, write_documents

OPTIONS = {"labels": "labels", "overlong": "continue"}


def to_pair(row):
    labels = torch.cat([row["labels"][1:], torch.tensor([-100])])
    return row["input_ids"] % 64, torch.where(labels < 0, labels, labels % 64)


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(64, 8), nn.Linear(8, 64))


class Chats(Recipe):
    defaults = {"epochs": 2, "global_batch_size": 6, "learning_rate": 0.01}

    def prepare(self, source, directory):
        found = []
        for number, (side, count) in enumerate({"train": 80, "val": 30}.items()):
            documents = make_documents(draw_lengths(count, seed=number), is_chat=True)
            place = write_documents(documents, directory / side)
            found.append(Packed(Shards(place), 32, **OPTIONS).prepare())
        return "; ".join(found)

    def datasets(self, directory):
        places = [str(directory / side) for side in ("train", "val")]
        return tuple(Packed(Shards(each), 32, transform=to_pair, **OPTIONS) for each in places)

    def model(self):
        return Model()

    def losses(self, outputs, targets):
        losses = functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), reduction="none"
        )
        return losses.view(targets.shape).sum(1)

    def num_targets(self, targets):
        return (targets != -100).sum(1)

    def num_correct(self, outputs, targets):
        return (outputs.argmax(2) == targets).sum(1)


class Miscounting(Chats):
    """Counts a target for each token."""

    def num_targets(self, targets):
        return torch.full((len(targets),), targets.shape[1])
