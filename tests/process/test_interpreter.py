"""Each private name of Python still helps, and a Python without it is only slower or less tidy."""

from __future__ import annotations

import subprocess
import sys
import types
from multiprocessing import forkserver, process

import pytest

from flyte_ddp.launch.agent.rank_start import start_server
from flyte_ddp.process.interpreter import find_fork_server, has_imported, process_config
from tests.support.checkout import REPOSITORY

ENDING = """
import atexit, sys, threading, time
from flyte_ddp.process import interpreter
interpreter.{name} = {stand_in}
interpreter.atexit.register = atexit.register
def work():
    time.sleep(0.2)
    print("thread", flush=True)
interpreter.call_before_exit(lambda: print("session", flush=True))
atexit.register(lambda: print("exit", flush=True))
threading.Thread(target=work).start()
interpreter.end_threads()
print("end", flush=True)
"""
SOCKETS = """
import os, tempfile
from multiprocessing import process, util
from flyte_ddp.launch.agent.rank_start import shorten_socket_paths
tempfile.tempdir = {directory!r} + "/" + "x" * 100
os.makedirs(tempfile.tempdir)
{before}
shorten_socket_paths()
shorten_socket_paths()
process.current_process()._config = config
print(len(util.get_temp_dir()) < 100)
"""


def run(program):
    """Return the words that `program` prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("name", "stand_in", "words"),
    [
        ("threading", "threading", ["session", "thread", "exit", "end"]),
        # a Python without the private names of threading
        ("threading", "object()", ["exit", "session", "end", "thread"]),
        # a Python without the private name of atexit
        ("atexit", "lambda: None", ["session", "thread", "end", "exit"]),
    ],
)
def test_a_process_ends_in_order_before_its_last_lines(name, stand_in, words):
    assert run(ENDING.format(name=name, stand_in=stand_in)) == words


@pytest.mark.parametrize(
    ("before", "is_short"),
    [
        ("config = process.current_process()._config", "True"),
        ("config = vars(process.current_process()).pop('_config')", "False"),
    ],
)
def test_sockets_get_a_short_path_if_python_shows_the_settings(before, is_short, tmp_path):
    assert run(SOCKETS.format(before=before, directory=str(tmp_path))) == [is_short]


PREFIX = """
import multiprocessing
from flyte_ddp.process.interpreter import process_config
process_config()["semprefix"] = "/own"
# Forked processes get semaphores without names.
print(multiprocessing.get_context("spawn").Semaphore()._semlock.name)
"""


def test_semaphores_get_a_prefix_if_python_shows_the_settings(monkeypatch):
    # joblib, which other tests import, names the semaphores of its process in its own way.
    command = [sys.executable, "-c", PREFIX]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("/own-")
    monkeypatch.delattr(process.current_process(), "_config")
    assert process_config() is process_config()


def test_ranks_are_forked_if_python_shows_its_server(monkeypatch):
    assert callable(find_fork_server().ensure_running)
    monkeypatch.delattr(forkserver, "_forkserver")
    assert not start_server(["torch"])


def test_an_import_has_ended_when_python_says_so(monkeypatch, tmp_path):
    (tmp_path / "own_module.py").write_text(
        "from flyte_ddp.process.interpreter import has_imported\n"
        "while_imported = has_imported(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_imported("own_module")
    import own_module

    assert not own_module.while_imported
    assert has_imported("own_module")
    monkeypatch.setattr(own_module, "__spec__", types.SimpleNamespace())
    assert has_imported("own_module")
