"""A model in shards trains to the weights of a whole one, and any number of ranks reads its
checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore

from flyte_ddp.checkpoints.peers import Peers
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.errors import StopRequested, StorageUnavailable
from flyte_ddp.events import (
    CheckpointLoaded,
    EpochFinished,
    HistogramsTaken,
    PredictionsMade,
    RunStarted,
    from_dict,
)
from flyte_ddp.recipes import config_of
from flyte_ddp.storage import Storage
from tests.support.gang import Link, run_gang, train_recipe
from tests.support.runs import new_run

pytestmark = pytest.mark.usefixtures("server_with_compiler")

CONFIG = {
    "epochs": 2,
    # 12 splits evenly over 1, 2 and 3 ranks, and the last batch is smaller and uneven.
    "global_batch_size": 12,
    "evaluation_batch_size": 7,
    "schedule": "constant",
    "gradient_clip_norm": 0.5,
    "recipe_options": {"layers": 2, "width": 32, "heads": 2, "context": 32},
}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}  # sums over ranks in another order


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Some documents, of which `text` makes 113 windows."""
    directory = tmp_path_factory.mktemp("text")
    for number in range(20):
        lines = [f"{number * step} is {number} times {step}." for step in range(1, 11)]
        (directory / f"{number}.txt").write_text("\n".join(lines))
    return str(directory)


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory):
    return run_text(tmp_path_factory.mktemp("whole")).train(1, source=text, **CONFIG)


def run_text(directory):
    run = new_run(directory)
    run.recipe = "tests.support.text_recipe.MallocWatchingText"
    return run


def weights(state):
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module")
def resharded_run(text, tmp_path_factory):
    """An epoch on two ranks, then one on three, with micro-batches and recomputed activations."""
    directory = tmp_path_factory.mktemp("shards")
    options = {"parallel": "fsdp", "gradient_accumulation": 2, "activation_checkpointing": True}
    first = run_text(directory).train(2, source=text, **{**CONFIG, **options, "epochs": 1})
    return first, run_text(directory).train(
        3, source=text, **{**CONFIG, **options, "gradient_accumulation": 1}
    )


@pytest.mark.long
def test_shards_on_two_and_then_three_ranks_train_to_the_weights_of_one_process(
    resharded_run, whole_run
):
    first, second = resharded_run

    assert (first.started.world_size, second.started.world_size) == (2, 3)
    assert second.loaded.step == first.result.finished.step > 0
    found, expected = second.state(), whole_run.state()
    assert found.keys() == expected.keys()
    torch.testing.assert_close(weights(found), weights(expected), **TOLERANCE)
    for ours, theirs in zip(second.result.epochs, whole_run.result.epochs, strict=True):
        assert ours.test_loss == pytest.approx(theirs.test_loss, rel=1e-4)
        assert ours.metrics["accuracy"] == pytest.approx(theirs.metrics["accuracy"], abs=0.003)


@pytest.mark.long
def test_a_run_of_shards_shows_what_others_show(resharded_run, whole_run):
    def shown(run, kind):
        return [event for event in run.events if isinstance(event, kind)]

    second = resharded_run[1]
    # freed blocks go back to the kernel, as no process with a whole model lets them
    if sys.platform.startswith("linux"):
        maps = [run.result.epochs[-1].metrics["maps_blocks"] for run in (second, whole_run)]
        assert maps == [1, 0]
    assert second.started.num_parameters == whole_run.started.num_parameters
    names = [(layer.name, layer.output_shape) for layer in whole_run.started.layers]
    assert [(layer.name, layer.output_shape) for layer in second.started.layers] == names
    (histogram,) = shown(second, HistogramsTaken)
    expected = shown(whole_run, HistogramsTaken)[-1]
    sizes = [
        {name: sum(each.counts) for name, each in taken.parameters.items()}
        for taken in (histogram, expected)
    ]
    assert sizes[0] == sizes[1]
    assert histogram.gradients.keys() == expected.gradients.keys()
    num_shown = [len(shown(run, PredictionsMade)[0].predictions) for run in (second, whole_run)]
    assert num_shown[0] == num_shown[1]
    assert shown(second, EpochFinished)[0].sample
    assert len(second.result.finished.rank_peak_memory_bytes) == 3
    held = second.result.finished.rank_num_parameters
    assert (
        sum(held)
        == whole_run.started.num_parameters
        == whole_run.result.finished.rank_num_parameters[0]
    )
    assert 0 < max(held) < 0.4 * sum(held)
    assert shown(second, RunStarted)[0].config["parallel"] == "fsdp"


# Checkpoints of shards, of a model whose last layer has three rows: a fourth rank holds none of
# them.

TINY = "tests.support.recipes.Tiny"
STEPS = 9  # per epoch


