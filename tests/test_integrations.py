"""The training loops of others: after a kill, at another number of ranks, each sample is trained on once an epoch."""

from __future__ import annotations

import pytest
import torch

import flyte_ddp
from flyte_ddp.errors import RankFailure
from tests.support import frameworks
from tests.support.frameworks import EPOCHS, NUM_SAMPLES

FRAMEWORKS = ("transformers", "lightning", "accelerate")


def train_of(framework):
    pytest.importorskip(framework)
    return getattr(frameworks, f"train_{framework}")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_kill_in_mid_epoch_loses_and_doubles_no_sample(framework, tmp_path):
    train = train_of(framework)
    (tmp_path / "17-1-9").touch()  # in the middle of the second epoch; the last checkpoint is of step 16
    options = {"checkpoints": str(tmp_path / "checkpoints")}
    with pytest.raises(RankFailure, match="SIGKILL"):
        flyte_ddp.run(train, str(tmp_path), nproc_per_node=2, **options)
    assert not (tmp_path / "17-1-9").exists()
    result = flyte_ddp.run(train, str(tmp_path), nproc_per_node=1, **options)
    assert result["counts"] == [EPOCHS] * NUM_SAMPLES
    expected = flyte_ddp.run(train, str(tmp_path / "plain"), False, nproc_per_node=2)
    torch.testing.assert_close(*(list(map(torch.tensor, each["weights"])) for each in (result, expected)))
