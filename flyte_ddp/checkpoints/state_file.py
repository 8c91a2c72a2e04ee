"""A file with a state, as torch saves it, and the checksum of its bytes. Knows nothing of where the
file goes.

The writer's thread shares its cores with the training, so nothing here is done twice: torch's own
checksum is left out where the file has ours, and ours (XXH3) takes a fortieth of SHA-256's time. It
finds damage, not forgery.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch.utils.serialization import config

from flyte_ddp.errors import CheckpointError

CHECKSUM = "xxh3_128"  # its name in a manifest
READ_SIZE = 4 << 20  # bytes that are read at once; more do not fit into a core's cache


def save_state(state: Mapping[str, Any], file: BinaryIO, with_crc32: bool) -> dict[str, Any]:
    """Write `state` to `file`; return its "bytes" and its checksum, as a manifest has them.

    Args:
        with_crc32: also have torch put its own checksums in the file, which other tools read.

    Raises:
        OSError: the file's.
        CheckpointError: the state cannot be serialized.
    """
    stream = _ChecksumStream(file)
    try:
        with config.patch({"save.compute_crc32": with_crc32}):  # type: ignore[attr-defined]
            torch.save(state, cast(BinaryIO, stream))
    except Exception as error:
        if stream.error is not None:  # torch hides it behind one of its own
            raise stream.error from None
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
    return {"bytes": stream.size, CHECKSUM: stream.checksum.hexdigest()}


def compute_checksum(contents: bytes) -> str:
    """Return the checksum of `contents`, as their entry in a manifest records it."""
    return str(xxhash.xxh3_128_hexdigest(contents))


def check_file(path: str) -> tuple[int, str]:
    """Return the size and the checksum of a local file, read with little memory."""
    checksum, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(READ_SIZE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(buffer[:count])
            size += count
    return size, checksum.hexdigest()


class _ChecksumStream:
    """A file for `torch.save` that takes the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = 0
        self.checksum = xxhash.xxh3_128()
        self.error: OSError | None = None  # of the file
        self._file = file

    def write(self, data: Any) -> int:
        # the core's cache still has a piece for the checksum
        for begin in range(0, len(data), READ_SIZE):
            piece = data[begin : begin + READ_SIZE]
            try:
                self._file.write(piece)
            except OSError as error:
                self.error = error
                raise
            self.checksum.update(piece)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()
