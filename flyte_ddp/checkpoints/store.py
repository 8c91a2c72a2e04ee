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

import io
import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import Store

from flyte_ddp.checkpoints.assembly import BoxOf, assemble, keep_all
from flyte_ddp.checkpoints.files import (
    Damaged,
    Entry,
    checkpoint_name,
    is_manifest,
    read_file,
    read_manifest,
)
from flyte_ddp.checkpoints.memory import Slots
from flyte_ddp.checkpoints.peers import Peers
from flyte_ddp.checkpoints.retention import Retention
from flyte_ddp.checkpoints.staging import StagingMemory
from flyte_ddp.checkpoints.state import StatePart, collect, find_tensors
from flyte_ddp.checkpoints.write_queue import WriteQueue
from flyte_ddp.checkpoints.writer import MemoryWriter, Report, Write, Writer
from flyte_ddp.config.waits import POLL_INTERVAL
from flyte_ddp.errors import CheckpointError
from flyte_ddp.storage import STORE_TIMEOUT, Storage
from flyte_ddp.world import ALONE, World, call_together


class CheckpointStore:
    """The checkpoints of one run below one URL.

    A thread writes, so that training never waits for the store.

    store = CheckpointStore("s3://bucket/run", num_kept=2)
    store.save({"model": model.state_dict()}, step=100, best=False)
    store.wait()
    state, url, skipped = store.load_latest()
    """

    def __init__(
        self,
        url: str,  # any fsspec URL or local path; created where missing
        num_kept: int,  # number of newest checkpoints that are kept; the best one is kept too
        # seconds that the store may be away before `check`, `save` and `wait` raise
        timeout: float = STORE_TIMEOUT,
        # The token of the run that owns the place (`ownership.Ownership`), checked before anything
        # is written, renamed or deleted; "" for a place that nothing else uses.
        owner: str = "",
        report: Report = lambda is_busy, written: None,
        # the ranks that save a state together, by the same calls
        peers: Peers | None = None,
        slots: Slots | None = None,  # take states in memory
    ) -> None:
        sink = Storage(url, timeout=0)
        self.storage, self.peers = Storage(url, timeout=timeout), peers or Peers(ALONE)
        self.retention = Retention(sink, num_kept, owner)
        self.queue = WriteQueue(Writer(sink, self.peers, self.retention, report, timeout))
        self.memory, self.staging = MemoryWriter(slots), StagingMemory()
        self.returns_to_best = False  # the run ends with the best state
        self._num_saves = 0

    def share_with(self, world: World, store: Store) -> None:
        """Save every state together with other ranks from now on. Nothing may be waiting to be
        written.
        """
        self.peers.world, self.peers.store = world, store
        self._num_saves = 0  # the ranks number them alike

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
            waits = self.returns_to_best and self.queue.has_best and not to_store
            is_ready = self.memory.is_ready and not waits
            to_memory = not self.peers.world.all_reduce(not is_ready)[0]
        if not (to_store or to_memory):
            return None
        part = collect(state, self.peers.world.is_first)
        # A new name even for a step that was saved before: its tensors must stay until this
        # checkpoint is complete.
        self._num_saves += to_store
        name = f"{checkpoint_name(step)}-{uuid.uuid4().hex[:8]}"
        write = Write(None, name, step, best, number=self._num_saves)
        if to_store:
            self.queue.make_room(write)
        on_gpu = any(each.is_cuda for _, each in find_tensors(part))
        if to_store or on_gpu:
            write.state, write.buffers = self.staging.copy(part)
        if to_memory:
            copy = replace(write) if on_gpu else Write(None, name, step)
            self.memory.save(copy, part, self.peers.world.world_size)
        if not to_store:
            return ""
        self.queue.add(write)
        return self.storage.join(checkpoint_name(step) + ".json")

    def save_file(self, name: str, state: Mapping[str, Any], on_wait: Callable[[], None]) -> str:
        """Write `state` to `name` beside the checkpoints, wait until it is there, and return its
        URL.

        Raises:
            StorageUnavailable, CheckpointError, ConfigError: as `check`.
        """
        self.wait(on_wait)
        self.queue.add(Write(state, name, has_manifest=False))
        self.wait(on_wait)
        return self.storage.join(name)

    def save_bad(self, state: Mapping[str, Any], step: int, on_wait: Callable[[], None]) -> None:
        """Keep the state before the bad step `step`, and wait until it is stored. It replaces the
        last such state, and retention leaves it alone. All ranks of `peers` call this together.

        Raises:
            StorageUnavailable, CheckpointError, ConfigError: as `check`.
        """
        world = self.peers.world
        name = f"bad-step-{step:010d}-{world.rank:05d}.pt"
        self.save_file(name, collect(state, world.is_first), on_wait)
        if not world.is_first:
            return
        for each in self.storage.names():
            if each.startswith("bad-step-") and each[:19] != name[:19]:
                self.storage.delete(each)

    def check(self) -> None:
        """Raise if writing has failed for good. Costs nothing.

        Raises:
            StorageUnavailable: the store has been away for `timeout` seconds.
            ConfigError: the store refuses (`StorageDenied`), or the place belongs to another run.
            CheckpointError: the state cannot be written.
        """
        self.queue.check()

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
            if self.queue.wait(POLL_INTERVAL) and self.memory.wait(POLL_INTERVAL):
                return
            self.check()
            if on_wait:
                on_wait()

    def load_latest(
        self, world: World = ALONE, box_of: BoxOf = keep_all
    ) -> tuple[dict[str, Any] | None, str, list[str]]:
        """Return the newest checkpoint that is whole, its URL, and a line for each damaged one that
        was skipped.

        A damaged checkpoint is renamed to `skipped-...`, so that people can look at it. Nothing
        here touches it again.

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
                skipped.append(self.retention.rename_damaged(self.storage, name, damage))
            return max(filter(is_manifest, self.storage.names()), default="")

        while True:
            name = world.broadcast_object(call_together(find, world))
            if not name:
                break
            try:
                state = self._read(name, world, box_of)
            except Damaged as error:
                damage = error
            else:
                self.retention.resumed_manifest = name
                return state, self.storage.join(name), skipped
        return None, "", skipped

    def load(
        self, step: int, world: World = ALONE, box_of: BoxOf = keep_all, is_bad: bool = False
    ) -> dict[str, Any]:
        """Return the checkpoint of optimizer step `step`, with its tensors on the CPU.

        Args:
            world, box_of: see `load_latest`.
            is_bad: load the state that `save_bad` kept for this step.

        Raises:
            CheckpointError: on every rank, if it is missing or damaged.
            StorageUnavailable, StorageDenied: it could not be read.
        """
        if is_bad:
            start = f"bad-step-{step:010d}-"
            names = sorted(name for name in self.storage.names() if name.startswith(start))

            def read(entry: Entry) -> StatePart:
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
                if world.is_first:
                    return read_manifest(self.storage, name)
                return {}
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
        self.retention.replaceable[name] = manifest
        return state
