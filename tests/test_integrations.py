"""The training loops of others: after a kill, at another number of ranks, each sample is trained on once an epoch."""

from __future__ import annotations

import pytest
import torch

import flyte_ddp
from benchmarks.frameworks import PROGRAMS, Task
from flyte_ddp.errors import RankFailure

FRAMEWORKS = (  # of which importing takes ten seconds for each rank; `make test-docs` has all
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("transformers", "lightning")),
    "accelerate",
)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_kill_in_mid_epoch_loses_and_doubles_no_sample(framework, tmp_path):
    pytest.importorskip(framework)
    train, task = PROGRAMS[framework], Task(str(tmp_path))
    fault = tmp_path / "step-17-1-9"  # in the middle of the second epoch; the last checkpoint is of step 16
    fault.touch()
    options = {"checkpoints": str(tmp_path / "checkpoints")}
    with pytest.raises(RankFailure, match="SIGKILL"):
        flyte_ddp.run(train, task, nproc_per_node=2, **options)
    assert not fault.exists()
    result = flyte_ddp.run(train, task, nproc_per_node=1, **options)
    assert result["counts"][0].tolist() == [task.epochs] * task.num_samples
    expected = flyte_ddp.run(train, Task(str(tmp_path / "plain"), save_steps=0), nproc_per_node=2)
    torch.testing.assert_close(result["weights"], expected["weights"])
