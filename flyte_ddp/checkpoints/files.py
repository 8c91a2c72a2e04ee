"""The files of a checkpoint: its manifest, and one file of tensors for each rank that wrote a part
of it.

And the trained weights, which are one file.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch.utils.serialization import config

from flyte_ddp.checkpoints.state import StatePart
from flyte_ddp.errors import CheckpointError, ConfigError
from flyte_ddp.storage import Storage, redact_url
from flyte_ddp.storage.failures import describe

FORMAT = 4  # the version of the file format; checkpoints of another version are refused
CHECKSUM = "xxh3_128"  # the key of the checksum in a manifest
READ_SIZE = 4 << 20  # bytes that are read at once; more do not fit into a core's cache

Entry = dict[str, Any]  # a manifest's entry for a file: "file", "bytes" and a checksum


class Damaged(Exception):
    """A checkpoint is proven to be damaged: a file is missing, or is not what was written."""


def checkpoint_name(step: int) -> str:
    """Return the beginning of the names of all files of a checkpoint."""
    return f"step-{step:010d}"


def is_manifest(name: str) -> bool:
    """Return whether a file named `name` is a manifest."""
    return re.fullmatch(r"step-\d{10}\.json", name) is not None


def is_tensors(name: str) -> bool:
    """Return whether a file named `name` contains a rank's tensors."""
    return re.fullmatch(r"step-\d{10}-[0-9a-f]{8}-\d+of\d+\.pt", name) is not None


def is_half_written(name: str) -> bool:
    """Return whether a file named `name` is an incomplete manifest or file of tensors, as a killed
    writer leaves it on a local disk.
    """
    half = re.fullmatch(r"(.+)\.[0-9a-f]{32}\.tmp", name)
    return half is not None and (is_manifest(half[1]) or is_tensors(half[1]))


def read_manifest(storage: Storage, name: str) -> dict[str, Any]:
    """Return a manifest, with the entries of its files at "files".

    Raises:
        Damaged: it cannot be read, or lacks something.
        ConfigError: it is whole, but of another version of this package.
    """
    keys = ("file", "bytes", CHECKSUM)
    try:
        manifest = json.loads(storage.read(name))
        entries, found = manifest["files"], manifest.get("format", 1)
        if found == FORMAT and entries:
            files = []
            for entry in entries:
                files.append({key: entry[key] for key in keys})
            return {**manifest, "files": files}
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"its manifest cannot be read: {type(error).__name__}: {error}") from error
    if not entries:
        raise Damaged("its manifest names no file")
    raise _foreign(storage, name, f"expected format {FORMAT}, got format {found}")


def read_file(storage: Storage, entry: Entry) -> StatePart:
    """Return the contents of a file of tensors.

    A local file's tensors are mapped into memory, which spares two copies. The caller copies the
    tensors that it keeps.

    Raises:
        Damaged: it is missing, or not what was written. The store's errors are raised as they are.
        MemoryError: it is whole, but does not fit into memory.
        ConfigError: it is whole, but this version of torch cannot read it.
    """
    name, maps = entry["file"], storage.is_local
    if not is_tensors(name):
        raise Damaged(f"its manifest names {name!r}, which is no file of a checkpoint")
    source: Any = storage.path_of(name)
    try:
        if maps:
            size, checksum = storage.retry(lambda: check_file(source))
        else:
            contents = storage.read(name)
            size, checksum, source = len(contents), compute_checksum(contents), io.BytesIO(contents)
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing") from error
    if (size, checksum) != (entry["bytes"], entry[CHECKSUM]):
        raise Damaged(
            f"{name}: expected the {entry['bytes']} bytes that were written, got {size} with "
            "another checksum"
        )
    try:
        part: StatePart = torch.load(source, map_location="cpu", weights_only=True, mmap=maps)
    except Exception as error:  # the checksum is right, so the error is none of the storage
        what = describe(error)
        # torch has no class for this error
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(
                f"checkpoints: {storage.join(name)} could not be read for want of memory: {what}"
            ) from None
        raise _foreign(storage, name, what) from error
    return part


def _foreign(storage: Storage, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"checkpoints: {redact_url(storage.join(name))} cannot be read by torch "
        f"{torch.__version__} and this version of flyte-ddp: {why}; the file is whole, so resume "
        "with the versions that wrote it, or give another place"
    )


def portable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state dict on the CPU in the default memory format, to load on any machine.

    Tensors that have this form already are not copied: the model must not change until they are
    written.
    """

    def convert(value: torch.Tensor) -> torch.Tensor:
        value = value.detach().cpu().contiguous()
        # A view would be saved with all of the memory that it is a part of.
        if value.untyped_storage().nbytes() > value.nbytes:
            return value.clone()
        return value

    converted = dict(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            converted[name] = convert(value)
    return converted


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
        while True:
            count = file.readinto(buffer)
            if not count:
                break
            checksum.update(buffer[:count])
            size += count
    return size, checksum.hexdigest()


@dataclass(eq=False)
class _ChecksumStream:
    """A file for `torch.save` that takes the checksum of what is written to it."""

    file: BinaryIO
    size: int = 0
    checksum: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    error: OSError | None = None  # the file's last error

    def write(self, data: Any) -> int:
        # the core's cache still has a piece for the checksum
        for begin in range(0, len(data), READ_SIZE):
            piece = data[begin : begin + READ_SIZE]
            try:
                self.file.write(piece)
            except OSError as error:
                self.error = error
                raise
            self.checksum.update(piece)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()
