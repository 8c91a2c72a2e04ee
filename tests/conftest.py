"""Fixtures of several test files. Starting a gang takes seconds, so finished runs are shared."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing.util
import os
import random
import re
import shutil
import tempfile
import time
import uuid
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
import torch

from tests.support import browser
from tests.support.checkout import build_wheel
from tests.support.runs import fork_functions, new_run

OUTSIDE = Path(__file__).parent / "outside"  # tests that need a service or a device

# Seconds since 1970 after which no further test begins: `.ci/run` has a limit of time.
UNTIL = float(os.environ.get("FLYTE_DDP_TEST_UNTIL") or "inf")
NO_TIME = "no time was left for it"

MARK = "STARTED_BY_TESTS"  # an environment variable of this process and all that it starts

# Modules that ranks of several tests import. The server of a test process imports them once.
IMPORTED_ONCE = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "torchmetrics",
    # The functions of some ranks are in files of tests, which import these.
    "hypothesis",
    "pytest",
    "sklearn.linear_model",
)


def pytest_configure(config):
    """Give this session and its children a temporary directory of their own: killed processes never
    clean up.
    """
    os.environ[MARK] = uuid.uuid4().hex
    # Threads that wait for one another spin: several tests at a time would take three times the
    # processor time.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # Torch has read the variable before, but in a process of xdist.
    # Variables that `make test` sets for a `make` below it. A test's own `make` must not see them.
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        os.environ.pop(name, None)
    preload_more()
    # The worker inherits the directory of the process that started it.
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    # pytest makes its own directories there.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Short: the path of a UNIX socket has at most 107 bytes.
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t-")
    # After multiprocessing's own directory in it, which has priority -100.
    multiprocessing.util.Finalize(None, shutil.rmtree, [tempfile.tempdir, True], exitpriority=-200)


def preload_more():
    """Let the server from which ranks are forked import what the ranks of all tests need.

    A server for each kind of rank would take more time: each one imports torch again.
    """
    preload = forkserver.set_forkserver_preload
    forkserver.set_forkserver_preload = lambda modules: preload([*modules, *IMPORTED_ONCE])


def pytest_ignore_collect(collection_path, config):
    """Leave out the tests that need a service or a device, except in a folder or file that the
    command line names.
    """
    folder = next(
        (each for each in (collection_path, *collection_path.parents) if each.parent == OUTSIDE),
        None,
    )
    if folder is None:
        return None
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    is_named = any(each == OUTSIDE or folder in (each, *each.parents) for each in named)
    return None if is_named else True


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves tests out
def pytest_collection_modifyitems(items):
    """Refuse a test with the mark `long` in a file that does not contain `mark.long`: `make
    test-long` finds its files by this text.
    """
    files = {item.path for item in items if item.get_closest_marker("long")}
    missed = sorted(str(file) for file in files if "mark.long" not in file.read_text())
    if missed:
        raise pytest.UsageError(
            f"expected mark.long in each file with such tests, got none in {', '.join(missed)}"
        )
    if math.isfinite(UNTIL):
        shuffle_files(items)


def page_of(nodeid):
    """Return the page of the docs that a test runs a block of; "" for others."""
    match = re.search(r"\[(.+\.md):\d+\]$", nodeid)
    return match[1] if match else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run the blocks of a page one after the other in one process: a block may need what those
    before it made. xdist's own mark for groups has no effect with pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class PageScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return page_of(nodeid) or nodeid

    return PageScheduling(config, log)


def shuffle_files(items):
    """Order the files and the pages of the docs by chance, so that not always the same ones are
    left without time. All processes of one session agree on the order.
    """

    def group_of(item):
        return page_of(item.nodeid) or str(item.path)

    chance = random.Random(UNTIL)
    groups = list(dict.fromkeys(map(group_of, items)))
    chance.shuffle(groups)
    places = {group: place for place, group in enumerate(groups)}
    items.sort(key=lambda item: places[group_of(item)])


@pytest.hookimpl(tryfirst=True)  # before fixtures start anything
def pytest_runtest_setup():
    if time.time() > UNTIL:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter):
    """Say how many tests did not begin."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    left_out = sum(NO_TIME in reason for reason in reasons)
    if left_out:
        ran = sum(len(terminalreporter.stats.get(each, ())) for each in ("passed", "failed"))
        terminalreporter.write_line(f"!!! {left_out} tests NOT run beside {ran}: {NO_TIME} !!!")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let the garbage collector never visit what the files of tests import. Its visits take a tenth
    of the time of these imports.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionstart():
    """Let the sockets of loader processes lie in the session's directory: made by the first test
    that has such processes, theirs would be in its own TMPDIR, and go with it.
    """
    multiprocessing.util.get_temp_dir()


