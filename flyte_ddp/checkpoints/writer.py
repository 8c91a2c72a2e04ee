"""The write of one state: to the store, in one try, or to the memory of the node."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from flyte_ddp.checkpoints.files import CHECKSUM, FORMAT, Entry, checkpoint_name, save_state
from flyte_ddp.checkpoints.memory import Slots
from flyte_ddp.checkpoints.ownership import check_owner
from flyte_ddp.checkpoints.peers import Peers
from flyte_ddp.checkpoints.retention import Retention
from flyte_ddp.checkpoints.staging import Buffers
from flyte_ddp.checkpoints.state import map_tensors
from flyte_ddp.config.waits import POLL_INTERVAL
from flyte_ddp.errors import StorageUnavailable
from flyte_ddp.process.threads import start_thread
from flyte_ddp.storage import Storage, redact_url
from flyte_ddp.storage.failures import describe

WRITER_NICENESS = (
    10  # 19 is the lowest priority: at 10 the writer still gets a tenth of a busy core
)

logger = logging.getLogger(__name__)

# The callback gets True before a state is written, and False when no state is being written. On
# rank 0 it also gets each checkpoint that is complete in the store: its step, its URL, and whether
# it is the best.
Report = Callable[[bool, tuple[int, str, bool] | None], None]


@dataclass(eq=False)
class Write:
    """A state that is to be written."""

    state: Mapping[str, Any] | None  # None once it is in `contents`
    name: str  # name of the file, or the beginning of all ranks' file names
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

    def free(self) -> None:
        """Free the memory of the state."""
        self.state = self.buffers = None


@dataclass(eq=False)
class Writer:
    """Writes states, each in one try."""

    sink: Storage  # makes one try: a repeated one would keep a newer state waiting
    peers: Peers
    retention: Retention
    report: Report
    timeout: float  # seconds that the store may be away
    outage: str = ""  # why the last try failed
    since: float = 0.0  # monotonic: when the state being written was begun; 0 while idle
    # the most bytes that any try has stored since the last complete checkpoint, and their time
    _most_stored: int = 0
    _stored_at: float = 0.0

    @property
    def follows(self) -> bool:
        """True where rank 0 chooses the states that this rank writes a part of."""
        return not self.peers.world.is_first

    def check(self) -> None:
        """Raise StorageUnavailable if nothing was stored for `timeout` seconds. Another thread than
        the writing one calls it.
        """
        since, stored = self.since, self.sink.stored_bytes
        if stored > self._most_stored:
            self._most_stored, self._stored_at = stored, time.monotonic()
        if since and time.monotonic() - max(since, self._stored_at) > self.timeout:
            raise StorageUnavailable(
                f"checkpoints: {redact_url(self.sink.url)} could not be written to for "
                f"{self.timeout:g} s (store_timeout): {self.outage or 'the store does not answer'}"
            )

    def end(self) -> None:
        """Note that a state is in place."""
        self.outage, self.since, self._most_stored = "", 0.0, 0

    def write(self, write: Write) -> None:
        """Write this rank's part of a state, and on rank 0 the manifest."""
        self.since = self.since or time.monotonic()
        if write.has_manifest and not self.follows:
            self.peers.announce(write.number, write.name)
        # A local disk gets the tensors without a copy of them all, because the training needs this
        # thread's core.
        if write.state is not None and not self.sink.is_local:
            buffer = io.BytesIO()
            write.save_to(buffer)
            write.contents = buffer.getvalue()
            write.free()
        check_owner(self.sink, self.retention.owner)
        file = write.name
        if write.has_manifest:
            file = self.peers.file(write.name)
        self.sink.write(file, write.contents if write.state is None else write.save_to)
        entry = {"file": file, **write.entry}
        if self.follows and write.has_manifest:
            self.peers.announce(write.number, entry)
        elif write.has_manifest:
            self._complete(write, [entry, *self._wait_for_peers(write.number)])

    def _complete(self, write: Write, entries: list[Entry]) -> None:
        """Write the manifest, and delete what the checkpoint replaces."""
        manifest = {
            "format": FORMAT,
            "files": entries,
            "step": write.step,
            "best": write.best,
            "written_at": time.time(),
        }
        check_owner(self.sink, self.retention.owner)  # an upload may take long
        name = checkpoint_name(write.step) + ".json"
        self.sink.write(name, json.dumps(manifest).encode())
        self.retention.replaceable[name] = manifest
        self.report(True, (write.step, self.sink.join(name), write.best))
        try:
            self.retention.prune(name)
        except Exception as error:  # the next checkpoint deletes the rest
            logger.warning("checkpoints: old ones could not be removed: %s", describe(error))

    def _wait_for_peers(self, number: int) -> list[Entry]:
        """Return the other ranks' entries once their files are in place. If an entry never comes,
        `check` ends the run.
        """
        entries: list[Entry] = []
        for rank in range(1, self.peers.world.world_size):
            announced = self.peers.announced(rank)
            while announced[0] != number:
                self.outage = f"the shard of rank {rank} is not in place"
                time.sleep(POLL_INTERVAL)
                announced = self.peers.announced(rank)
            entries.append(announced[1])
            self.since = time.monotonic()
        return entries


@dataclass(eq=False)
class MemoryWriter:
    """Writes the states of a rank to the memory of its node, one at a time."""

    slots: Slots | None  # None where nothing is kept in memory
    _is_idle: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._is_idle.set()

    @property
    def is_ready(self) -> bool:
        """True when the last state is complete, so that the one before it may be overwritten."""
        return self.slots is not None and self.slots.is_ready and self._is_idle.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether nothing is being written."""
        return self._is_idle.wait(seconds)

    def save(self, write: Write, part: Any, num_parts: int) -> None:
        """Write a part. With a GPU a thread writes it from the copy in `write`. On a CPU this
        method writes it at once.

        On a CPU a thread would also need a copy, and the copy takes as long on the same cores.
        """
        self._is_idle.clear()
        if write.state is None:
            write.state = map_tensors(part, lambda each: each.detach())
            self._write(write, num_parts)
        else:
            start_thread("memory", self._write_copy, write, num_parts)

    def _write_copy(self, write: Write, num_parts: int) -> None:
        yield_cores_to_training()
        self._write(write, num_parts)

    def _write(self, write: Write, num_parts: int) -> None:
        assert self.slots is not None  # nothing is ready without slots
        try:
            self.slots.write(write.step, num_parts, write.save_to)
        except Exception as error:  # the run goes on with the checkpoints in the store
            logger.warning("no more states are kept in memory: %s", describe(error))
        write.free()
        self._is_idle.set()


def yield_cores_to_training() -> None:
    """Lower the priority of the calling thread on Linux. Other systems have one for all threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.nice(WRITER_NICENESS)
