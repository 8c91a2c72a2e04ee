"""A local file that is written directly to the disk, past the kernel's page cache (O_DIRECT).

A checkpoint is written often and hardly ever read. The page cache would keep it in memory that the run's data need.
Copying 1.2 GB there takes 0.7 to 2.5 s of a core that trains; a direct write takes 0.1 s. It takes only whole pages,
from memory that is aligned to pages. Other data are copied to such memory first, which takes another 0.2 s.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from types import TracebackType
from typing import Any

BLOCK = 4 << 20  # bytes that are copied for one write; larger pieces may be written from where they are
PAGE = 4096  # bytes; positions, sizes and addresses of direct writes are multiples of it
DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


class UncachedFile:
    """A new file to write to from its beginning to its end. A file of less than `BLOCK` bytes is written as usual.

    Where the file system has no such writes (tmpfs, some network disks), all are usual ones. Not for two threads.

    Raises:
        OSError: the file's, also by `write` and `close`.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._block = mmap.mmap(-1, BLOCK)  # aligned to pages
        self._used = 0  # bytes of the block
        self.is_direct = False  # whether writes are now
        self._can_be_direct = bool(DIRECT)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = self._write_in_place(view) if len(view) >= BLOCK else 0
        while done < len(view):
            length = min(BLOCK - self._used, len(view) - done)
            self._block[self._used : self._used + length] = view[done : done + length]
            self._used += length
            done += length
            if self._used == BLOCK:
                self._write_block()
        return done

    def flush(self) -> None:
        """Do nothing: what was written is in the file once it is closed."""

    def close(self) -> None:
        """Write what is left, and return when all of it is on the disk."""
        try:
            self._set_direct(False)  # a part of a block cannot be written directly
            self._write_all(memoryview(self._block)[: self._used])
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def __enter__(self) -> UncachedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            os.close(self._file)

    def _write_in_place(self, data: memoryview) -> int:
        """Write whole pages of `data` from where they are, and return their bytes: 0 where that cannot be."""
        if self._used % PAGE:
            return 0
        self._write_block()
        self._set_direct(True)
        done, end = 0, len(data) - len(data) % PAGE
        try:
            while done < end:
                done += os.write(self._file, data[done:end])
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
        return done

    def _write_block(self) -> None:
        self._set_direct(True)
        self._write_all(memoryview(self._block)[: self._used])
        self._used = 0

    def _write_all(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._can_be_direct = False  # after a write of a part of a block too: the rest is not aligned
                self._set_direct(False)

    def _set_direct(self, is_direct: bool) -> None:
        is_direct = is_direct and self._can_be_direct
        if is_direct == self.is_direct:
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | DIRECT if is_direct else flags & ~DIRECT)
            self.is_direct = is_direct
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._can_be_direct = False
