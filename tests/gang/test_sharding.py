"""A model in shards trains to the weights of a whole one, and any number of ranks reads its
checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore

from flyte_ddp.checkpoints import store as checkpoint_store
from flyte_ddp.checkpoints.peers import Peers
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.errors import StopRequested, StorageUnavailable
from flyte_ddp.events import (
    CheckpointLoaded,
    HistogramsTaken,
    PredictionsMade,
    RunFinished,
    RunStarted,
)
from flyte_ddp.recipes import config_of
from flyte_ddp.storage import Storage
from tests.support.events import from_dict
from tests.support.gang import Link, run_gang, train_recipe
from tests.support.runs import flip, new_run

TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}  # sums over ranks in another order


# Checkpoints of shards. The model's last layer has three rows, so a fourth rank holds none of them.

TINY = "tests.support.recipes.Tiny"
STEPS = 9  # per epoch


def train_and_note_reads(world, store, *arguments):
    """Work of a gang: the events, and the names of the files of tensors that this rank has read."""
    names, read = [], checkpoint_store.read_file

    def noting(storage, entry):
        names.append(entry["file"])
        return read(storage, entry)

    checkpoint_store.read_file = noting
    return train_recipe(world, store, *arguments), names


def train_tiny(directory, num_ranks, **options):
    """Train `Tiny` in a gang, on from what is there; return the events by their kinds, of each the
    last one, and who read what.
    """
    run = new_run(directory)
    config = {"optimizer": "adamw", "learning_rate": 0.01, "gradient_clip_norm": 0.5}
    config = config_of(TINY, {**config, "checkpoints_to_keep": 9, **options})
    given = (train_and_note_reads, TINY, config, str(run.data()), str(run.checkpoints))
    results = run_gang(num_ranks, *given)
    emitted = [from_dict(values) for values in results[0][0]]
    return {type(event): event for event in emitted}, [sorted(names) for _, names in results]


def files_of(manifest):
    return [entry["file"] for entry in json.loads(Path(manifest).read_text())["files"]]


def shown(seen):
    """Return the layers, histograms and the like that a run has shown, without their numbers."""
    histograms = seen[HistogramsTaken]
    return (
        [(layer.name, layer.output_shape) for layer in seen[RunStarted].layers],
        seen[RunStarted].num_parameters,
        {
            name: sum(each.counts) * name.startswith("parameters")
            for name, each in histograms.histograms.items()
        },
        len(seen[PredictionsMade].predictions),
    )


@pytest.mark.long
def test_checkpoints_go_from_ddp_to_4_and_to_3_ranks_of_shards(tmp_path):
    # The run goes to its end, because a slow writer leaves out a checkpoint on the way.
    train_tiny(tmp_path / "whole", 1, epochs=2)
    undisturbed = CheckpointStore(str(tmp_path / "whole" / "checkpoints"), 2).load(2 * STEPS)
    whole, _ = train_tiny(tmp_path / "whole", 1, epochs=3)

    for epoch, (num_ranks, num_parts) in enumerate(((1, 1), (4, 3), (3, 2)), start=1):
        options = {"parallel": "ddp" if num_ranks == 1 else "fsdp", "epochs": epoch}
        options["gradient_accumulation"] = num_parts
        seen, reads = train_tiny(tmp_path / "run", num_ranks, **options)
        loaded = seen[CheckpointLoaded]
        assert (loaded.step, loaded.skipped) == ((epoch - 1) * STEPS, [])
        if epoch > 1:
            # Each file is read by one rank, by all ranks in turn.
            files = files_of(loaded.url)
            assert len(reads) == num_ranks
            for rank, names in enumerate(reads):
                assert [name for name in names if name in files] == files[rank::num_ranks]
        newest = tmp_path / "run" / "checkpoints" / f"step-{epoch * STEPS:010d}.json"
        files = files_of(newest)
        assert len(files) == num_ranks
        if num_ranks > 1:
            assert [name.rpartition("-")[2] for name in files] == [
                f"{r}of{num_ranks}.pt" for r in range(num_ranks)
            ]
    urls = [each[RunFinished].model_state_url for each in (seen, whole)]
    states = [torch.load(url, weights_only=True) for url in urls]
    torch.testing.assert_close(*states, **TOLERANCE)
    assert shown(seen) == shown(whole)
    held = seen[RunFinished].rank_num_parameters
    assert sum(held) == seen[RunStarted].num_parameters > 2 * max(held)

    flip(newest.with_name(files[1]))
    state, url, (line,) = CheckpointStore(str(newest.parent), 2).load_latest()
    assert url.endswith(f"step-{2 * STEPS:010d}.json")
    assert f"{newest} is damaged and was renamed to skipped-" in line
    assert re.search(rf"{files[1]}: expected the \d+ bytes .* another checksum", line)
    assert len(list(newest.parent.glob(f"skipped-*-step-{3 * STEPS:010d}*"))) == 4
    for part in ("model", "optimizer"):
        torch.testing.assert_close(state[part], undisturbed[part], **TOLERANCE)


@pytest.mark.long
def test_sgd_goes_from_ddp_to_shards_and_back(tmp_path):
    """The fused kernel of SGD takes no split tensors, so a checkpoint's choice of kernel may not
    replace the run's.
    """
    for epoch, (num_ranks, parallel) in enumerate(((1, "ddp"), (2, "fsdp"), (1, "ddp")), start=1):
        options = {"epochs": epoch, "parallel": parallel, "optimizer": "sgd"}
        seen, _ = train_tiny(tmp_path, num_ranks, **options)
        assert seen[CheckpointLoaded].step == (epoch - 1) * STEPS
        assert seen[RunFinished].step == epoch * STEPS


def resume_and_not(world, store, directory, data):
    """Work of a gang: train two epochs at once, and in parts: after a stop, and an epoch."""
    finished = []
    runs = [("whole", 2, False), ("parts", 2, True), ("parts", 1, False), ("parts", 2, False)]
    for number, (place, epochs, stops) in enumerate(runs):
        config = config_of("tests.support.recipes.Dropping", {"epochs": epochs, "parallel": "fsdp"})
        given = ("tests.support.recipes.Dropping", config, data, f"{directory}/{place}")
        Link.stop_requested = stops
        try:
            finished.append(train_recipe(world, PrefixStore(str(number), store), *given))
        except StopRequested:
            finished.append("stopped")
    return finished


@pytest.mark.long
def test_a_resumed_run_of_shards_has_bitwise_the_weights_of_one_that_was_not_interrupted(tmp_path):
    run = new_run(tmp_path, "Dropping")
    (whole, *stopped, first, resumed), other = run_gang(
        2, resume_and_not, str(tmp_path), str(run.data())
    )

    assert stopped == [other[1]] == ["stopped"]
    for events, step in ((first, 1), (resumed, STEPS)):
        loaded = next(values for values in events if values["event"] == "CheckpointLoaded")
        assert loaded["step"] == step
    states = [
        torch.load(each[-1]["model_state_url"], weights_only=True) for each in (whole, resumed)
    ]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def save_shards(store, step, best=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rows = torch.full((2, 300), float(step))
    mesh = store.mesh = getattr(store, "mesh", None) or init_device_mesh("cpu", (2,))
    weight = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    store.save({"weight": weight, "step": step}, step, best)


def save_while_one_rank_is_slow_and_then_killed(world, store, directory):
    """Work of a gang of two: the checkpoints after each part, with all their values, and the files
    at the end.
    """
    checkpoints = CheckpointStore(directory, 10, peers=Peers(world, store))
    write, num_writes = Storage.write, 0

    def slow(storage, name, contents):
        nonlocal num_writes
        if name.endswith("-1of2.pt"):
            num_writes += 1
            if num_writes == 1:
                raise StorageUnavailable("checkpoints: away")
            time.sleep(0.2)
        write(storage, name, contents)

    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    Storage.write = slow
    for step in range(1, 9):
        save_shards(checkpoints, step, best=step in (3, 5))
        time.sleep(0.05)
    checkpoints.wait()
    assert len(checkpoints.staging._free) <= 3
    if world.rank == 1:
        world.all_gather(0.0)
        Storage.write = die
    else:
        whole = {
            name: values_of(checkpoints, name)
            for name in checkpoints.storage.names()
            if name.endswith(".json")
        }
        world.all_gather(0.0)  # The other rank is alive until now.
    save_shards(checkpoints, 9)
    checkpoints.wait(seconds=1.0)
    again = CheckpointStore(directory, 10)
    state, _, skipped = again.load_latest()
    return whole, state["weight"], skipped, again.storage.names(), num_writes


def values_of(store, manifest):
    state = store.load(int(manifest[5:15]))
    return [state["step"], *{float(value) for value in state["weight"].flatten()}]


def test_shards_of_one_step_make_a_checkpoint_when_a_rank_is_slow_and_none_when_it_is_killed(
    tmp_path,
):
    first, second = run_gang(2, save_while_one_rank_is_slow_and_then_killed, str(tmp_path))
    whole, newest, skipped, names, _ = first

    assert second is None  # killed
    assert whole[f"step-{8:010d}.json"] == [8, 8.0]
    # The best checkpoint stays, though newer ones replaced others.
    assert f"step-{5:010d}.json" in whole
    assert len(whole) < 8
    for manifest, values in whole.items():
        assert values == [int(manifest[5:15]), float(manifest[5:15])]
    assert newest.unique().tolist() == [8.0]
    assert skipped == []
    assert [name.rpartition("-")[2] for name in names if name.startswith(f"step-{9:010d}")] == [
        "0of2.pt"
    ]
    # Rank 0 has removed what was begun and not completed before.
    referenced = {file for manifest in whole for file in files_of(tmp_path / manifest)}
    assert {
        name for name in names if not name.startswith(f"step-{9:010d}")
    } == referenced | whole.keys()