@pytest.fixture(autouse=True)
def same_random_tensors():
    """Let a test draw the same tensors each time, whichever tests ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """finished_run(recipe, num_processes, **config): a run that ended well, the same one for the
    same arguments.
    """
    runs = {}

    def get(recipe="Tiny", num_processes=2, **config):
        key = json.dumps([recipe, num_processes, config], sort_keys=True)
        if key not in runs:
            directory = tmp_path_factory.mktemp(recipe)
            (directory / "record").mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RECORD", str(directory / "record"))
                runs[key] = new_run(directory, recipe).train(num_processes, **config)
        return runs[key]

    return get


@pytest.fixture(scope="module")
def store():
    """An S3 server of this machine."""
    from tests.support.image_store import running_store

    with running_store() as found:
        yield found


@pytest.fixture(scope="module")
def chromium():
    """`Browser.look`, for the tests of all reports."""
    if browser.CHROMIUM is None:
        pytest.skip("there is no Chromium here; on Debian: apt-get install chromium")
    with browser.running_browser() as running:
        yield running.look


@pytest.fixture(scope="module")
def client():
    """The client of a Dask cluster of two workers, with `LOCAL` for its config."""
    from flyte_ddp.cluster.connect import open_cluster
    from tests.support.dask_runs import LOCAL

    with pytest.MonkeyPatch.context() as patch:
        # short steps, so that tests can reach a run while it trains
        patch.setenv("STEP_SECONDS", "0.05")
        with open_cluster(LOCAL, "test") as client:
            yield client


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """The address of a scheduler without workers."""
    from tests.support.dask_runs import start_scheduler

    process, address = start_scheduler(tmp_path_factory.mktemp("dask"))
    yield address
    process.kill()
    process.wait()


@pytest.fixture
def start_worker():
    """start_worker(scheduler, name, **environment): the process of a worker's nanny, which ends
    with the test.
    """
    from tests.support.dask_runs import worker_starter

    with worker_starter() as start:
        yield start


@pytest.fixture
def forked_functions(monkeypatch):
    """Ranks of functions are forked, which is faster."""
    fork_functions(monkeypatch)


@pytest.fixture
def survivors():
    """survivors(): the living processes that this test started, including orphans. None may be left
    when the test ends.
    """

    def started():
        # multiprocessing's resource tracker and this process's server of ranks live as long as this
        # process.
        server = forkserver._forkserver._forkserver_pid
        found = set()
        for process in psutil.process_iter():
            # The process may have ended, be a zombie, or belong to another user.
            with contextlib.suppress(psutil.Error):
                is_kept = process.pid == server or "resource_tracker" in str(process.cmdline())
                if process.environ().get(MARK) == os.environ[MARK] and not is_kept:
                    found.add(process)
        return found

    before = started()

    def get():
        return sorted(started() - before, key=lambda process: process.pid)

    yield get
    left = get()
    for process in left:
        process.kill()
    assert left == []


@pytest.fixture
def prepared(tmp_path):
    """An empty directory for a recipe's prepared data."""
    directory = tmp_path / "prepared"
    directory.mkdir()
    return directory
