"""Checkpoints outlive whoever wrote them: a run killed at any moment goes on to the weights it
would have had.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from flyte_ddp.checkpoints import stored_steps
from flyte_ddp.checkpoints.files import portable, save_state
from flyte_ddp.checkpoints.staging import StagingMemory
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.checkpoints.writer import WRITER_NICENESS
from flyte_ddp.errors import CheckpointError, ConfigError, StorageUnavailable
from flyte_ddp.recipes import get_recipe
from flyte_ddp.storage import Storage
from tests.support.dask_runs import eventually
from tests.support.errors import raises_one_line
from tests.support.runs import flip, new_run


def _state(number=0.0):
    return {
        "model": {"weight": torch.full((50,), float(number))},
        "progress": {"step": number, "names": ["a", None]},
    }


def _store(directory, *steps, num_kept=10, best=()):
    """A store with checkpoints of `steps`, each holding its number."""
    store = CheckpointStore(str(directory), num_kept)
    for step in steps:
        store.save(_state(step), step, best=step in best)
        store.wait()
    return store


def _save(store, step, best=False):
    store.save(_state(step), step, best)
    store.wait()


def _latest(store):
    """(step of the newest usable checkpoint or None, why newer ones were passed over)."""
    state, url, skipped = store.load_latest()
    assert (state is None) == (url == "")
    return state and state["progress"]["step"], skipped


def _files(store, step):
    """The tensors and the manifest of `step`."""
    manifest = Path(store.storage.root) / f"step-{step:010d}.json"
    return manifest.parent / json.loads(manifest.read_text())["files"][0]["file"], manifest


def _cut(file):
    file.write_bytes(file.read_bytes()[:-100])


# The store


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_the_thread_that_writes_yields_its_core_to_the_training(tmp_path):
    before = set(threading.enumerate())
    _store(tmp_path, 1)
    (writer,) = (
        thread for thread in set(threading.enumerate()) - before if thread.name == "checkpoint"
    )
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert os.getpriority(os.PRIO_PROCESS, writer.native_id) == min(19, own + WRITER_NICENESS)


def test_an_empty_or_missing_place_has_no_checkpoint(tmp_path):
    assert _latest(_store(tmp_path / "nowhere")) == (None, [])
    with pytest.raises(CheckpointError, match="step-0000000007"):
        _store(tmp_path).load(7)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda tensors, manifest: _cut(tensors), " bytes that were written, got "),
        (lambda tensors, manifest: flip(tensors), "with another checksum"),
        (lambda tensors, manifest: tensors.unlink(), "is missing"),
        (lambda tensors, manifest: tensors.write_bytes(b""), "got 0"),
        (lambda tensors, manifest: _cut(manifest), "JSONDecodeError"),
        (lambda tensors, manifest: manifest.write_text("[]"), "TypeError"),
        (lambda tensors, manifest: manifest.write_text('{"format": 4}'), "KeyError"),
        (lambda tensors, manifest: manifest.write_text("{}"), "KeyError"),
        (lambda tensors, manifest: manifest.write_text('{"files": []}'), "names no file"),
    ],
    ids=[
        "truncated",
        "flipped",
        "missing",
        "empty",
        "manifest-truncated",
        "manifest-list",
        "manifest-bare",
        "manifest-empty",
        "manifest-without-files",
    ],
)
def test_a_damaged_checkpoint_is_named_skipped_and_the_one_before_used(tmp_path, damage, reason):
    store = _store(tmp_path, 3, 6, 9)
    damage(*_files(store, 9))
    step, skipped = _latest(store)

    assert step == 6
    assert len(skipped) == 1
    assert f"{tmp_path}/step-0000000009" in skipped[0]
    assert reason in skipped[0]
    with pytest.raises(CheckpointError, match="step-0000000009"):
        store.load(9)
    aside = {file: file.read_bytes() for file in tmp_path.glob("skipped-*")}
    assert any(
        file.name.endswith("step-0000000009.json") and file.name in skipped[0] for file in aside
    )
    assert len(aside) == (2 if "missing" not in reason else 1)
    for later in range(10, 15):
        _save(store, later)
    assert _latest(store) == (14, [])
    # for people, never deleted
    assert {file: file.read_bytes() for file in tmp_path.glob("skipped-*")} == aside


def test_the_error_of_a_full_disk_is_raised_and_torchs_own_checksums_stay_for_users(tmp_path):
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left") as raised,
    ):
        save_state(_state(1), full, with_crc32=False)
    assert raised.value.errno == errno.ENOSPC
    assert torch.serialization.get_crc32_options()


def test_no_code_is_run_from_a_checkpoint(tmp_path, monkeypatch):
    class Harmful:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "was-run"),))

    store = _store(tmp_path / "checkpoints", 3)
    monkeypatch.setattr("flyte_ddp.checkpoints.store.collect", lambda state, _: {"values": state})
    store.save({"model": Harmful()}, 6, best=False)
    store.wait()

    with pytest.raises(ConfigError, match="UnpicklingError"):
        store.load_latest()
    assert not (tmp_path / "was-run").exists()


def _kept(store):
    return sorted(stored_steps(store.storage.url))


def test_only_the_newest_and_the_best_are_kept(tmp_path):
    store = _store(tmp_path, 1, 2, 3, 4, 5, 6, num_kept=2, best=(1, 3))

    assert _kept(store) == [3, 5, 6]  # 3 was better than 1
    assert len(store.storage.names()) == 2 * 3
    for step in (3, 5, 6):
        assert store.load(step)["progress"]["step"] == step


def test_remains_of_killed_writers_are_removed_with_the_next_save(tmp_path):
    _store(tmp_path, 1, 2)
    store = CheckpointStore(str(tmp_path), 10)
    store.load_latest()
    _files(store, 1)[1].unlink()
    (tmp_path / "step-0000000000.json").write_text("{")
    remains = [
        f"step-0000000003-0badcafe-0of1.pt.{32 * '0'}.tmp",
        "step-0000000002-00c0ffee-1of2.pt",
        "step-0000000004-00c0ffee-0of1.pt",
    ]
    others = [
        "step-0000000000-0badcafe-0of1.pt",  # a part of a checkpoint that cannot be read
        "skipped-1-step-0000000001-00c0ffee-0of1.pt",
        *("step-notes.json", "step-5.json", "step-00000000012.json", "step-0000000001.json.tmp"),
        *("step-x.pt.tmp", "step-1.pt", "step-0000000005-notes.pt", "notes.txt"),
    ]
    for name in (*remains, *others):
        (tmp_path / name).write_bytes(b"tensors")
    _save(store, 4)

    assert _kept(store) == [0, 2, 4]
    assert not any((tmp_path / name).exists() for name in remains)
    assert all((tmp_path / name).exists() for name in others)
    assert len(store.storage.names()) == 2 * 2 + 1 + len(others)
    assert _latest(CheckpointStore(str(tmp_path), 1)) == (4, [])


class Faulty:
    """Fails operations on a store as a network would, if `fails` returns True for their name and
    path.
    """

    def __init__(self, monkeypatch, storage, fails):
        self.fails = fails
        self.calls = []
        self.failed = []  # the calls that were made to fail
        for name in ("cat_file", "ls", "pipe_file", "open", "rm_file"):
            monkeypatch.setattr(
                storage.file_system, name, self.wrapped(name, getattr(storage.file_system, name))
            )

    def wrapped(self, name, function):
        def call(path, *arguments, **options):
            self.calls.append((name, path))
            if self.fails(name, path):
                self.failed.append((name, path))
                raise ConnectionError("Connection refused")
            return function(path, *arguments, **options)

        return call


@pytest.fixture
def memory():
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize("failing", ["ls", "cat_file manifest", "cat_file tensors"])
def test_a_store_that_cannot_be_read_is_waited_for_and_loses_nothing(memory, monkeypatch, failing):
    _store(memory, 10, 2000, 3000)
    store = CheckpointStore(memory, 1, timeout=0.5)
    names = sorted(store.storage.names())
    suffix = {"ls": "", "cat_file manifest": ".json", "cat_file tensors": ".pt"}[failing]
    faulty = Faulty(
        monkeypatch, store.storage, lambda name, path: name in failing and path.endswith(suffix)
    )
    with raises_one_line(
        StorageUnavailable, match="could not be reached for 0.5 s: ConnectionError"
    ):
        store.load_latest()

    faulty.fails = lambda name, path: (
        len(faulty.calls) < 5 and name in failing and path.endswith(suffix)
    )
    faulty.calls.clear()
    store = CheckpointStore(memory, 1, timeout=60)
    assert _latest(store) == (3000, [])
    assert len(faulty.calls) > 4
    assert sorted(store.storage.names()) == names


def test_only_checkpoints_of_this_run_are_deleted(tmp_path):
    _store(tmp_path, 3, 4, 5, 6, best=(3,))
    store = CheckpointStore(str(tmp_path), 2)
    assert _latest(store) == (6, [])
    for step in range(7, 13):
        _save(store, step)
    assert _kept(store) == [3, 11, 12]

    store = CheckpointStore(str(tmp_path), 1)  # the store of a run that has read nothing
    for step in (7, 8):
        _save(store, step)
    assert _kept(store) == [3, 8, 11, 12]
    for step in _kept(store):
        assert store.load(step)["progress"]["step"] == step


# Saving does not wait for the store


class Gate:
    """Holds every write of tensors to a store until it is opened."""

    def __init__(self, monkeypatch):
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        write = Storage.write

        def gated(storage, name, contents, *arguments):
            if name.endswith(".pt"):
                self.is_reached.set()
                assert self.is_open.wait(60)
            write(storage, name, contents, *arguments)

        monkeypatch.setattr(Storage, "write", gated)


def test_save_never_waits_and_keeps_the_newest_and_the_best_state(tmp_path, monkeypatch):
    """In memory there are never more than one being written, one that waits and the best one."""
    gate = Gate(monkeypatch)
    store = CheckpointStore(str(tmp_path), 10)
    for step in range(1, 9):
        store.save(_state(step), step, best=step in (3, 5))
        assert gate.is_reached.wait(60)
    assert not gate.is_open.is_set()
    gate.is_open.set()
    store.wait()

    assert _kept(store) == [1, 5, 8]
    assert all(store.load(step)["progress"]["step"] == step for step in _kept(store))
    assert len(store.staging._free) <= 3


def test_waiting_sends_heartbeats_and_ends_when_no_bytes_move(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    store = CheckpointStore(str(tmp_path), 2, timeout=1.5)
    stored = 0
    monkeypatch.setattr(Storage, "stored_bytes", property(lambda storage: stored))
    store.save(_state(1), 1, best=False)
    signs = []

    def note():
        nonlocal stored
        signs.append(time.monotonic())
        # by another part of the upload; from then on the same parts are uploaded again and again
        stored = len(signs) if len(signs) < 15 else len(signs) % 3

    with pytest.raises(
        StorageUnavailable,
        match=(
            r"could not be written to for 1.5 s "
            r"\(store_timeout\)"
        ),
    ):
        store.wait(note)
    assert len(signs) >= 15
    with pytest.raises(StorageUnavailable):
        store.save(_state(2), 2, best=False)
    gate.is_open.set()


def test_saves_continue_during_an_outage_with_one_log_line_and_are_announced_when_whole(
    memory, monkeypatch, caplog
):
    announced = []
    store = CheckpointStore(
        memory,
        2,
        report=lambda is_busy, written: written and announced.append((*written, _kept(store))),
    )
    faulty = Faulty(
        monkeypatch,
        store.storage,
        lambda name, path: name == "pipe_file" and path.endswith(".json"),
    )
    url = store.save(_state(1), 1, best=True)
    assert eventually(lambda: faulty.failed)
    store.save(_state(2), 2, best=False)  # replaced by the next one, as it waits
    last_url = store.save(_state(3), 3, best=False)
    assert announced == []
    faulty.fails = lambda name, path: False
    store.wait()

    assert announced == [(1, url, True, [1]), (3, last_url, False, [1, 3])]
    away, back = [
        line for record in caplog.records if (line := record.getMessage()).startswith(memory)
    ]
    assert "cannot be reached" in away
    assert "answers again" in back


def test_a_failed_deletion_does_not_end_the_run(memory, monkeypatch):
    store = _store(memory, 1)
    Faulty(monkeypatch, store.storage, lambda name, path: name == "rm_file")
    store.retention.num_kept = 1
    for step in (2, 3):
        _save(store, step)
    monkeypatch.undo()
    _save(store, 4)

    assert _kept(store) == [4]
    assert len(store.storage.names()) == 2


def test_a_copied_state_keeps_shared_tensors_shared():
    tied = torch.rand(100, 10)
    state = OrderedDict(a=tied, b=tied.t(), c=[tied[5:], 3], d=torch.tensor(2.0))
    state._metadata = {"": {"version": 2}}
    memory = StagingMemory()
    whole, buffers = memory.copy({"model": state})
    copy = whole["model"]
    before = {name: tied.clone() for name in "a"}
    tied.zero_()

    assert copy._metadata == {"": {"version": 2}}
    assert torch.equal(copy["a"], before["a"])
    assert torch.equal(copy["b"], before["a"].t())
    assert torch.equal(copy["c"][0], before["a"][5:])
    assert (copy["c"][1], float(copy["d"])) == (3, 2.0)
    assert copy["a"].untyped_storage().data_ptr() == copy["b"].untyped_storage().data_ptr()
    # The next state is copied into other memory while this one is in use, and into the same
    # afterwards.
    address = copy["a"].data_ptr()
    assert memory.copy({"model": state})[0]["model"]["a"].data_ptr() != address
    assert torch.equal(copy["a"], before["a"])
    del whole, copy, buffers
    assert memory.copy({"model": state})[0]["model"]["a"].data_ptr() == address
    assert memory.copy({"model": {"a": torch.ones(7)}})[0]["model"]["a"].tolist() == [1.0] * 7


def test_a_checkpoint_saved_again_is_whole_at_every_moment(tmp_path, monkeypatch):
    store = _store(tmp_path, 3, num_kept=1)
    seen = []
    write = Storage.write

    def observe(storage, name, contents, *arguments):
        write(storage, name, contents, *arguments)
        seen.append(_latest(CheckpointStore(str(tmp_path), 1)))

    monkeypatch.setattr(Storage, "write", observe)
    store.save(_state(3), 3, best=True)
    store.wait()

    assert seen == [(3, [])] * 2
    assert len(store.storage.names()) == 2


def test_a_refused_write_is_raised_at_the_next_save(tmp_path):
    (tmp_path / "file").write_text("")
    store = CheckpointStore(str(tmp_path / "file" / "below"), 2)
    store.save(_state(), 1, best=False)

    with pytest.raises(ConfigError, match="file/below.*NotADirectoryError"):
        store.wait()
    with pytest.raises(ConfigError, match="file/below.*NotADirectoryError"):
        store.save(_state(), 2, best=False)


def test_a_portable_state_has_copies_on_the_cpu_in_the_default_format(tmp_path):
    weight = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = portable({"weight": weight, "extra": 3})
    torch.save(state, tmp_path / "state.pt")
    weight.zero_()
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)

    assert loaded["extra"] == 3
    assert loaded["weight"].is_contiguous()
    assert loaded["weight"].any()


@pytest.fixture
def small_disk(tmp_path):
    """A file system with space for one checkpoint of `Tiny`, of 58 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.long
