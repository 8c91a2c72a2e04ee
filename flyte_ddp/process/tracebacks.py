"""Which frames of a traceback are of the user's own code. Imports no torch."""

from __future__ import annotations

import sysconfig
import types
from collections.abc import Mapping
from typing import Any

# parts of the paths of installed modules
LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")


def frames_of_user(error: BaseException | types.TracebackType) -> types.TracebackType | None:
    """Return the traceback of an error, or a given traceback, from the first frame of the user's
    code on; None if no frame is the user's.

    The frames before it, such as the training loop and torch's modules, are the same for every
    error in a recipe.
    """
    if isinstance(error, BaseException):
        frames = error.__traceback__
    else:
        frames = error
    while frames and not is_of_program(frames.tb_frame.f_globals):
        frames = frames.tb_next
    return frames


def is_of_program(module: Mapping[str, Any]) -> bool:
    """Return whether a module with this dictionary is the main one, or neither of this package nor
    installed.
    """
    name, file = module.get("__name__"), module.get("__file__")
    if name == "__main__":
        return True
    is_ours = isinstance(name, str) and name.partition(".")[0] == __name__.partition(".")[0]
    return isinstance(file, str) and not is_ours and not any(part in file for part in LIBRARIES)
