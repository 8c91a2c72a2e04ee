"""The main module of a process that starts others, which multiprocessing imports again in each
child.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

# names of the main module; multiprocessing uses the second one too, with or without children
NAMES = ("__main__", "__mp_main__")

# an environment variable that Python reads, and its value while children start
SAFE_PATH, WHILE_STARTING = "PYTHONSAFEPATH", "while starting"

_hiding = threading.Lock()


@contextlib.contextmanager
def hide_main_module() -> Iterator[None]:
    """Hide the main module's file while children start, so that they do not import it.

    A child imports its parent's main module, in case its target is defined there. Ours never is,
    and that module may be the whole of flytekit, or import torch, or start a run when it is
    imported.

    The working directory is hidden as well: a user's `random.py` there would take the place of the
    standard library's.
    """
    # two runs in threads of one process would take each other's stand-in for the real one
    with _hiding:
        main_module = sys.modules["__main__"]
        sys.modules["__main__"] = _StandIn(main_module)
        os.environ[SAFE_PATH] = os.environ.get(SAFE_PATH) or WHILE_STARTING
        try:
            yield
        finally:
            sys.modules["__main__"] = main_module
            show_working_directory()


def show_working_directory() -> None:
    """Restore the user's own setting for the processes that this one starts. A child that was
    started in the block of `hide_main_module` calls it too.
    """
    if os.environ.get(SAFE_PATH) == WHILE_STARTING:
        del os.environ[SAFE_PATH]


class _StandIn(types.ModuleType):
    """The main module without a file and a spec. Its names are there, because other threads may
    pickle them.
    """

    def __init__(self, main_module: types.ModuleType) -> None:
        super().__init__("__main__")
        self._main_module = main_module

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self._main_module, name)
