"""Temporary directories, which the next run removes where the process that owned them was
killed, and the files that ranks submit in one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from flyte_ddp.storage.file_lock import lock_file

MAX_TAKEN = 16 << 20  # bytes of several files at once
# ends the name of a file beside a directory, which the directory's owner keeps locked
OWNER = ".owner"


@contextlib.contextmanager
def own_directory(prefix: str, parent: str | None = None) -> Iterator[str]:
    """Make a directory for the length of the block, and remove those that killed processes have
    left there.
    """
    for left in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*{OWNER}"):
        # raises while the owner lives
        with contextlib.suppress(OSError), lock_file(str(left), waits=False):
            _remove(left)
    descriptor, path = tempfile.mkstemp(OWNER, prefix, parent)
    os.close(descriptor)
    directory, owner = path.removesuffix(OWNER), os.getpid()
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(OSError):  # a file system without locks: then nothing is removed
            lock.enter_context(lock_file(path))
        os.mkdir(directory, 0o700)
        try:
            yield directory
        finally:
            # a forked process ends this block too, where it drops what it has inherited
            if os.getpid() == owner:
                _remove(Path(path))


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
