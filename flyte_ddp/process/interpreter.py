"""Private names of Python, which make a rank start faster or end in order. All can be missing.

A Python without these names never ends a run: each function says what happens then, and
tests/process/test_interpreter.py shows that each name still helps. Imports no torch.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver, process
from typing import Any

_unread: dict[str, Any] = {}


def find_fork_server() -> Any:
    """Return the server that forks this process's children; None if Python does not show it: every
    rank is then a fresh process.
    """
    return getattr(forkserver, "_forkserver", None)


def process_config() -> dict[str, Any]:
    """Return multiprocessing's settings of this process. Without them, a semaphore of a killed
    process stays, and a long TMPDIR leaves no room for a socket's name.
    """
    config: dict[str, Any] = getattr(process.current_process(), "_config", _unread)
    return config


def end_threads() -> None:
    """Wait for this process's threads, and call its exit functions, which Python calls only once.
    Without the names, Python does both later.
    """
    for module, name in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        end = getattr(module, name, None)
        if end:
            end()


def call_before_exit(function: Callable[[], object]) -> None:
    """Call `function` at this process's end, before other exit functions; without the name, among
    them.
    """
    getattr(threading, "_register_atexit", atexit.register)(function)


def has_imported(module: str) -> bool:
    """Return whether an import of `module` has ended; without the name, whether it has begun."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)
