"""The origin of a model: the code, the image and the execution that trained it. This module imports
no SDK of Flyte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.metadata import version

from flyte_ddp.code.source_code import compute_digest_of_files, source_files


def code_version(packages: Iterable[str] = ()) -> str:
    """Return a hash of the code that decides what training does: the library, `packages` and
    torch's version.

    A hash of the recipe's own files travels with the prepared data.
    """
    code = compute_digest_of_files(source_files(["flyte_ddp", *packages]))
    return hashlib.sha256((version("torch") + code).encode()).hexdigest()[:16]


def describe_origin(execution: str) -> dict[str, str]:
    """Return the fields of a task's run card that the run's events do not contain.

    Args:
        execution: a name that all attempts of the task share; "" in a local run.
    """
    return {
        "code_version": code_version(),
        "execution": execution,
    }
