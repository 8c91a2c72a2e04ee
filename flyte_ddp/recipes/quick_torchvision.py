"""Import torchvision without torch's compiler, which is nine tenths of the import: 8 s of processor time per process.

One line of torchvision 0.29 imports the compiler: `roi_align`, which no classification model uses, takes one function
from `torch._dynamo.utils`. `transforms.v2` imports it too, so the recipes use `transforms`, which gives the same for
PIL images.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

COMPILER = "torch._dynamo.utils"


def import_torchvision() -> Any:
    """Return the module `torchvision`, with its `models` and `transforms`."""
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = _Placeholder(COMPILER)
    return importlib.import_module("torchvision")


class _Placeholder(types.ModuleType):
    """Placeholder that has the one function; any other use imports the real module and removes the placeholder."""

    def is_compile_supported(self, device_type: str) -> Any:
        return self.__getattr__("is_compile_supported")(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `inspect` asks every module for
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