def train_and_note_reads(world, store, *arguments):
    """Work of a gang: the events, and the names of the files of tensors that this rank has read."""
    names, read = [], Storage.read

    def noting(storage, name):
        names.append(name)
        return read(storage, name)

    Storage.read = noting
    return train_recipe(world, store, *arguments), [name for name in names if name.endswith(".pt")]


def train_tiny(directory, num_ranks, **options):
    """Train `Tiny` in a gang, on from what is there; return where it began, when it ended, and who
    read what.
    """
    run = new_run(directory)
    config = config_of(
        TINY, {"optimizer": "adamw", "learning_rate": 0.01, "checkpoints_to_keep": 9, **options}
    )
    given = (train_and_note_reads, TINY, config, str(run.data()), str(run.checkpoints))
    results = run_gang(num_ranks, *given)
    emitted = [from_dict(values) for values in results[0][0]]
    loaded = next(event for event in emitted if isinstance(event, CheckpointLoaded))
    return loaded, emitted[-1], [sorted(names) for _, names in results]


def files_of(manifest):
    return [entry["file"] for entry in json.loads(Path(manifest).read_text())["files"]]


def flip(file):
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


def test_checkpoints_go_from_ddp_to_4_and_to_3_ranks_of_shards(tmp_path):
    # to its end, because a slow writer leaves out a checkpoint on the way
    train_tiny(tmp_path / "whole", 1, epochs=2)
    undisturbed = CheckpointStore(str(tmp_path / "whole" / "checkpoints"), 2).load(2 * STEPS)
    _, finished, _ = train_tiny(tmp_path / "whole", 1, epochs=3)
    expected = torch.load(finished.model_state_url, weights_only=True)

    for epoch, num_ranks in enumerate((1, 4, 3), start=1):
        parallel = "ddp" if num_ranks == 1 else "fsdp"
        loaded, finished, reads = train_tiny(
            tmp_path / "run", num_ranks, epochs=epoch, parallel=parallel
        )
        assert (loaded.step, loaded.skipped) == ((epoch - 1) * STEPS, [])
        if epoch > 1:
            # Each file is read by one rank, by all ranks in turn.
            files = files_of(loaded.url)
            assert [[name for name in names if name in files] for names in reads] == [
                files[rank::num_ranks] for rank in range(num_ranks)
            ]
        newest = tmp_path / "run" / "checkpoints" / f"step-{epoch * STEPS:010d}.json"
        files = files_of(newest)
        assert len(files) == num_ranks
        if num_ranks > 1:
            assert [name.rpartition("-")[2] for name in files] == [
                f"{r}of{num_ranks}.pt" for r in range(num_ranks)
            ]
    torch.testing.assert_close(
        torch.load(finished.model_state_url, weights_only=True), expected, **TOLERANCE
    )

    flip(newest.with_name(files[1]))
    state, url, (line,) = CheckpointStore(str(newest.parent), 2).load_latest()
    assert url.endswith(f"step-{2 * STEPS:010d}.json")
    assert f"{newest} is damaged and was renamed to skipped-" in line
    assert f"{files[1]}: its checksum is not the one" in line
    assert len(list(newest.parent.glob(f"skipped-*-step-{3 * STEPS:010d}*"))) == 4
    for part in ("model", "optimizer"):
        torch.testing.assert_close(state[part], undisturbed[part], **TOLERANCE)


def test_sgd_goes_from_ddp_to_shards_and_back(tmp_path):
    """Its fused kernel takes no split tensors, so a checkpoint's may not replace that of the
    run.
    """
    for epoch, (num_ranks, parallel) in enumerate(((1, "ddp"), (2, "fsdp"), (1, "ddp")), start=1):
        loaded, finished, _ = train_tiny(
            tmp_path, num_ranks, epochs=epoch, parallel=parallel, optimizer="sgd"
        )
        assert loaded.step == (epoch - 1) * STEPS
        assert finished.step == epoch * STEPS


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


def save_shards(store, rank, step, best=False):
    state = {"shards": [([2 * rank, 0], torch.full((2, 300), float(step)))]}
    if rank == 0:
        state |= {"weight": torch.empty(4, 300, device="meta"), "step": step}
    store.save(state, step, best)


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
        save_shards(checkpoints, world.rank, step, best=step in (3, 5))
        time.sleep(0.05)
    checkpoints.wait()
    assert len(checkpoints.memory._free) <= 3
    if world.rank == 1:
        world.all_gather(0.0)
        Storage.write = die
    else:
        whole = {
            name: values_of(checkpoints, name)
            for name in checkpoints.storage.names()
            if name.endswith(".json")
        }
        world.all_gather(0.0)  # until now the other one is alive
    save_shards(checkpoints, world.rank, 9)
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
    assert f"step-{5:010d}.json" in whole  # the best one, though newer ones replaced others
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
