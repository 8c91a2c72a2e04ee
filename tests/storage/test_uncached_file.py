"""Files that are written around the kernel's cache, on a real disk and in memory."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sys
import threading

import pytest

from flyte_ddp.checkpoints.memory import MappedFile, MemoryFile
from flyte_ddp.storage import Storage, uncached_file
from flyte_ddp.storage.uncached_file import BLOCK, DIRECT, UncachedFile

SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4097]


def write(path, contents, piece=1 << 20):
    """Write in pieces of changing sizes; return whether direct writes were used."""
    sizes, begin = random.Random(0), 0
    with UncachedFile(str(path)) as file:
        while begin < len(contents):
            end = begin + sizes.randint(1, piece)
            file.write(contents[begin:end])
            begin = end
        return bool(fcntl.fcntl(file, fcntl.F_GETFL) & DIRECT)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [1 << 20, 9 << 20])
def test_what_was_written_is_in_the_file(tmp_path, size, piece):
    contents = random.Random(1).randbytes(size)
    write(tmp_path / "file", contents, piece)
    assert (tmp_path / "file").read_bytes() == contents


@pytest.mark.parametrize(
    "open_file",
    [lambda path: UncachedFile(path), lambda path: MappedFile(MemoryFile())],
    ids=["on a disk", "in memory"],
)
def test_other_threads_run_while_a_file_is_written(tmp_path, open_file):
    def runs_beside():
        has_begun, has_run = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: has_begun.wait() and has_run.set())
        thread.start()
        with open_file(str(tmp_path / "file")) as file:
            has_begun.set()
            file.write(bytes(BLOCK - 1))  # goes to the disk only at the end
            seen = has_run.is_set()
        thread.join()
        return seen

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # seconds: this thread is left alone where it does not give way
    try:
        # the other thread may come too late for some
        assert any(runs_beside() for _ in range(200))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("refusal", ["the flag", "the write", "the rest of a write"])
def test_a_file_system_without_direct_writes_gets_usual_ones(tmp_path, monkeypatch, refusal):
    set_flag, write_bytes = fcntl.fcntl, os.write

    def refuse_flag(file, command, flags=0):
        if refusal == "the flag" and command == fcntl.F_SETFL and flags:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flag(file, command, flags)

    def refuse(file, data):
        if set_flag(file, fcntl.F_GETFL) & DIRECT:
            if refusal == "the write" or len(data) < BLOCK:
                raise OSError(errno.EINVAL, "Invalid argument")
            return write_bytes(file, data[:4096])
        return write_bytes(file, data)

    monkeypatch.setattr(uncached_file.fcntl, "fcntl", refuse_flag)
    monkeypatch.setattr(uncached_file.os, "write", refuse)
    contents = random.Random(1).randbytes(2 * BLOCK + 5)
    assert write(tmp_path / "file", contents) is False
    assert (tmp_path / "file").read_bytes() == contents


def test_a_full_disk_ends_the_write_and_leaves_nothing(tmp_path, monkeypatch):
    def no_room(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(uncached_file.os, "write", no_room)
    place = Storage(str(tmp_path), timeout=0)
    with pytest.raises(Exception, match="No space left on device"):
        place.write("state.pt", lambda file: file.write(bytes(BLOCK)))
    assert os.listdir(tmp_path) == []