def test_a_full_disk_is_named_at_once_and_does_not_fail_a_training_that_has_finished(
    tmp_path, small_disk, monkeypatch
):
    # With faster steps some saves are skipped, and the disk is never full.
    monkeypatch.setenv("STEP_SECONDS", "0.1")
    run, url = new_run(tmp_path), small_disk / "run"
    run.train(
        1,
        checkpoints=str(url),
        epochs=2,
        checkpoint_interval=4,
        checkpoints_to_keep=50,
        store_timeout=5.0,
    )
    assert run.result.finished.step == 18
    assert run.state().keys() == get_recipe(run.recipe).model().state_dict().keys()
    assert len(list(url.glob("step-*.json"))) <= 2  # the newest and the best: the others made room
    named = (
        f"the disk of {url} is full: OSError: [Errno 28] No space left on device; waiting for "
        "space there"
    )
    assert f"[rank 0] {named}" in run.lines


def test_a_disk_with_room_for_two_checkpoints_and_a_half_gets_the_newest(
    tmp_path, monkeypatch, caplog
):
    write, fits = Storage._write, []

    def write_if_it_fits(storage, path, contents):
        sizes = [file.stat().st_size for file in tmp_path.iterdir()]
        fits.append(not path.endswith(".pt") or sum(sizes) <= 1.6 * max(sizes, default=0))
        if not fits[-1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(storage, path, contents)

    monkeypatch.setattr(Storage, "_write", write_if_it_fits)
    store = CheckpointStore(str(tmp_path), 2)
    for step in range(1, 8):
        store.save({"weights": torch.ones(1000) * step, "step": step}, step, best=False)
        store.wait()
        assert (tmp_path / f"step-{step:010d}.json").exists()
    assert fits.count(False) == 1
    assert [message.partition(":")[0] for message in caplog.messages] == [
        f"the disk of {tmp_path} is full",
        "the disk is full",
        f"{tmp_path} has space again after 0 s",
    ]
