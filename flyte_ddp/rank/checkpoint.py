"""Checkpoints that outlive the process that wrote them: atomic, checksummed, at any fsspec URL.

A checkpoint is two files. `step-00000123-4f1c88a2.pt` holds the tensors; `step-00000123.json`, the manifest, names that
file with its size and SHA-256. The manifest is written last, so a checkpoint without one does not exist.

Two rules keep progress safe. Only proven damage is skipped: a store that cannot be reached is waited for. And nothing
is deleted that this process did not write or read whole: what is damaged is renamed to `skipped-...`.

Knows nothing of models or ranks; only rank 0 writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flyte_ddp.errors import CheckpointError, ConfigError, StorageUnavailable
from flyte_ddp.ownership import check_owner
from flyte_ddp.rank.job import WRITE_GRACE
from flyte_ddp.rank.staging import Buffers, StagingMemory
from flyte_ddp.storage import STORE_TIMEOUT, Storage, redact_url

FORMAT = 1  # of the tensors' layout; raised when an older one can no longer be read
FIRST_PAUSE, MAX_PAUSE = 0.5, 15.0  # seconds between two tries to write
POLL = 0.2  # seconds between looks at the writer while something waits for it

logger = logging.getLogger(__name__)


class Damaged(Exception):
    """A checkpoint is proven to be unusable: a file is missing, or is not what was written."""


@dataclass(eq=False)
class _Write:
    """A state that is to be written."""

    state: Mapping[str, Any] | None  # None once it is in `contents`
    file: str
    step: int = 0
    best: bool = False
    has_manifest: bool = True
    contents: bytes = b""
    buffers: Buffers = field(default_factory=list)  # the memory of `state`


class CheckpointStore:
    """The checkpoints of one run below one URL.

    A thread writes, so that training never waits for the store. One state is being written and one waits; a newer state
    replaces the one that waits (the best one so far waits besides). While the store is away, the thread tries again.

    Args:
        url: any fsspec URL or local path; created where missing.
        num_kept: newest checkpoints that stay; the best one stays besides.
        timeout: seconds that the store may be away before `check`, `save` and `wait` raise.
        owner: the token of the run that owns the place (`ownership.Ownership`). Checked before anything is written,
            renamed or deleted; "" for a place that nothing else uses.
        on_busy: called with True when a state is about to be written, and with False when none is being written.
    """

    def __init__(
        self,
        url: str,
        num_kept: int,
        timeout: float = STORE_TIMEOUT,
        owner: str = "",
        on_busy: Callable[[bool], None] = lambda is_busy: None,
    ) -> None:
        self.storage = Storage(url, timeout=timeout)
        self.num_kept = num_kept
        self.timeout = timeout
        self.owner = owner
        self.keeps_resumed = False  # what `load_latest` returned stays, because other ranks may still read it
        self._on_busy = on_busy
        self._sink = Storage(url, timeout=0)  # a failed try must not keep a newer state waiting
        self._own: dict[str, dict[str, Any]] = {}  # manifests that were written or read whole here, by name
        self._files: set[str] = set()  # tensors that were read or written here, or begun
        self._resumed = ""  # the manifest that `load_latest` returned
        self._queue: list[_Write] = []
        self._is_writing = False
        self._stuck_since = 0.0  # monotonic: when the state being written was begun; 0 while idle
        self._outage: Exception | None = None  # why the last try failed
        self._failure: Exception | None = None  # final
        self._changed = threading.Condition()
        self._memory = StagingMemory()
        self._thread: threading.Thread | None = None

    def save(self, state: Mapping[str, Any], step: int, best: bool) -> str:
        """Keep `state` as the checkpoint of optimizer step `step`, the best so far if `best`; return its URL.

        `state` is copied before this returns; nested dicts and lists of tensors and plain values are fine.

        Raises:
            StorageUnavailable, CheckpointError, ConfigError: as `check`.
        """
        self.check()
        # A name of its own also where this step was saved before, whose tensors must stay until this is complete.
        write = _Write(None, f"{_name(step)}-{uuid.uuid4().hex[:8]}.pt", step, best)
        with self._changed:
            *waiting, _ = _wanted([*self._queue, write])
            self._drop(each for each in self._queue if each not in waiting)  # its memory is for this one
            self._queue = waiting
        write.state, write.buffers = self._memory.copy(state)
        self._enqueue(write)
        return self.storage.join(_name(step) + ".json")

    def save_file(self, name: str, state: Mapping[str, Any], on_wait: Callable[[], None] | None = None) -> str:
        """Write `state` to `name` beside the checkpoints, wait until it is there, and return its URL.

        Raises:
            StorageUnavailable, CheckpointError, ConfigError: as `check`.
        """
        self.wait(on_wait)
        self._enqueue(_Write(state, name, has_manifest=False))
        self.wait(on_wait)
        return self.storage.join(name)

    def check(self) -> None:
        """Raise if writing has failed for good. Costs nothing.

        Raises:
            StorageUnavailable: the store has been away for `timeout` seconds.
            ConfigError: the store refuses (`StorageDenied`), or the place belongs to another run.
            CheckpointError: the state cannot be written.
        """
        if isinstance(self._failure, (ConfigError, StorageUnavailable)):
            raise self._failure
        if self._failure is not None:
            raise CheckpointError(
                f"{redact_url(self.storage.url)}: a checkpoint could not be written: "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        since = self._stuck_since
        if since and time.monotonic() - max(since, self._sink.last_upload_at) > self.timeout:
            raise StorageUnavailable(
                f"checkpoints: {redact_url(self.storage.url)} could not be written to for {self.timeout:g} s "
                f"(store_timeout): {self._outage or 'the store does not answer'}"
            )

    @contextlib.contextmanager
    def finish_on_error(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """If the block raises, wait up to `WRITE_GRACE` seconds for what was saved in it, so that a retry finds it."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # the block's error is the one to report
                self.wait(on_wait, WRITE_GRACE)
            raise

    def wait(self, on_wait: Callable[[], None] | None = None, seconds: float = math.inf) -> None:
        """Return when everything saved so far is in place, or after `seconds`.

        Args:
            on_wait: called several times a second meanwhile, such as to send a heartbeat. The wait is bounded, because
                it ends when nothing was uploaded for `timeout` seconds.

        Raises:
            StorageUnavailable, CheckpointError, ConfigError: as `check`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._changed:
                if self._failure is None and not self._queue and not self._is_writing:
                    return
                self._changed.wait(0 if self._failure else POLL)
            self.check()
            if on_wait:
                on_wait()

    def load_latest(self) -> tuple[dict[str, Any] | None, str, list[str]]:
        """Return the newest checkpoint that is whole, its URL, and a line for each damaged one that was skipped.

        A damaged checkpoint is renamed to `skipped-...`, for people to look at; nothing here touches it again.

        Returns:
            (state with tensors on the CPU, URL, lines); (None, "", lines) where there is none.

        Raises:
            StorageUnavailable, StorageDenied: what is there could not be found out.
        """
        skipped: list[str] = []
        for manifest in sorted(self._manifests(self.storage), reverse=True):
            try:
                state = self._load(self.storage, manifest)
            except Damaged as damage:
                skipped.append(self._set_aside(self.storage, manifest, damage))
            else:
                self._resumed = manifest
                return state, self.storage.join(manifest), skipped
        return None, "", skipped

    def load(self, step: int) -> dict[str, Any]:
        """Return the checkpoint of optimizer step `step`, tensors on the CPU.

        Raises:
            CheckpointError: it is missing or damaged.
            StorageUnavailable, StorageDenied: it could not be read.
        """
        try:
            return self._load(self.storage, _name(step) + ".json")
        except Damaged as damage:
            raise CheckpointError(f"{self.storage.join(_name(step))}.json cannot be used: {damage}") from damage

    # --- Reading -------------------------------------------------------------------------------------------------

    def _load(self, storage: Storage, manifest_name: str) -> dict[str, Any]:
        """Read a checkpoint whole. Raises Damaged for what is proven, and the store's errors as they are."""
        manifest = self._manifest(storage, manifest_name)
        try:
            contents = storage.read(manifest["file"])
        except FileNotFoundError as error:
            raise Damaged(f"{manifest['file']} is missing") from error
        if len(contents) != manifest["bytes"]:
            raise Damaged(f"expected {manifest['bytes']} bytes, got {len(contents)}")
        if hashlib.sha256(contents).hexdigest() != manifest["sha256"]:
            raise Damaged("its SHA-256 is not the one that was recorded when it was written")
        try:
            state: dict[str, Any] = torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
            found = state["format"]
        except MemoryError:
            raise
        except Exception as error:  # the bytes are those that were written, so no other try would end otherwise
            raise Damaged(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        if found != FORMAT:
            raise Damaged(f"expected format {FORMAT}, got format {found}")
        self._own[manifest_name] = manifest
        self._files.add(manifest["file"])
        return state

    def _manifest(self, storage: Storage, name: str) -> dict[str, Any]:
        try:
            manifest = json.loads(storage.read(name))
            manifest["file"], manifest["bytes"], manifest["sha256"]
        except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
            raise Damaged(f"its manifest cannot be read: {type(error).__name__}: {error}") from error
        return dict(manifest)

    def _set_aside(self, storage: Storage, manifest_name: str, damage: Damaged) -> str:
        """Rename the files of a damaged checkpoint; return the line that reports it."""
        self._check_owner(storage)
        mark = f"skipped-{uuid.uuid4().hex[:8]}-"
        stem = manifest_name.removesuffix(".json")
        # The manifest goes last: without it, tensors that are left would be found by nothing.
        names = [name for name in storage.names() if name.startswith(f"{stem}-") and name.endswith(".pt")]
        for name in (*names, manifest_name):
            with contextlib.suppress(FileNotFoundError):
                storage.rename(name, mark + name)
        return f"{storage.join(manifest_name)} is damaged and was renamed to {mark}{manifest_name}: {damage}"

    # --- Writing: everything below runs in the writing thread -----------------------------------------------------

    def _enqueue(self, write: _Write) -> None:
        self._on_busy(True)
        with self._changed:
            self._queue = _wanted([*self._queue, write])
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()

    def _drop(self, writes: Iterable[_Write]) -> None:
        for write in writes:
            self._memory.release(write.buffers)
            write.buffers = []

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                write, self._is_writing = self._queue.pop(0), True
                self._stuck_since = self._stuck_since or time.monotonic()
            self._on_busy(True)
            try:
                self._write(write)
            except StorageUnavailable as error:  # the storage has logged it
                self._on_busy(False)
                self._outage = error
                with self._changed:
                    self._queue, self._is_writing = _wanted([write, *self._queue]), False
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            except Exception as error:
                with self._changed:
                    self._failure, self._is_writing = error, False
                    self._on_busy(False)
                    self._changed.notify_all()
                return
            else:
                pause = FIRST_PAUSE
                with self._changed:
                    self._outage, self._is_writing = None, False
                    self._on_busy(bool(self._queue))
                    self._stuck_since = 0.0
                    self._changed.notify_all()

    def _write(self, write: _Write) -> None:
        if write.state is not None:
            buffer = io.BytesIO()
            torch.save({"format": FORMAT, **write.state} if write.has_manifest else dict(write.state), buffer)
            write.contents, write.state = buffer.getvalue(), None
            self._drop([write])
        self._check_owner(self._sink)
        if not write.has_manifest:
            self._sink.write(write.file, write.contents)
            return
        self._files.add(write.file)
        self._sink.write(write.file, write.contents)
        manifest = {
            "file": write.file,
            "bytes": len(write.contents),
            "sha256": hashlib.sha256(write.contents).hexdigest(),
            "step": write.step,
            "best": write.best,
            "written_at": time.time(),
        }
        self._check_owner(self._sink)  # an upload may take long
        name = _name(write.step) + ".json"
        self._sink.write(name, json.dumps(manifest).encode())
        self._own[name] = manifest
        try:
            self._prune(name)
        except Exception as error:  # the checkpoint is in place: what could not be deleted now goes the next time
            logger.warning("checkpoints: old ones could not be removed: %s: %s", type(error).__name__, error)

    def _prune(self, newest: str) -> None:
        """Delete what newer checkpoints replace. Only what was written or read whole here counts and goes."""
        names = set(self._sink.names())
        self._adopt_one(names)
        self._own = {name: manifest for name, manifest in self._own.items() if name in names}
        own = sorted(name for name in self._own if name <= newest)
        best = [name for name in own if self._own[name].get("best")]
        kept = {*own[-self.num_kept :], *best[-1:], *([self._resumed] if self.keeps_resumed else [])}
        # Manifests go first: without one a checkpoint does not exist, with one it must be whole.
        for name in own:
            if name not in kept:
                self._sink.delete(name)
                del self._own[name]
        referenced = {manifest["file"] for manifest in self._own.values()}
        for name in names:
            is_half = name.startswith("step-") and name.endswith(".tmp")  # a killed writer on a local disk
            if is_half or (name in self._files and name not in referenced):
                self._sink.delete(name)
        self._files &= referenced

    def _adopt_one(self, names: set[str]) -> None:
        """Read the oldest checkpoint of an earlier attempt whole, so that it may be deleted when its time has come."""
        older = [name for name in names if _is_manifest(name) and name < self._resumed and name not in self._own]
        if older:
            try:
                self._load(self._sink, min(older))
            except Damaged as damage:
                logger.warning("%s", self._set_aside(self._sink, min(older), damage))

    def _check_owner(self, storage: Storage) -> None:
        if self.owner:
            check_owner(storage, self.owner)

    def _manifests(self, storage: Storage) -> list[str]:
        return [name for name in storage.names() if _is_manifest(name)]


def _wanted(queue: list[_Write]) -> list[_Write]:
    """Return what is worth writing of `queue`, oldest first: the newest state, and the newest that was the best."""
    best = [write for write in queue if write.best][-1:]
    return [write for write in queue if write is queue[-1] or write in best]


def load_state(url: str, timeout: float = STORE_TIMEOUT) -> Any:
    """Return the state dict at `url`, tensors on the CPU; only tensors and plain values are unpickled.

    Args:
        timeout: seconds to wait for a store that cannot be reached.
    """
    directory, _, name = url.rpartition("/")
    contents = Storage(directory, timeout=timeout).read(name)
    return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)


def portable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state dict as copies on the CPU in the default memory format, to load on any machine."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def _name(step: int) -> str:
    return f"step-{step:010d}"


def _is_manifest(name: str) -> bool:
    return name.startswith("step-") and name.endswith(".json")
