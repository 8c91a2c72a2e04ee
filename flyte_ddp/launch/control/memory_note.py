"""The note beside the checkpoints about an attempt that ran out of memory, for later processes of
the same run.

No function raises where the store cannot be reached.
"""

from __future__ import annotations

import contextlib
import json

from flyte_ddp.errors import StorageUnavailable
from flyte_ddp.storage import Storage

NAME = "out-of-memory.json"


def read_note(url: str) -> int | None:
    """Return the step from which the last attempt that ran out of memory had started; None if there
    was no such attempt.

    Args:
        url: place of the checkpoints; "" for a run without checkpoints.
    """
    if not url:
        return None
    with contextlib.suppress(FileNotFoundError, StorageUnavailable):
        return int(json.loads(Storage(url, timeout=0).read(NAME))["resumed_step"])
    return None


def write_note(url: str, step: int | None) -> None:
    """Note the step for the next attempt of the run. If `step` is None, delete the note."""
    if not url:
        return
    storage = Storage(url, timeout=0)
    with contextlib.suppress(StorageUnavailable):
        if step is None:
            storage.delete(NAME)
        else:
            storage.write(NAME, json.dumps({"resumed_step": step}).encode())
