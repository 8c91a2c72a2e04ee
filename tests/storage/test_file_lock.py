"""Locks of files end with their holder, whatever was forked meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow
import pytest

from flyte_ddp.data import Shards
from flyte_ddp.errors import FileChanged
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.storage import Storage
from flyte_ddp.storage.file_lock import lock_file
from tests.support.image_store import write_tree
from tests.support.runs import REPOSITORY
from tests.support.shards import make_tree, read_lines

FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.timeout(120)


def is_free(path):
    code = "import sys; from flyte_ddp.storage.file_lock import lock_file\n"
    code += "with lock_file(sys.argv[1], waits=False): pass"
    done = subprocess.run([sys.executable, "-c", code, path], cwd=REPOSITORY, capture_output=True)
    return done.returncode == 0


@contextlib.contextmanager
def forked(target):
    """A process that is forked, and ends with the block."""
    child = FORK.Process(target=target)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def sleep():
    time.sleep(600)


def test_a_lock_ends_with_its_block_though_a_process_was_forked_in_it(tmp_path):
    path = str(tmp_path / "lock")
    with contextlib.ExitStack() as stack:
        with lock_file(path):
            assert not is_free(path)
            stack.enter_context(forked(sleep))
        assert is_free(path)


def test_a_lock_of_a_thread_is_not_inherited_by_a_process_that_is_forked(tmp_path):
    path, is_held, may_end = str(tmp_path / "lock"), threading.Event(), threading.Event()

    def hold():
        with lock_file(path):
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(60)

    def lock_again():
        with lock_file(path):
            pass

    with forked(lock_again) as child:
        child.join(0.5)
        assert child.is_alive()  # the child waits for the thread
        may_end.set()
        child.join(60)
        assert child.exitcode == 0
    thread.join()


def test_a_forked_process_that_ends_the_block_leaves_the_lock(tmp_path):
    path = str(tmp_path / "lock")
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_file(path))
        with forked(stack.close) as child:
            child.join(60)
            assert child.exitcode == 0
        assert not is_free(path)
    assert is_free(path)


def test_no_descriptor_is_left_in_any_process(tmp_path):
    def is_open():
        path = str(tmp_path / "lock")
        files = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
        return path in files

    with lock_file(str(tmp_path / "lock")):
        with pytest.raises(BlockingIOError), lock_file(str(tmp_path / "lock"), waits=False):
            pass
        assert is_open()
        with forked(lambda: os._exit(int(is_open()))) as child:
            child.join(60)
            assert child.exitcode == 0
    assert not is_open()


def test_a_lock_ends_with_a_killed_process_that_has_forked(tmp_path):
    code = (
        "import os, sys, time; from flyte_ddp.process import temporary_directories as made\n"
        "with made.temporary_directory('ranks-', sys.argv[1]) as d:\n"
        "    ends = os.pipe(); child = os.fork()\n"
        "    if not child: os.write(ends[1], b'x')\n"  # the child has closed the inherited files
        "    elif os.read(ends[0], 1): print(child, d, flush=True)\n"
        "    time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as other:
        child, left = other.stdout.readline().split()
        try:
            other.kill()
            other.wait()
            assert Path(left).is_dir()
            with temporary_directory("ranks-", str(tmp_path)):
                assert not Path(left).exists()
        finally:
            other.kill()
            os.kill(int(child), signal.SIGKILL)


def test_a_loader_that_is_forked_while_a_thread_fetches_its_shard_reads_it(tmp_path):
    is_reading, may_end = threading.Event(), threading.Event()

    def read(path):
        is_reading.set()
        assert may_end.wait(60)
        yield from read_lines(path)

    tree, _ = make_tree("own")
    url = write_tree(tree, tmp_path / "train")
    Shards(url, reader=read_lines).prepare()
    shards = Shards(url, reader=read, cache_dir=str(tmp_path / "cache"))
    assert len(shards) == 100
    thread = threading.Thread(target=shards.prefetch, args=([0],))
    thread.start()
    assert is_reading.wait(60)
    with forked(lambda: os._exit(0 if int(shards[1]["number"]) == 1 else 1)) as loader:
        loader.join(0.5)
        assert loader.is_alive()
        may_end.set()
        loader.join(60)
        assert loader.exitcode == 0
    thread.join()


def test_a_pointer_is_replaced_though_a_process_was_forked_meanwhile(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path / "place"))
    with contextlib.ExitStack() as stack:
        write = storage.write

        def write_and_fork(*arguments):
            stack.enter_context(forked(sleep))
            write(*arguments)

        monkeypatch.setattr(storage, "write", write_and_fork)
        storage.replace("pointer", b"1", b"")
        storage.replace("pointer", b"2", b"1")
        with pytest.raises(FileChanged):
            storage.replace("pointer", b"3", b"1")
    assert storage.read("pointer") == b"2"


@pytest.mark.parametrize("name", ["a.parquet", "a.tar.zst"])
def test_nothing_is_imported_in_a_thread_that_fetches(name, tmp_path):
    """A process that is forked meanwhile would wait for that import for ever."""
    tree, _ = make_tree("parquet" if name == "a.parquet" else "tar", [20])
    contents = next(iter(tree.values()))
    if name != "a.parquet":
        contents = pyarrow.compress(contents, "zstd", asbytes=True)
    url = write_tree({name: contents}, tmp_path / "train")
    Shards(url).prepare()
    code = (
        "import sys; from flyte_ddp.data import Shards; from flyte_ddp.data.source import Source\n"
        "Source.local_path = lambda *_: ''\n"
        "shards = Shards(sys.argv[1], cache_dir=sys.argv[2])\n"
        "shards.num_ahead(shards.order(4, 0, 0), 1)\n"
        "known = set(sys.modules); shards.prefetch([0]); shards[0]\n"
        "late = [each for each in set(sys.modules) - known if 'arrow' in each]\n"
        "assert 'pyarrow' in known and not late, late"
    )
    cache = str(tmp_path / "cache")
    subprocess.run([sys.executable, "-c", code, url, cache], cwd=REPOSITORY, check=True)
