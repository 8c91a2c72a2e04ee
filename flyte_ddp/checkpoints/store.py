"""Checkpoints that outlive the process that wrote them: atomic, checksummed, at any fsspec URL.

A checkpoint is a file of each rank that saves a part, such as `step-0000000123-4f1c88a2-1of4.pt`,
and the manifest, `step-0000000123.json`, which names these files with their sizes and checksums. It
is written last, so a checkpoint without one does not exist.

Two rules keep progress safe. Only proven damage is skipped: a store that cannot be reached is
waited for. And nothing is deleted that no newer checkpoint of this run replaces: what is damaged is
renamed to `skipped-...`.

Knows nothing of models. Rank 0 writes, or every rank its part, and rank 0 the manifest.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import torch

from flyte_ddp.checkpoints.assembly import BoxOf, assemble, keep_all
from flyte_ddp.checkpoints.files import (
    CHECKSUM,
    FORMAT,
    Damaged,
    Entry,
    checkpoint_name,
    is_manifest,
    read_file,
    read_manifest,
    save_state,
)
from flyte_ddp.checkpoints.memory import Slots
from flyte_ddp.checkpoints.ownership import check_owner
from flyte_ddp.checkpoints.peers import Peers
from flyte_ddp.checkpoints.retention import Retention
from flyte_ddp.checkpoints.staging import Buffers, StagingMemory
from flyte_ddp.checkpoints.state import Part, collect, find_tensors, map_tensors
from flyte_ddp.config.background import start_thread
from flyte_ddp.config.waits import BEAT_INTERVAL, POLL_INTERVAL
from flyte_ddp.errors import CheckpointError, ConfigError, StorageUnavailable
from flyte_ddp.storage import STORE_TIMEOUT, Storage, redact_url
from flyte_ddp.storage.directory import FIRST_PAUSE, MAX_PAUSE
from flyte_ddp.storage.failures import describe
from flyte_ddp.world import ALONE, World, call_together

WRITER_NICENESS = 10  # of 19: where all cores compute, the writer still gets a tenth of one

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Write:
    """A state that is to be written."""

    state: Mapping[str, Any] | None  # None once it is in `contents`
    name: str  # of the file, or what the names of all ranks' files begin with
    step: int = 0
    best: bool = False
    has_manifest: bool = True
    number: int = 0  # counts the saves of this process, so it is the same on all ranks
    contents: bytes = b""
    buffers: Buffers | None = None  # the memory of `state`
    entry: Entry = field(default_factory=dict)  # size and checksum of the file, once it was written

    def save_to(self, file: BinaryIO) -> tuple[int, str]:
        self.entry = save_state(self.state or {}, file, not self.has_manifest)
        return self.entry["bytes"], self.entry[CHECKSUM]


@dataclass(eq=False)
class CheckpointStore:
    """The checkpoints of one run below one URL.

    A thread writes, so that training never waits for the store. While it writes one state, another
    one waits, which a newer one replaces; the best one so far waits too. While the store is away,
    the thread tries again.
    """

    url: str  # any fsspec URL or local path; created where missing
    num_kept: int  # number of newest checkpoints that are kept; the best one is kept too
    # seconds that the store may be away before `check`, `save` and `wait` raise
    timeout: float = STORE_TIMEOUT
    # The token of the run that owns the place (`ownership.Ownership`), checked before anything is
    # written, renamed or deleted; "" for a place that nothing else uses.
    owner: str = ""
    # Called with True when a state is about to be written, and with False when none is being
    # written; with step and URL of a checkpoint that the store now has whole, and whether it is the
    # best, on rank 0 only.
    report: Callable[[bool, tuple[int, str, bool] | None], None] = lambda is_busy, written: None
    # who save a state together; all of them make the same calls then
    peers: Peers = field(default_factory=lambda: Peers(ALONE))
    slots: Slots | None = None  # take states in memory
    returns_to_best: bool = False  # the run ends with the best state
    # nothing resumes any more: on a full disk the model counts more than checkpoints
    has_finished: bool = False
    staging: StagingMemory = field(default_factory=StagingMemory)
    _queue: list[_Write] = field(default_factory=list)
    _num_saves: int = 0
    _current: _Write | None = None  # what is being written
    _stuck_since: float = 0.0  # monotonic: when the state being written was begun; 0 while idle
    # Progress of an upload: the most bytes that any try has stored since the last complete
    # checkpoint, and when.
    _most_stored: int = 0
    _stored_at: float = 0.0
    _outage: str = ""  # why the last try failed
    _failure: Exception | None = None  # final
    _num_in_memory: int = 0  # states that are being written to the memory of the node
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.storage = Storage(self.url, timeout=self.timeout)
        # a failed try must not keep a newer state waiting
        self._sink = Storage(self.url, timeout=0)
        self.retention = Retention(self._sink, self.num_kept, self.owner)

    def share_with(self, peers: Peers) -> None:
        """Save every state together with `peers` from now on. Nothing may be waiting to be
        written.
        """
        self.peers = peers
        self._num_saves = 0  # the ranks number them alike

    @property
    def _follows(self) -> bool:
        """True where rank 0 chooses the states that this rank writes a part of."""
        return not self.peers.world.is_first

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        best: bool,
        to_store: bool = True,
        to_memory: bool = False,
    ) -> str | None:
        """Keep `state` as the checkpoint of optimizer step `step`, the best so far if `best`;
        return its URL.

        `state` is copied before this returns; nested dicts and lists of tensors and plain values
        are fine.

        Args:
            to_store, to_memory: where. In memory it is left out while the state before it is
                incomplete there, or the best one is not in the store yet.

        Returns:
            "" for a state in memory alone; None if that was left out.

        Raises:
            ConfigError: `state` holds something that could not be read back; also as `check`.
            StorageUnavailable, CheckpointError: as `check`.
        """
        self.check()
        if to_memory:
            # A state after the best epoch is of no use before the store has that epoch's.
            waits = self.returns_to_best and any(
                each.best for each in (self._current, *self._queue) if each
            )
            is_ready = self.slots and self.slots.is_ready and not self._num_in_memory
            to_memory = bool(is_ready and (to_store or not waits))
            to_memory = not self.peers.world.all_reduce(not to_memory)[0]
        if not (to_store or to_memory):
            return None
        part = collect(state, self.peers.world.is_first)
        # A new name even for a step that was saved before: its tensors must stay until this
        # checkpoint is complete.
        self._num_saves += to_store
        name = f"{checkpoint_name(step)}-{uuid.uuid4().hex[:8]}"
        write = _Write(None, name, step, best, number=self._num_saves)
        if to_store:
            self._make_room(write)
        on_gpu = any(each.is_cuda for _, each in find_tensors(part))
        if to_store or on_gpu:
            write.state, write.buffers = self.staging.copy(part)
        if to_memory:
            self._save_in_memory(replace(write), part, on_gpu)
        if not to_store:
            return ""
        self._enqueue(write)
        return self.storage.join(checkpoint_name(step) + ".json")

    def _save_in_memory(self, write: _Write, part: Any, on_gpu: bool) -> None:
        """Write a part to the memory of the node: from a copy that GPUs have made, in a thread, or
        on a CPU at once.

        A thread would need a copy there, too, which takes as long on the same cores.
        """
        assert self.slots is not None  # else nothing is ready
        slots = self.slots

        def save() -> None:
            if on_gpu:
                _yield_cores_to_training()
            try:
                slots.write(write.step, self.peers.world.world_size, write.save_to)
            except (
                Exception
            ) as error:  # nothing is ready any more, and the store still has its checkpoints
                logger.warning("no more states are kept in memory: %s", describe(error))
            write.state, write.buffers = None, None
            with self._changed:
                self._num_in_memory -= 1
                self._changed.notify_all()

        with self._changed:
            self._num_in_memory += 1
        if on_gpu:
            start_thread("memory", save)
        else:
            write.state = map_tensors(part, lambda each: each.detach())
            save()

    def _make_room(self, write: _Write) -> None:
        """Drop the states that `write` replaces, on all ranks those of rank 0; their memory is for
        this one.
        """
        with self._changed:
            if not self._follows:
                self._keep([each.number for each in _choose_wanted([*self._queue, write])])
            kept = [each.number for each in (self._current, *self._queue) if each]
        kept = self.peers.world.broadcast_object(kept)
        with self._changed:
            self._keep(kept)

    def _keep(self, numbers: list[int]) -> None:
        self._queue = [each for each in self._queue if each.number in numbers]

    def save_file(self, name: str, state: Mapping[str, Any], on_wait: Callable[[], None]) -> str:
        """Write `state` to `name` beside the checkpoints, wait until it is there, and return its
        URL.

        Raises:
            StorageUnavailable, CheckpointError, ConfigError: as `check`.
        """
        self.wait(on_wait)
        self._enqueue(_Write(state, name, has_manifest=False))
        self.wait(on_wait)
        return self.storage.join(name)

    def save_bad(self, state: Mapping[str, Any], step: int, on_wait: Callable[[], None]) -> None:
        """Keep `state`, that before the bad step `step`, outside retention and in place of the last
        such one; wait until it is there. `peers` call it together.

        Raises:
            StorageUnavailable, CheckpointError, ConfigError: as `check`.
        """
        world = self.peers.world
        name = f"bad-step-{step:010d}-{world.rank:05d}.pt"
        self.save_file(name, collect(state, world.is_first), on_wait)
        for each in self.storage.names() if world.is_first else ():
            if each.startswith("bad-step-") and each[:19] != name[:19]:
                self.storage.delete(each)

    def check(self) -> None:
        """Raise if writing has failed for good. Costs nothing.

        Raises:
            StorageUnavailable: the store has been away for `timeout` seconds.
            ConfigError: the store refuses (`StorageDenied`), or the place belongs to another run.
            CheckpointError: the state cannot be written.
        """
        if self._failure is not None:
            raise self._failure
        since = self._stuck_since
        if (stored := self._sink.stored_bytes) > self._most_stored:
            self._most_stored, self._stored_at = stored, time.monotonic()
        if since and time.monotonic() - max(since, self._stored_at) > self.timeout:
            raise StorageUnavailable(
                f"checkpoints: {redact_url(self.storage.url)} could not be written to for "
                f"{self.timeout:g} s (store_timeout): {self._outage or 'the store does not answer'}"
            )

    def wait(self, on_wait: Callable[[], None] | None = None, seconds: float = math.inf) -> None:
        """Return when everything saved so far is in place, or after `seconds`.

        Args:
            on_wait: called several times a second meanwhile, such as to send a heartbeat. The wait
                is bounded, because it ends when nothing was uploaded for `timeout` seconds.

        Raises:
            StorageUnavailable, CheckpointError, ConfigError: as `check`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._changed:
                if self._failure is None and not (
                    self._queue or self._current or self._num_in_memory
                ):
                    return
                self._changed.wait(0 if self._failure else POLL_INTERVAL)
            self.check()
            if on_wait:
                on_wait()

    def load_latest(
        self, world: World = ALONE, box_of: BoxOf = keep_all
    ) -> tuple[dict[str, Any] | None, str, list[str]]:
        """Return the newest checkpoint that is whole, its URL, and a line for each damaged one that
        was skipped.

        A damaged checkpoint is renamed to `skipped-...`, for people to look at; nothing here
        touches it again.

        Args:
            world: the ranks that read it together; each of them calls this.
            box_of: returns what this rank keeps of each tensor.

        Returns:
            (state with tensors on the CPU, URL, lines); (None, "", lines) where there is none. The
            lines on rank 0.

        Raises:
            StorageUnavailable, StorageDenied: what is there could not be found out.
        """
        skipped: list[str] = []
        name = ""
        damage: Damaged | None = None

        def find() -> str:
            if not world.is_first:
                return ""
            if damage is not None:
                skipped.append(self.retention.set_aside(self.storage, name, damage))
            return max(filter(is_manifest, self.storage.names()), default="")

        while name := world.broadcast_object(call_together(find, world)):
            try:
                state = self._read(name, world, box_of)
            except Damaged as error:
                damage = error
            else:
                self.retention.resumed = name
                return state, self.storage.join(name), skipped
        return None, "", skipped

    def load(
        self, step: int, world: World = ALONE, box_of: BoxOf = keep_all, is_bad: bool = False
    ) -> dict[str, Any]:
        """Return the checkpoint of optimizer step `step`, tensors on the CPU. Arguments as of
        `load_latest`.

        Args:
            is_bad: that of `save_bad` for this step.

        Raises:
            CheckpointError: on every rank, if it is missing or damaged.
            StorageUnavailable, StorageDenied: it could not be read.
        """
        if is_bad:
            start = f"bad-step-{step:010d}-"
            names = sorted(name for name in self.storage.names() if name.startswith(start))

            def read(entry: Entry) -> Part:
                contents = io.BytesIO(self.storage.read(entry["file"]))
                return torch.load(contents, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]

            return assemble([{"file": name} for name in names], read, world, box_of)  # type: ignore[no-any-return]
        name = checkpoint_name(step) + ".json"
        try:
            return self._read(name, world, box_of)
        except Damaged as damage:
            raise CheckpointError(f"{self.storage.join(name)} cannot be used: {damage}") from damage

    def _read(self, name: str, world: World, box_of: BoxOf) -> dict[str, Any]:
        """Return the checkpoint with this manifest. Raises Damaged, on every rank."""

        def read() -> dict[str, Any]:
            try:
                return read_manifest(self.storage, name) if world.is_first else {}
            except Damaged as damage:
                return {"damage": str(damage)}

        manifest = world.broadcast_object(call_together(read, world))
        if "damage" in manifest:
            raise Damaged(manifest["damage"])
        state: dict[str, Any] = assemble(
            manifest["files"],
            lambda entry: read_file(self.storage, entry),
            world,
            box_of,
            is_mapped=self.storage.is_local,
        )
        self.retention.own[name] = manifest
        return state

    # --- Writing: everything below runs in the writing thread
    # -----------------------------------------------------

    def _enqueue(self, write: _Write) -> None:
        self.report(True, None)
        with self._changed:
            self._queue.append(write)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = start_thread("checkpoint", self._write_queue)

    def _write_queue(self) -> None:
        _yield_cores_to_training()
        pause = FIRST_PAUSE
        while True:
            write: _Write | None = None
            try:
                write = self._next()
                self.report(True, None)
                self._write(write)
            except StorageUnavailable as error:  # the storage has logged it
                self.report(False, None)
                self._outage = str(error)
                with self._changed:
                    waiting = [write, *self._queue] if write else self._queue
                    self._queue = waiting if self._follows else _choose_wanted(waiting)
                    self._current = None
                if error.is_full and self.peers.world.world_size == 1 and self._make_space():
                    continue
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            except Exception as error:
                if not isinstance(error, ConfigError):
                    place, why = redact_url(self.storage.url), describe(error.__cause__ or error)
                    error = CheckpointError(f"{place}: a checkpoint could not be written: {why}")
                with self._changed:
                    self._failure, self._current = error, None
                    self.report(False, None)
                    self._changed.notify_all()
                return
            else:
                pause = FIRST_PAUSE
                write.state, write.buffers = None, None  # the memory is free before the wait ends
                with self._changed:
                    self._outage, self._current = "", None
                    self.report(bool(self._queue), None)
                    self._stuck_since, self._most_stored = 0.0, 0
                    self._changed.notify_all()

    def _next(self) -> _Write:
        """Wait for a state to write, and take it from the queue: the oldest, or the one that rank 0
        has begun.
        """
        pause = POLL_INTERVAL
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                follows = self._follows and self._queue[0].has_manifest
            number, name = self.peers.announced(0) if follows else (0, "")
            with self._changed:
                # older ones are not written any more
                self._queue = [each for each in self._queue if each.number >= number]
                if self._queue and (not follows or self._queue[0].number == number):
                    self._current = write = self._queue.pop(0)
                    write.name = name or write.name
                    self._stuck_since = self._stuck_since or time.monotonic()
                    return write
                self._changed.notify_all()
            time.sleep(pause)
            pause = min(2 * pause, BEAT_INTERVAL)  # all followers ask one process

    def _write(self, write: _Write) -> None:
        if write.has_manifest and not self._follows:
            self.peers.announce(write.number, write.name)
        # Not for a local disk, which gets the tensors without a copy of them all: this thread's
        # core is the training's.
        if write.state is not None and not self._sink.is_local:
            write.save_to(buffer := io.BytesIO())
            write.contents, write.state, write.buffers = buffer.getvalue(), None, None
        check_owner(self._sink, self.owner)
        file = self.peers.file(write.name) if write.has_manifest else write.name
        self._sink.write(file, write.contents if write.state is None else write.save_to)
        if not write.has_manifest:
            return
        entry = {"file": file, **write.entry}
        if self._follows:
            self.peers.announce(write.number, entry)
            return
        manifest = {
            "format": FORMAT,
            "files": [entry, *self._wait_for_peers(write.number)],
            "step": write.step,
            "best": write.best,
            "written_at": time.time(),
        }
        check_owner(self._sink, self.owner)  # an upload may take long
        name = checkpoint_name(write.step) + ".json"
        self._sink.write(name, json.dumps(manifest).encode())
        self.retention.own[name] = manifest
        self.report(True, (write.step, self.storage.join(name), write.best))
        try:
            self.retention.prune(name)
        except (
            Exception
        ) as error:  # the checkpoint is in place: what could not be deleted now goes the next time
            logger.warning("checkpoints: old ones could not be removed: %s", describe(error))

    def _make_space(self) -> bool:
        """Make space on a full disk: while a training goes on, for the next checkpoint, and at its
        end for the model.

        For a checkpoint by deleting all but the newest and the best. For the model, of which the
        best may be a copy, then by giving up those that are not written yet; and where it is to be
        written itself, by deleting the best.

        Returns:
            True if another try may succeed.
        """
        if not self.has_finished and self.retention.num_kept > 1:
            logger.warning(
                "the disk is full: from now on only the newest checkpoint and the best one stay"
            )
        with self._changed:
            checkpoints = [write for write in self._queue if write.has_manifest]
        with contextlib.suppress(Exception):  # what could not be deleted now goes the next time
            if self.retention.keep_newest(keeps_best=bool(checkpoints)):
                return True
        if not (self.has_finished and checkpoints):
            return False
        with self._changed:
            self._queue = [write for write in self._queue if not write.has_manifest]
            self._stuck_since = 0.0
            self._changed.notify_all()
        logger.warning(
            "the last checkpoint is not written: the disk is full, and the training has finished"
        )
        return True

    def _wait_for_peers(self, number: int) -> list[Entry]:
        """Return the other ranks' entries once their files are in place. `check` ends the run if
        none comes.
        """
        entries: list[Entry] = []
        for rank in range(1, self.peers.world.world_size):
            while (announced := self.peers.announced(rank))[0] != number:
                self._outage = f"the shard of rank {rank} is not in place"
                time.sleep(POLL_INTERVAL)
            entries.append(announced[1])
            self._stuck_since = time.monotonic()
        return entries


def _choose_wanted(queue: list[_Write]) -> list[_Write]:
    """Return what is worth writing of `queue`, oldest first: the newest state, and the newest that
    was the best.
    """
    best = [write for write in queue if write.best][-1:]
    return [write for write in queue if write is queue[-1] or write in best]


def _yield_cores_to_training() -> None:
    """Lower the priority of the calling thread. Only on Linux a thread has one of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.nice(WRITER_NICENESS)
