"""Temporary directories, which the next run removes where the process that owned them was
killed, and the files that ranks submit in one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_TAKEN = 16 << 20  # bytes of several files at once
# ends the name of a file beside a directory, which the directory's owner keeps locked
OWNER = ".owner"


@contextlib.contextmanager
def own_directory(prefix: str, parent: str | None = None) -> Iterator[str]:
    """Make a directory for the length of the block, and remove those that killed processes have
    left there.
    """
    for left in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*{OWNER}"):
        with contextlib.suppress(OSError), open(left, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the owner lives
            _remove(left)
    with tempfile.NamedTemporaryFile(prefix=prefix, suffix=OWNER, dir=parent, delete=False) as lock:
        with contextlib.suppress(OSError):  # a file system without locks: then nothing is removed
            fcntl.flock(lock, fcntl.LOCK_EX)
        directory, owner = lock.name.removesuffix(OWNER), os.getpid()
        os.mkdir(directory, 0o700)
        try:
            yield directory
        finally:
            # a forked process ends this block too, where it drops what it has inherited
            if os.getpid() == owner:
                _remove(Path(lock.name))


def take_files(directory: str, names: Sequence[str]) -> list[bytes | None]:
    """Remove the first of these files, up to the one with which `MAX_TAKEN` is passed, and return
    their contents: None for one that is not there.
    """
    taken: list[bytes | None] = []
    for file in (Path(directory, name) for name in names):
        taken.append(file.read_bytes() if file.exists() else None)
        file.unlink(missing_ok=True)
        if sum(len(each or b"") for each in taken) > MAX_TAKEN:
            break
    return taken


def _remove(owner: Path) -> None:
    shutil.rmtree(str(owner).removesuffix(OWNER), ignore_errors=True)
    owner.unlink(missing_ok=True)
