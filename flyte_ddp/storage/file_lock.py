"""Exclusive locks of files. A lock ends with its holder. Imports no torch.

A lock belongs to the open file, and a forked process inherits open files. A loader process, for
example, may start while a thread of its parent holds a lock. So a lock is released explicitly
before its file is closed, and a forked process closes its copies at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

# lock that is held while the set below and the open files differ; a fork waits for it
_guard = threading.RLock()
_descriptors: set[int] = set()  # files that are locked, or are about to be


@contextlib.contextmanager
def lock_file(path: str, waits: bool = True) -> Iterator[int]:
    """Lock a file during the block, and yield its descriptor. Create the file if it is missing.

    Args:
        waits: True to wait while another process holds the lock; False to raise BlockingIOError.
    """
    owner = os.getpid()
    mode = fcntl.LOCK_EX
    if not waits:
        mode |= fcntl.LOCK_NB
    with _guard:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _descriptors.add(descriptor)
    try:
        fcntl.flock(descriptor, mode)
        yield descriptor
    finally:
        # A forked process may leave this block too, and it has closed the file.
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
