"""The files of a checkpoint: its manifest, and one file of tensors for each rank that wrote a part
of it.

And the trained weights, which are one file.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from flyte_ddp.checkpoints.state_file import CHECKSUM, check_file, compute_checksum
from flyte_ddp.errors import ConfigError
from flyte_ddp.storage import Storage, redact_url
from flyte_ddp.storage import read_file as fetch
from flyte_ddp.storage.failures import describe
from flyte_ddp.storage.weights import from_bytes

FORMAT = 3  # of a checkpoint; another one is refused

Entry = dict[str, Any]  # of a file in a manifest: "file", "bytes" and a checksum


class Damaged(Exception):
    """A checkpoint is proven to be damaged: a file is missing, or is not what was written."""


def checkpoint_name(step: int) -> str:
    """Return the beginning of the names of all files of a checkpoint."""
    return f"step-{step:010d}"


def is_manifest(name: str) -> bool:
    """Return whether `name` is that of a manifest; other files in the place are their owner's."""
    return re.fullmatch(r"step-\d{10}\.json", name) is not None


def is_tensors(name: str) -> bool:
    """Return whether `name` is that of a file of tensors."""
    return re.fullmatch(r"step-\d{10}-[0-9a-f]{8}(-\d+of\d+)?\.pt", name) is not None


def is_half_written(name: str) -> bool:
    """Return whether `name` is that of a part of such a file, which a killed writer has left on a
    local disk.
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
            return {**manifest, "files": [{key: each[key] for key in keys} for each in entries]}
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"its manifest cannot be read: {type(error).__name__}: {error}") from error
    if not entries:
        raise Damaged("its manifest names no file")
    raise _foreign(storage, name, f"expected format {FORMAT}, got format {found}")


def read_file(storage: Storage, entry: Entry, maps: bool = False) -> dict[str, Any]:
    """Return the contents of a file of tensors.

    Args:
        maps: the caller copies the tensors at once. So those of a local file may stay in it, which
            spares two copies: they are mapped. The file must not go away meanwhile.

    Raises:
        Damaged: it is missing, or not what was written. The store's errors are raised as they are.
        MemoryError: it is whole, but does not fit into memory.
        ConfigError: it is whole, but this version of torch cannot read it.
    """
    name = entry["file"]
    maps = maps and storage.is_local
    source: Any = f"{storage.root}/{name}"
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
        state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True, mmap=maps)
    except Exception as error:  # of bytes that are those that were written
        what = describe(error)
        # torch has no class for it
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(
                f"checkpoints: {storage.join(name)} could not be read for want of memory: {what}"
            ) from None
        raise _foreign(storage, name, what) from error
    return state


def _foreign(storage: Storage, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"checkpoints: {redact_url(storage.join(name))} cannot be read by torch "
        f"{torch.__version__} and this version "
        f"of flyte-ddp: {why}; the file is whole, so resume with the versions that wrote it, or "
        "give another place"
    )


def load_state(url: str) -> Any:
    """Return the state dict at `url`, in torch's format or safetensors, as `weights.from_bytes`
    does.
    """
    return from_bytes(fetch(url))


def portable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state dict on the CPU in the default memory format, to load on any machine.

    Tensors that have this form already are not copied: the model must not change until they are
    written.
    """

    def convert(value: torch.Tensor) -> torch.Tensor:
        value = value.detach().cpu().contiguous()
        # A view would be saved with all of the memory that it is a part of.
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value

    return {
        name: convert(value) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
