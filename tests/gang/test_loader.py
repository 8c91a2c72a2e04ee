"""The loader for any loop on real ranks: under torchrun in the loops of others, under our launcher,
and what ranks compare.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

import flyte_ddp
from flyte_ddp import session
from flyte_ddp.data import loader
from flyte_ddp.errors import ConfigError
from tests.support.frameworks import require
from tests.support.gang import run_gang

REPOSITORY = Path(__file__).parents[2]


def run_torchrun(num_ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, "--standalone", "-m", "tests.support.loader_loops", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


def read_numbers(directory):
    lines = [line for file in directory.glob("*.seen") for line in file.read_text().splitlines()]
    return Counter(number for line in lines for number in json.loads(line))


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(["plain", "titan", "accelerate"], marks=pytest.mark.long),
        pytest.param(["transformers", "lightning"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_loop_of_2_then_3_then_1_rank_trains_on_each_sample_once_an_epoch(programs, tmp_path):
    """The first part ends in the middle of an epoch, and the second at the end of one."""
    for name in programs:
        if name not in ("plain", "titan"):
            require(name)
    for num_ranks, max_steps, num_workers in ((2, 5, 1), (3, 9, 2), (1, -1, 0)):
        run_torchrun(num_ranks, str(tmp_path), str(max_steps), str(num_workers), *programs)
    for program in programs:
        size = 97 if program == "plain" else 90
        assert read_numbers(tmp_path / program) == Counter(2 * [*range(size)]), program


def loop(world, store, change):
    """Loop on a rank with a change of `CHANGES`; return the error or the samples."""
    try:
        arguments, state = CHANGES[change](world.rank)
        made = loader(*arguments.pop("data", [range(12)]), 4, **arguments)
        made.load_state_dict(state)
        return [number for batch in made for number in batch.tolist()]
    except ConfigError as error:
        return str(error)


def state_after(num_batches):
    made = loader(range(12), 4, rank=0, num_ranks=1)
    for _, _ in zip(range(num_batches), made, strict=False):
        pass
    return made.state_dict()


# arguments of a rank and its state, by the beginning of the error
CHANGES = {
    "seed: expected 0 on all ranks, as on rank 0, got 1 on rank 1": lambda rank: (
        {"seed": rank},
        {},
    ),
    "num_samples: expected 4 on all ranks, as on rank 0, got 8 on rank 1": lambda rank: (
        {},
        state_after(1 + rank),
    ),
    "dataset: sample 0: expected the same on all ranks, as on rank 0, got another one on rank 1": (
        lambda rank: ({"data": [range(rank, 12 + rank)]}, {})
    ),
    "global_batch_size: expected batches that 2 ranks share evenly": lambda rank: (
        {"data": [range(11)]},
        {},
    ),
}


@pytest.mark.parametrize("expected", CHANGES)
def test_ranks_that_differ_end_with_one_line_on_each(expected):
    found = run_gang(2, loop, expected)
    assert found[0] == found[1]
    assert found[0].startswith(f"loader: {expected}")
    assert "\n" not in found[0]


def leave_out_a_rank(world, store):
    import flyte_ddp.rank.loader as module

    module.MAX_WAIT = 1.0
    if world.rank == 1:
        return ""
    return loop(world, store, next(iter(CHANGES)))


def test_a_rank_that_does_not_loop_is_one_line():
    expected = "loader: expected a loop on every rank, got none on rank 1 for 1 s"
    assert run_gang(2, leave_out_a_rank) == [expected, ""]


def loop_over_a_mesh(world, store):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = loader(range(12), 4, mesh=mesh["dp"])
    return [number for batch in made for number in batch.tolist()], made.state_dict()


def test_ranks_that_differ_in_another_dimension_of_a_mesh_get_the_same_samples():
    (first, state), second, third, fourth = run_gang(4, loop_over_a_mesh)
    assert (second, fourth) == ((first, state), third)
    assert third[1] == state
    assert sorted(first + third[0]) == list(range(12))


def train_and_save(directory):
    """Ten steps of two epochs; a rank is killed once after a step that no checkpoint has."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    batches, seen = loader(range(50), 10), []
    state = session.load() or {"step": 0, "data": {}}
    batches.load_state_dict(state["data"])
    step, fault = state["step"], Path(directory, "fault")
    for _ in range(batches.epoch, 2):
        for batch in batches:
            if step == 7 and dist.get_rank() == 1 and fault.exists():
                fault.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            seen += batch.tolist()
            step += 1
            session.report(step=step)
            if step in (3, 6, 10):
                with Path(directory, f"{os.getpid()}.seen").open("a") as file:
                    file.write(json.dumps(seen) + "\n")
                seen.clear()
                session.save({"step": step, "data": batches.state_dict()}, step)
                session.current().saver.wait()  # a kill may come at the next step
    assert session.current().position.current["epoch"] == 0  # the session has no part in it


def test_a_run_of_this_package_leaves_the_position_to_the_state(tmp_path, forked_functions):
    (tmp_path / "fault").touch()
    options = {"checkpoints": str(tmp_path / "checkpoints"), "max_restarts": 1}
    flyte_ddp.run(train_and_save, str(tmp_path), nproc_per_node=2, **options)
    assert not (tmp_path / "fault").exists()
    assert read_numbers(tmp_path) == Counter(2 * [*range(50)])
