"""Packed rows on real ranks: the gradient of 1 to 4 ranks is that of the mean over all targets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.data import Packed, Shards, loader
from tests.support.documents import draw_lengths, make_documents, make_packed
from tests.support.gang import run_gang

LENGTH, BATCH = 32, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, row):
        hidden = self.embedding(row["input_ids"] % 64) + row["position_ids"][..., None] / 99
        logits, labels = self.head(hidden)[:, :-1], row["labels"][:, 1:]
        labels = torch.where(labels < 0, labels, labels % 64)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def list_gradients(world, store, place):
    """The gradient of each global batch."""
    data = Packed(Shards(place), LENGTH, labels="labels", overlong="continue")
    model, found = Model().double(), []
    replica = DistributedDataParallel(model) if world.world_size > 1 else model
    for row, weight in loader(data, BATCH, epochs=1, weights=True):
        (weight * replica(row)).backward()
        found.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
        model.zero_grad()
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_are_those_of_one_mean_over_the_targets(num_ranks, tmp_path):
    documents = make_documents(draw_lengths(120), is_chat=True)
    data = make_packed(documents, tmp_path, labels="labels", overlong="continue")
    assert len(data) % BATCH
    (alone,) = run_gang(1, list_gradients, str(tmp_path))
    found = run_gang(num_ranks, list_gradients, str(tmp_path))
    assert len(alone) == -(-len(data) // BATCH)
    for gradients in found:
        for expected, got in zip(alone, gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
            assert expected.abs().max() > 1e-3
