"""The ranks of a split model use the same layers in each pass: one line names a layer that a part
of them leaves out.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from flyte_ddp.errors import RankFailure
from flyte_ddp.rank.sharding import is_sharded
from flyte_ddp.training import pass_layers
from tests.support.recipes import Tiny
from tests.support.runs import new_run

HERE = "tests.gang.test_pass_layers."


class Choosing(nn.Module):
    """Leaves out layers of one shape from its fourth training pass on.

    Args:
        left_out: of a pass and a rank.
    """

    def __init__(self, left_out):
        super().__init__()
        self.left_out, self.num_passes = left_out, 0
        self.first = nn.Linear(8, 8)
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            self.num_passes += 1
        left_out = ()
        if self.num_passes > 3:
            left_out = self.left_out(self.num_passes, int(os.environ["RANK"]))
        outputs = self.first(inputs)
        for number, layer in enumerate(self.middle):
            if number not in left_out:
                outputs = outputs + layer(outputs)
        return self.last(outputs)


class Whole(Tiny):
    """Its layers are gathered together."""

    def model(self):
        pass_layers.MAX_WAIT = 3.0  # This line runs in a rank.
        return Choosing(self.left_out)


class OneRank(Whole):
    def left_out(self, number, rank):
        return [1] if rank == 1 else []


class Different(Whole):
    def left_out(self, number, rank):
        return [rank]


class InBlocks(Whole):
    def blocks(self, model):
        return list(model.middle)


class OneRankInBlocks(InBlocks, OneRank):
    pass


class DifferentInBlocks(InBlocks, Different):
    pass


class Alike(InBlocks):
    def left_out(self, number, rank):
        return [number % 3]


class FromTheStart(Different):
    def model(self):
        model = super().model()
        model.num_passes = 3
        return model


class Late(Choosing):
    """Rank 1 is late in its first pass as a part of a split model."""

    is_late = True

    def forward(self, inputs):
        if self.is_late and os.environ["RANK"] == "1" and is_sharded(self):
            self.is_late = False
            time.sleep(2)
        return super().forward(inputs)


class LateAtFirst(Alike):
    """The first pass waits for longer than a later one may."""

    def model(self):
        pass_layers.MAX_WAIT = 0.5  # This line runs in a rank.
        return Late(self.left_out)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("OneRank", r"middle\.1"),
        ("Different", r"middle\.0"),
        ("FromTheStart", r"middle\.0"),
        ("OneRankInBlocks", r"middle\.[12]"),
        ("DifferentInBlocks", r"middle\.[01]"),
    ],
)
def test_a_layer_that_a_part_of_the_ranks_leaves_out_is_one_line(kind, layer, tmp_path):
    run = new_run(tmp_path, HERE + kind)
    expected = f"{kind}.*.model: expected with .*the same layers .* of all ranks, got {layer} on"
    with pytest.raises(RankFailure, match=expected.replace(f"{kind}.*", "")) as caught:
        run.train(2, parallel="fsdp", epochs=1)
    assert "ConfigError" in str(caught.value)


@pytest.mark.parametrize("kind", ["Alike", "LateAtFirst"])
@pytest.mark.long
def test_layers_that_all_ranks_leave_out_are_no_error(kind, tmp_path):
    run = new_run(tmp_path, HERE + kind).train(2, parallel="fsdp", epochs=2)
    assert run.result.finished
