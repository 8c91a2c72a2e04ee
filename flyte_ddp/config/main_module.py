"""The main module of a process that starts others, which multiprocessing imports again in each child.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

NAMES = ("__main__", "__mp_main__")  # multiprocessing enters it under the second name too, with or without children

_hiding = threading.Lock()


@contextlib.contextmanager
def hide_main_module() -> Iterator[None]:
    """Hide the main module's file while children start, so that they do not import it.

    A child imports its parent's main module, in case its target is defined there. Ours never is, and that module may be
    the whole of flytekit, or import torch, or start a run when it is imported.
    """
    with _hiding:  # two runs in threads of one process would take each other's stand-in for the real one
        main_module = sys.modules["__main__"]
        sys.modules["__main__"] = _StandIn(main_module)
        try:
            yield
        finally:
            sys.modules["__main__"] = main_module


class _StandIn(types.ModuleType):
    """The main module without a file and a spec. Its names are there, because other threads may pickle them."""

    def __init__(self, main_module: types.ModuleType) -> None:
        super().__init__("__main__")
        self._main_module = main_module

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self._main_module, name)
