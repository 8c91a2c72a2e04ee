"""Checkpoints that survive whoever wrote them: atomic, checksummed, at any fsspec URL.

A checkpoint is two files. `step-00000123-4f1c88a2.pt` holds the tensors, `step-00000123.json` names it, with its size,
SHA-256 and standing.
The second is written after the first is complete, so a checkpoint without it does not exist, and one whose sum does not
match is named and passed over. Knows nothing of models or ranks; only rank 0 writes.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from flyte_ddp.errors import CheckpointError
from flyte_ddp.storage import Storage

FORMAT = 1  # of the tensors' layout; raised when an older one can no longer be read


class CheckpointStore:
    """The checkpoints of one run below one URL.

    Args:
        url: any fsspec URL or local path; created where missing.
        num_kept: newest checkpoints that stay; the best one stays besides.

    Writing happens in a thread, so that training goes on while a bucket takes its time. A failure surfaces at the next
    `save`, or in `close`.
    """

    def __init__(self, url: str, num_kept: int) -> None:
        self.storage = Storage(url)
        self.num_kept = num_kept
        self._writer = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def save(self, state: Mapping[str, Any], step: int, best: bool) -> str:
        """Keep `state` as the checkpoint of optimizer step `step`, the best so far if `best`; returns its URL.

        `state` is copied before this returns; nested dicts and lists of tensors and plain values are fine.
        """
        self.wait()
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **state}, buffer)
        # A name of its own also where this step was saved before, whose tensors must stay until this is complete.
        file = f"{_name(step)}-{uuid.uuid4().hex[:8]}.pt"
        self._pending = self._writer.submit(self._write, file, buffer.getvalue(), step, best)
        return self.storage.join(_name(step) + ".json")

    def load_latest(self) -> tuple[dict[str, Any] | None, str, list[str]]:
        """The newest checkpoint that is whole, its URL, and why each newer one was passed over.

        Returns:
            (state with tensors on the CPU, URL, reasons); (None, "", reasons) where there is none.
        """
        skipped: list[str] = []
        for manifest_name in sorted(self._manifests(), reverse=True):
            url = self.storage.join(manifest_name)
            try:
                return self._load(manifest_name), url, skipped
            except Exception as error:  # of any kind: a damaged file can fail anywhere in the reading
                skipped.append(f"{url} is unusable and was skipped: {type(error).__name__}: {error}")
        return None, "", skipped

    def load(self, step: int) -> dict[str, Any]:
        """The checkpoint of optimizer step `step`, tensors on the CPU.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        try:
            return self._load(_name(step) + ".json")
        except Exception as error:
            raise CheckpointError(f"{self.storage.join(_name(step))}.json cannot be read: {error}") from error

    def wait(self) -> None:
        """Return when everything saved so far is in place.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            try:
                pending.result()
            except Exception as error:
                raise CheckpointError(f"{self.storage.url}: a checkpoint could not be written: {error}") from error

    def close(self) -> None:
        """`wait`, and end the writing thread."""
        self.wait()
        self._writer.shutdown()

    def _load(self, manifest_name: str) -> dict[str, Any]:
        manifest = json.loads(self.storage.read(manifest_name))
        contents = self.storage.read(manifest["file"])
        if len(contents) != manifest["bytes"]:
            raise ValueError(f"it has {len(contents)} bytes instead of {manifest['bytes']}")
        if hashlib.sha256(contents).hexdigest() != manifest["sha256"]:
            raise ValueError("its SHA-256 is not the one noted when it was written")
        state: dict[str, Any] = torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise ValueError(f"it has format {state['format']}, this version reads {FORMAT}")
        return state

    def _write(self, file: str, contents: bytes, step: int, best: bool) -> None:
        self.storage.write(file, contents)
        manifest = {
            "file": file,
            "bytes": len(contents),
            "sha256": hashlib.sha256(contents).hexdigest(),
            "step": step,
            "best": best,
            "written_at": time.time(),
        }
        self.storage.write(_name(step) + ".json", json.dumps(manifest).encode())
        self._prune(_name(step) + ".json")

    def _prune(self, newest: str) -> None:
        # Steps beyond the one just written are damaged, or of a course of the run that was given up: they were skipped
        # when it went on from before them, and must not push out what is written now.
        manifests = sorted(name for name in self._manifests() if name <= newest)
        standing = {name: _parsed(self.storage.read(name)) for name in manifests}
        best = [name for name in manifests if standing[name].get("best")]
        kept = {*manifests[-self.num_kept :], *best[-1:]}
        # Manifests go first: without one a checkpoint does not exist, with one it must be whole.
        for name in self._manifests():
            if name not in kept:
                self.storage.delete(name)
        # What no manifest speaks for: the tensors of those just removed, and what a killed writer left behind.
        spoken_for = {*kept, *(standing[name].get("file") for name in kept)}
        for name in self.storage.names():
            if name.startswith("step-") and name not in spoken_for:
                self.storage.delete(name)

    def _manifests(self) -> list[str]:
        return [name for name in self.storage.names() if name.startswith("step-") and name.endswith(".json")]


def save_state(url: str, state: Mapping[str, Any]) -> None:
    """Write `state` to `url`, whole or not at all, in the form that `torch.load(weights_only=True)` reads."""
    directory, _, name = url.rpartition("/")
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    Storage(directory).write(name, buffer.getvalue())


def load_state(url: str) -> Any:
    """What `save_state` wrote to `url`, tensors on the CPU; never more than tensors and plain values is unpickled."""
    directory, _, name = url.rpartition("/")
    contents = Storage(directory).read(name)
    return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)


def portable(state: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state dict as copies on the CPU in the default memory format, to load on any machine."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def _name(step: int) -> str:
    return f"step-{step:010d}"


def _parsed(manifest: bytes) -> dict[str, Any]:
    """A manifest's values; none where it is damaged, which must not stop the pruning of others."""
    try:
        values = json.loads(manifest)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
