"""torchvision without torch's compiler, whose import is nine tenths of torchvision's own: 8 s of a processor's time.

Every rank and every loader process would pay it. One line of torchvision 0.29 asks for it: `roi_align`, of which no
classification model knows, takes one function from `torch._dynamo.utils`. (`transforms.v2` asks for it too, so it is
`transforms` that is used here: on a PIL image they draw and do the same.)
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

COMPILER = "torch._dynamo.utils"


def import_torchvision() -> Any:
    """The module `torchvision`, with its `models` and `transforms`."""
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = _Understudy(COMPILER)
    return importlib.import_module("torchvision")


class _Understudy(types.ModuleType):
    """Has the one function. To be asked for anything else, or to have it called, imports the module and steps back."""

    def is_compile_supported(self, device_type: str) -> Any:
        return self.__getattr__("is_compile_supported")(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `inspect` asks every module for
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
