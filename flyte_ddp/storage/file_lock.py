"""Exclusive locks of files, which end with their holder. Imports no torch.

A lock belongs to the open file, which a forked process inherits, such as a loader process that
starts while a thread of its parent holds a lock. So a lock is released by name before its file is
closed, and a forked process closes its copies at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

# held while the set below and the open files differ; a fork waits for it
_guard = threading.RLock()
_descriptors: set[int] = set()  # of the files that are locked, or will be


@contextlib.contextmanager
def lock_file(path: str, waits: bool = True) -> Iterator[int]:
    """Lock a file for the length of the block, and yield its descriptor. It is made if it is
    missing.

    Args:
        waits: for another holder. Without it BlockingIOError is raised if there is one.
    """
    owner = os.getpid()
    with _guard:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _descriptors.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield descriptor
    finally:
        # a forked process that ends this block too has closed the file
        if os.getpid() == owner:
            _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    with _guard:
        _descriptors.discard(descriptor)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _close_inherited() -> None:
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    _guard.release()


os.register_at_fork(
    before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_inherited
)
