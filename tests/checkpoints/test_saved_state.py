"""Whatever `save` accepts is read back equal; the rest is refused before it is written."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import pathlib
import random
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.checkpoints.assembly import fill
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.errors import ConfigError, StopRequested
from flyte_ddp.events import CheckpointWritten, EpochFinished
from flyte_ddp.launch.control.stored_steps import StoredSteps
from flyte_ddp.rank.states import check_kind
from flyte_ddp.recipes import Recipe
from flyte_ddp.training.metrics import read_figures
from flyte_ddp.training.progress import Progress
from tests.support.gang import session_of
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

Pair = collections.namedtuple("Pair", "first second")


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


def save(directory, state, step=1):
    store = CheckpointStore(str(directory), 9)
    store.save({"state": state}, step, best=False)
    store.wait()


def roundtrip(directory, state):
    save(directory, state)
    found, _, skipped = CheckpointStore(str(directory), 1).load_latest()
    assert skipped == []
    return found["state"]


NUMPY_STATE = np.random.RandomState(3).get_state()
READABLE = {
    "numbers": (
        {
            "a": 1,
            2: 1.5,
            "inf": float("inf"),
            "c": 1 + 2j,
            "yes": True,
            "none": None,
            "big": 1 << 200,
        },
        None,
    ),
    "texts": (["ä", b"x" * 300, bytearray(b"y")], None),
    "containers": ([(), (1, [2, {"a": (3,)}]), {1, 2}, collections.OrderedDict(b=1, a=2)], None),
    "torch's own": ([torch.float16, torch.device("cpu"), torch.Size([2, 3])], None),
    "random state": (random.Random(1).getstate(), None),
    "NumPy scalars": (
        [
            np.float64(0.5),
            np.float32(0.25),
            np.int64(3),
            np.uint8(4),
            np.bool_(True),
            np.str_("a"),
            {np.int64(1): 2},
        ],
        [0.5, 0.25, 3, 4, True, "a", {1: 2}],
    ),
    "other mappings": (
        [collections.defaultdict(list, a=[1]), collections.Counter("aab")],
        [{"a": [1]}, {"a": 2, "b": 1}],
    ),
}


@pytest.mark.parametrize("kind", READABLE)
def test_a_state_of_plain_values_is_read_back_equal(tmp_path, kind):
    state, expected = READABLE[kind]
    expected = state if expected is None else expected
    found = roundtrip(tmp_path, state)
    assert found == expected
    assert repr(found) == repr(expected)  # True is not 1, and 3 is not 3.0


ARRAYS = {
    "float": np.arange(6.0).reshape(2, 3),
    "backwards": np.arange(4)[::-1],
    "read-only": np.broadcast_to(np.float32(1), (2, 2)),
    "scalar": np.array(3),
    "big-endian": np.arange(3, dtype=">i4"),
    "random": NUMPY_STATE[1],
}


def test_arrays_come_back_as_tensors(tmp_path):
    found = roundtrip(tmp_path, ARRAYS)
    assert {type(each) for each in found.values()} == {torch.Tensor}
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in ARRAYS.items()
    }


BASE = torch.randn(4, 6)
COMPLEX = torch.tensor([1 + 3j, 2 - 1j])
TENSORS = {
    "view": BASE[1:3, ::2],
    "transposed": BASE.t(),
    "expanded": BASE[:1].expand(5, 6),
    "overlapping": torch.arange(4.0).as_strided((3, 2), (1, 1)),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(True),
    "channels last": torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last),
    "complex": COMPLEX,
    "conjugate": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
    "both": torch.view_as_real(COMPLEX.conj().resolve_conj()).neg(),
    "half": BASE.bfloat16(),
    "float8": BASE.to(torch.float8_e4m3fn),
    "uint16": torch.ones(2, dtype=torch.uint16),
    "parameter": torch.nn.Parameter(BASE),
    "buffer": torch.nn.Buffer(BASE[0]),
    "of the graph": torch.nn.Parameter(BASE) * 2,
    "quantized": torch.quantize_per_tensor(BASE, 0.1, 3, torch.qint8),
    "sparse": torch.eye(3).to_sparse(),
    "compressed": torch.eye(3).to_sparse_csr(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_kind_is_read_back_equal(name, tmp_path):
    tensor = TENSORS[name].detach()
    found = roundtrip(tmp_path, tensor).detach()
    torch.testing.assert_close(found, tensor, rtol=0, atol=0)
    if name == "transposed":
        assert found.stride() == tensor.stride()


def test_a_state_is_that_of_the_call_whatever_changes_afterwards(tmp_path):
    tensor, numbers, key = torch.ones(2), np.ones(2), torch.ones(2)
    state = {
        "text": bytearray(b"abc"),
        "array": numbers,
        "list": [1],
        "deep": {"x": [{"y": (bytearray(b"d"),)}]},
    }
    state |= {
        "set": {tensor, (tensor, 1)},
        key: "of a tensor",
        "zero": np.array(1.0),
        "sparse": torch.eye(2).to_sparse(),
    }
    store = CheckpointStore(str(tmp_path), 1)
    begin, waiting = store.queue.add, []
    store.queue.add = waiting.append
    store.save({"state": state}, 1, best=False)
    for each in (tensor, key):
        each.fill_(7)
    numbers[:], state["zero"][...] = 7, 7
    state["text"][:], state["deep"]["x"][0]["y"][0][:] = b"xyz", b"z"
    state["list"].append(2)
    state["sparse"].values().fill_(7)
    state["new"] = 1
    begin(waiting[0])
    store.wait()
    found = CheckpointStore(str(tmp_path), 1).load_latest()[0]["state"]
    assert (found["text"], found["deep"], found["list"]) == (b"abc", {"x": [{"y": (b"d",)}]}, [1])
    assert found["array"].tolist() == [1, 1]
    assert found["zero"].item() == 1
    assert torch.equal(found["sparse"].to_dense(), torch.eye(2))
    assert [
        (each if isinstance(each, torch.Tensor) else each[0]).tolist() for each in found["set"]
    ] == [[1, 1]] * 2
    assert [name.tolist() for name, value in found.items() if value == "of a tensor"] == [[1, 1]]
    assert "new" not in found


def test_views_of_one_memory_with_other_types_are_read_back_equal(tmp_path):
    numbers = torch.arange(4.0)
    state = [
        numbers,
        numbers.view(torch.int32),
        numbers[1:].view(torch.uint8),
        COMPLEX,
        torch.view_as_real(COMPLEX),
    ]
    for found, expected in zip(
        roundtrip(tmp_path, [*state, numbers[2:]]), [*state, numbers[2:]], strict=True
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("saved", "into", "is_loaded"),
    [
        (torch.float32, torch.float64, True),
        (torch.bfloat16, torch.float32, True),
        (torch.int64, torch.int64, True),
        (torch.float32, torch.int64, False),
        (torch.int64, torch.uint8, False),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.int64, torch.float32, False),
        (torch.bool, torch.float32, False),
        (torch.float32, torch.complex64, False),
    ],
    ids=str,
)
def test_a_tensor_is_loaded_into_one_that_holds_all_its_values(saved, into, is_loaded):
    target, state = {"a": torch.zeros(2, dtype=into)}, {"a": torch.ones(2, dtype=saved)}
    expected = f"a tensor of {saved}, as the checkpoint has, got {into}"
    refused = pytest.raises(ConfigError, match=rf"^session.load: into\['a'\]: expected {expected}$")
    with contextlib.nullcontext() if is_loaded else refused:
        fill(target, state)
    assert target["a"].tolist() == [is_loaded] * 2


class Wrapped(torch.Tensor):
    pass


UNREADABLE = {
    "namespace": (argparse.Namespace(a=1), "Namespace"),
    "dataclass": (Settings(), "Settings"),
    "named tuple": (Pair(1, 2), "Pair"),
    "enum": (Color.RED, "Color"),
    "subclass": (Text("a"), "Text"),
    "path": (pathlib.Path("a"), "PosixPath"),
    "frozenset": (frozenset([1]), "frozenset"),
    "queue": (collections.deque([1]), "deque"),
    "function": (len, "builtin_function_or_method"),
    "class": (int, "type"),
    "array of objects": (np.array([{}]), "ndarray"),
    "array of texts": (np.array(["a"]), "ndarray"),
    "date": (np.datetime64("2026-01-01"), "datetime64"),
    "nested": (
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "Tensor .*: save whole tensors",
    ),
    "huge": (1 << 3000, "int"),
    "masked": (np.ma.array([1, 2], mask=[False, True]), "MaskedArray"),
    "meta": (torch.ones(2, device="meta"), "Tensor .*: save whole tensors"),
    # A library's own type, such as a DTensor in a whole state.
    "wrapped": (torch.ones(2).as_subclass(Wrapped), "Wrapped .*: save whole tensors"),
    "a key": ({Color.RED: 1}, "a Color"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_could_not_be_read_back_is_refused_with_its_place_and_type(tmp_path, kind):
    value, name = UNREADABLE[kind]
    place = r"state\['best'\]\[1\]"
    with pytest.raises(ConfigError, match=rf"^save: {place}: expected [^\n]*{name}[^\n]*$"):
        save(tmp_path, {"best": [0, value]})
    assert list(tmp_path.iterdir()) == []


# Not damage

NO_MEMORY = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        (NO_MEMORY, MemoryError, "could not be read for want of memory"),
        (ValueError("another pickle protocol"), ConfigError, "another pickle protocol; .* whole"),
    ],
    ids=["memory", "older torch"],
)
def test_an_error_of_a_whole_file_ends_the_attempt_and_touches_nothing(
    tmp_path, monkeypatch, fails, error, message
):
    for step in (1, 2):
        save(tmp_path, torch.ones(3), step)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", mock.Mock(side_effect=fails))
        with pytest.raises(error, match=rf"^[^\n]*{message}[^\n]*$"):
            CheckpointStore(str(tmp_path), 5).load_latest()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert CheckpointStore(str(tmp_path), 5).load_latest()[1].endswith("step-0000000002.json")


def test_an_older_checkpoint_of_another_format_is_refused_and_stays(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("flyte_ddp.checkpoints.writer.FORMAT", 99)
        save(tmp_path, 1)
    with pytest.raises(ConfigError, match="expected format 4, got format 99; the file is whole"):
        CheckpointStore(str(tmp_path), 5).load_latest()
    save(tmp_path, 2, step=2)
    store = CheckpointStore(str(tmp_path), 1)
    store.load_latest()
    for step in (3, 4):  # The checkpoint in format 99 does not prevent the removal of others.
        store.save({"state": step}, step, best=False)
        store.wait()
    left = sorted(path.name for path in tmp_path.glob("*.json"))
    assert left == ["step-0000000001.json", "step-0000000004.json"]


# A recipe's metrics


@pytest.mark.parametrize("value", [np.float64(0.5), torch.tensor(0.5, requires_grad=True), 0.5])
def test_a_recipes_figures_may_be_numbers_of_any_kind(tmp_path, value, monkeypatch):
    trainer = new_trainer(new_run(tmp_path), epochs=1)
    monkeypatch.setattr(
        trainer.parallelism.recipe, "figures", lambda epoch: {"f1": value}, raising=False
    )
    progress = trainer.fit()
    assert progress.epochs[0].metrics.keys() == {"accuracy", "f1"}
    assert repr(progress.epochs[0].metrics["f1"]) == "0.5"
    state, _, _ = trainer.checkpoints.store.load_latest()
    assert Progress.from_dict(state["progress"]).epochs == progress.epochs


@pytest.mark.parametrize("value", [[0.5, 0.6], "0.5", 10**400, None])
def test_a_figure_that_is_no_number_is_named(value):
    recipe, epoch = Recipe(), EpochFinished(1, 1, 0.5, 0.5, 0.1, 1.0, 1.0, 1.0)
    recipe.figures = lambda epoch: {"f1": value}
    with pytest.raises(ConfigError, match="Recipe.figures: f1: expected a number, got"):
        read_figures(recipe, epoch)


@pytest.mark.parametrize("num_epochs", [0, 1, 1000])
def test_a_checkpoint_has_the_epochs_in_one_text_however_many_there_are(num_epochs):
    progress, others = Progress(), (1e-300, 1.0, 1 / 3, 0.0)
    for number in range(num_epochs):
        known = {"metrics": {"f1": number / 7}, "rank_phase_seconds": {"data": [0.1]}}
        progress.note(
            EpochFinished(1, 9, 0.1, float("inf"), *others, sample="a\u2028b\n\x0c", **known)
        )
    values = progress.to_dict()
    assert "rank_phase_seconds" not in values["epochs"]  # version 0.2.0 does not read it
    bounded = {"losses", "left_out", "rewinds"}
    assert {type(values[name]) for name in values.keys() - bounded} <= {int, float, str}
    assert Progress.from_dict(values) == progress


# Contents of a checkpoint, and the newest one


def stored_steps_of(directory):
    return sorted(int(path.stem.partition("-")[2]) for path in directory.glob("step-*.json"))


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans())
def test_the_newest_state_is_the_one_that_was_saved_last(steps, is_resumed):
    with tempfile.TemporaryDirectory() as directory:
        session, _ = session_of(checkpoints=directory)
        for number, step in enumerate(steps):
            if is_resumed:
                session, _ = session_of(checkpoints=directory)
                session.saver.load()
            session.saver.save({"number": number}, step)
            session.saver.wait()
        assert session.saver.load() == {"number": len(steps) - 1}
        fresh, _ = session_of(checkpoints=directory)
        assert fresh.saver.load() == {"number": len(steps) - 1}
        assert max(stored_steps_of(Path(directory))) == steps[-1]


def test_a_step_that_goes_back_is_stored_where_others_are_in_memory(tmp_path, monkeypatch):
    session, _ = session_of(checkpoints=tmp_path)
    session.saver._has_memory = True
    for step, in_memory in ((100, False), (101, True), (50, True), (51, True)):
        session.saver.save({"step": step}, step, in_memory=in_memory)
        session.saver.wait()
    assert stored_steps_of(tmp_path) == [50]


def test_the_driver_knows_that_a_later_step_was_replaced():
    stored = StoredSteps(has_store=True, is_kept=True, steps={1, 100})
    stored.note(CheckpointWritten(50, "", best=False), is_in_memory=False)
    assert (stored.steps, stored.newest) == ({1, 50}, 50)


def test_a_functions_checkpoint_is_no_recipes_and_the_other_way_round(tmp_path):
    run = new_run(tmp_path / "function")
    session, _ = session_of(checkpoints=run.checkpoints)
    session.saver.save({"weights": torch.ones(2)}, 3)
    session.saver.wait()
    trainer = new_trainer(run)
    expected = "checkpoints: expected a place with those of a recipe, got .*, which is that of a f"
    with pytest.raises(ConfigError, match=expected):
        trainer.checkpoints.resume()

    run = new_run(tmp_path / "recipe")
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=2).fit()
    session, _ = session_of(checkpoints=run.checkpoints)
    expected = "expected a place with those of a function, got .*json, which is that of recipe Tiny"
    with pytest.raises(ConfigError, match=expected):
        session.saver.load()


@pytest.mark.parametrize("is_function", [False, True])
def test_a_checkpoint_of_version_0_1_0_is_refused_in_one_line(is_function):
    state = {"step": 3, "position": {}} if is_function else {"recipe": ["Tiny", "1"]}
    with pytest.raises(ConfigError, match=r"^checkpoints: expected those of version 0\.2\.0 or l"):
        check_kind(state, "runs/x", is_function)


@pytest.mark.parametrize(
    ("saved", "got"),
    [("", "what a function has saved by itself"), ("trainer.fit", "that of trainer.fit")],
)
def test_a_frameworks_loop_goes_on_from_its_own_checkpoints_alone(tmp_path, saved, got):
    before, _ = session_of(checkpoints=tmp_path)
    before.saver.trainer = saved
    before.saver.save({"generators": []} if saved else {"weights": [1.0]}, 3)
    before.saver.wait()
    session, _ = session_of(checkpoints=tmp_path)
    assert session.saver.load() is not None  # a look by the function
    session.saver.trainer = "prepare"
    with pytest.raises(ConfigError, match=f"with those of prepare, got .*, which is {got}: give"):
        session.saver.load()
    session.saver.trainer = saved
    assert session.saver.load() is not None
