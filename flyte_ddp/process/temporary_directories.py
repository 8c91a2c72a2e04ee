"""Temporary directories, and the files that ranks submit in one of them. If a directory's owner was
killed, the next run removes the directory.
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
# end of the name of a file beside a directory; the directory's owner keeps the file locked
OWNER = ".owner"


@contextlib.contextmanager
def temporary_directory(prefix: str, parent: str | None = None) -> Iterator[str]:
    """Make a directory for the length of the block. Remove the directories that killed processes
    have left beside it.
    """
    for left in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*{OWNER}"):
        # `lock_file` raises while the owner lives.
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
            # A forked process ends this block too when it drops its inherited objects.
            if os.getpid() == owner:
                _remove(Path(path))


def take_files(directory: str, names: Sequence[str]) -> list[bytes | None]:
    """Remove these files in their order, until the total size passes `MAX_TAKEN`. Return the
    contents of the removed files; None for a missing file.
    """
    taken: list[bytes | None] = []
    for file in (Path(directory, name) for name in names):
        contents = None
        if file.exists():
            contents = file.read_bytes()
        taken.append(contents)
        file.unlink(missing_ok=True)
        if sum(len(each or b"") for each in taken) > MAX_TAKEN:
            break
    return taken


def _remove(owner: Path) -> None:
    shutil.rmtree(str(owner).removesuffix(OWNER), ignore_errors=True)
    owner.unlink(missing_ok=True)
