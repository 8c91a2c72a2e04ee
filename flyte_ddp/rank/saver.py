"""The checkpoints of one rank: what it saves, loads and waits for.

Imports no torch before a checkpoint is read or written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.checkpoints import MAX_STEP
from flyte_ddp.checkpoints.memory import MemoryPart
from flyte_ddp.config.fields import whole_number
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.rank.position import DataPosition
from flyte_ddp.rank.reporter import Reporter
from flyte_ddp.rank.stop import StopAgreement

if TYPE_CHECKING:
    from flyte_ddp.checkpoints.assembly import BoxOf
    from flyte_ddp.checkpoints.peers import Peers
    from flyte_ddp.checkpoints.store import CheckpointStore
    from flyte_ddp.world import World

NUM_KEPT = 2  # newest checkpoints that stay
# A rank waits for the others to save a split state for this share of `stall_timeout` and of a
# collective's timeout. They may wait for the rank in a collective, and if that fails, the run ends
# without the reason.
SAVE_TIMEOUT_SHARE = 0.5
# place of the checkpoints where a run keeps states in the memory of nodes alone; it stays empty
NO_PLACE = "memory://flyte-ddp"


@dataclass(eq=False, repr=False)
class Saver:
    """Saves and loads the states of one rank."""

    process: RankProcess
    position: DataPosition  # position in the data, a part of a function's checkpoints
    stop: StopAgreement
    reporter: Reporter
    trainer: str = ""  # the framework's call that has begun and owns the checkpoints
    _store: CheckpointStore | None = None
    _num_loads: int = 0
    _num_split_saves: int = 0
    _stored_step: int = 0  # the newest step that this rank has saved for the store
    _newest_step: int = 0  # step of the state that was saved or loaded last
    _has_memory: bool | None = None  # memory holds a function's states; None before the first one

    def save(self, state: Mapping[str, Any], step: int, in_memory: bool = False) -> None:
        """Keep a function's state. See `session.save`."""
        step = whole_number("session.save: step", step, maximum=MAX_STEP)
        checkpoints = self.process.job.checkpoints
        if not (checkpoints or in_memory):
            self.reporter.warn_once(
                "session.save: nothing is kept, because the run was given no place for checkpoints"
            )
            return
        from flyte_ddp.checkpoints.state import count_bytes, find_tensors, is_split
        from flyte_ddp.world import ALONE

        # An earlier step replaces later ones, which the store may have.
        goes_back, self._newest_step = step < self._newest_step, step
        to_store = not in_memory or bool(goes_back and checkpoints)
        world = ALONE
        if any(is_split(tensor) for _, tensor in find_tensors(state)):
            world = self._join_save(state, step, in_memory)
        elif self._num_split_saves:
            raise ConfigError(
                "session.save: state: expected split tensors, as in the saves before, got none"
            )
        elif self.process.rank > 0:
            return
        if in_memory and self._has_memory is None:
            from flyte_ddp.rank.memory_interval import has_memory

            num_savers = min(world.world_size, self.process.node.num_ranks)
            self._has_memory = has_memory(
                "session.save: in_memory", num_savers * count_bytes(state), self.process, world
            )
        # After the first state in memory, states for the store are also kept in memory.
        if self._has_memory or not in_memory:
            saved = {
                "step": step,
                "state": state,
                "position": self.position.to_save,
                "trainer": self.trainer,
            }
            self.write(saved, step, to_store=to_store, to_memory=bool(self._has_memory))
            if self.stop.was_terminated:
                self.wait()

    def _join_save(self, state: Any, step: int, in_memory: bool) -> World:
        """Return the ranks of the function's own group, which save a split state together."""
        from flyte_ddp.rank.agreement import check_save, function_world
        from flyte_ddp.world import RankNotes

        world, group_timeout = function_world()
        self._num_split_saves += 1
        timeout = SAVE_TIMEOUT_SHARE * min(
            self.process.job.program.needs.stall_timeout, group_timeout
        )
        # Another thread uses the first connection.
        notes = RankNotes(self.process.open_store().clone(), "flyte_ddp/save", world)
        check_save(state, step, in_memory, self._num_split_saves, notes, timeout)
        if self.open().peers.store is None:
            if self._has_memory is not None:
                raise ConfigError(
                    "session.save: state: expected whole tensors, as in memory "
                    "before, got split ones"
                )
            self.wait()  # rank 0 may have saved a whole state
            self.open().share_with(world, self.process.open_store())
        return world

    def write(
        self,
        state: Mapping[str, Any],
        step: int,
        best: bool = False,
        started: float | None = None,
        to_store: bool = True,
        to_memory: bool = False,
    ) -> bool:
        """Keep a checkpoint of this format, on rank 0 or, of a split state, on every rank. Raises
        as `save`.

        Args:
            best: it stays until another one is.
            started: when the training was interrupted for it, by `time.perf_counter`; by default
                now.
            to_store, to_memory: where; in memory it may be left out, see `CheckpointStore.save`.

        Returns:
            False if it was left out.
        """
        if started is None:
            started = time.perf_counter()
        url = self.open().save(state, step, best, to_store, to_memory)
        if to_store:
            self.position.note_saved()
            self._stored_step = step
            self.stop.note_saved()
        if url is None:
            return False
        self.reporter.emit(events.CheckpointSaved(step, url, best, time.perf_counter() - started))
        return True

    def wait(self) -> None:
        """Return when all saved states are in place. Raises the errors of `save`."""
        if self._store is not None:
            self._store.wait(self.reporter.beat)

    def wait_briefly(self, seconds: float) -> None:
        """Wait up to `seconds` until all saved states are stored. Raises nothing."""
        if self._store is not None:
            with contextlib.suppress(Exception):  # the reason of the end is the one to report
                self._store.wait(self.reporter.beat, seconds)

    def load(self, into: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return a function's newest state. See `session.load`."""
        if into is None:
            return self.load_state()
        from flyte_ddp.checkpoints.assembly import boxes_of, fill
        from flyte_ddp.checkpoints.state import find_tensors

        found = self.load_state(boxes_of(dict(find_tensors(into)).get))
        return found and fill(into, found)

    def load_state(self, box_of: BoxOf | None = None) -> dict[str, Any] | None:
        """Return the newest state of a function, from memory or from the store; None if there is no
        state. All ranks call it together.

        Args:
            box_of: returns the box of each tensor that this rank keeps; None for whole tensors.
        """
        job = self.process.job
        if not (job.checkpoints or job.is_in_memory):
            return None
        from flyte_ddp.checkpoints.assembly import keep_all
        from flyte_ddp.rank.states import check_kind, load_newest, meet

        kept = box_of or keep_all
        self._num_loads += 1
        world = meet(self.process, f"flyte_ddp/load-{self._num_loads}")
        self.note_saves(world)
        loaded = load_newest(
            world,
            self.process,
            self.open(),
            lambda keys, tensor: kept(keys[1:], tensor),  # below "state"
        )
        found, step = loaded.state, 0
        if found is not None:
            check_kind(found, loaded.origin, is_function=True)
            self._check_trainer(found, loaded.origin)
            step = found["step"]
        self.reporter.emit(events.CheckpointLoaded(step, loaded.origin, skipped=loaded.skipped))
        if found is None:
            return None
        self.reporter.step = self._newest_step = step
        self.stop.can_resume = True
        self.position.resume(found["position"])
        return dict(found["state"])

    def _check_trainer(self, found: Mapping[str, Any], origin: str) -> None:
        """Check that the framework's loop that has begun, if any, wrote the checkpoint."""
        saved = found["trainer"]
        if self.trainer and saved != self.trainer:
            got = "what a function has saved by itself"
            if saved:
                got = f"that of {saved}"
            raise ConfigError(
                f"checkpoints: expected a place with those of {self.trainer}, got {origin}, which "
                f"is {got}: give another place"
            )

    def note_saves(self, world: World) -> None:
        """Wait for this attempt's saves, and let the next load find them. Rank 0 knows them all."""
        self.wait()
        process, job = self.process, self.process.job
        own = []
        slots = self._store and self._store.memory.slots
        if slots:
            attempt = process.node.num_restarts
            for slot, saved in slots.written.items():
                own.append(MemoryPart(**vars(saved), file=process.slots[slot], attempt=attempt))
        in_memory, step = world.broadcast_object([bool(own), self._stored_step])
        stored = job.stored
        if step:
            stored = (*(each for each in stored if each < step), step)
        process.job = dataclasses.replace(
            job, is_in_memory=job.is_in_memory or in_memory, stored=stored
        )
        process.parts = [*(each for each in process.parts if each.file not in process.slots), *own]

    def open(self, num_kept: int = NUM_KEPT, peers: Peers | None = None) -> CheckpointStore:
        """Return the store of the run's checkpoints. The arguments of the first call count.

        Args:
            num_kept: number of newest checkpoints that stay.
            peers: the ranks that save a checkpoint together; None for this rank alone.
        """
        from flyte_ddp.checkpoints.memory import Slots
        from flyte_ddp.checkpoints.store import CheckpointStore

        if self._store is None:
            process, job = self.process, self.process.job
            is_copied = process.node.num_nodes > 1
            slots = Slots(
                process.slots, process.rank, process.link.send, is_copied, self.process.open_store
            )
            self._store = CheckpointStore(
                job.checkpoints or NO_PLACE,
                num_kept,
                job.program.needs.store_timeout,
                job.owner,
                self._report_writing,
                peers,
                slots,
            )
        return self._store

    def _report_writing(self, is_busy: bool, written: tuple[int, str, bool] | None) -> None:
        # An agent waits for rank 0's writing. It ends last, because rank 0 waits for other ranks.
        if self.process.rank == 0:
            self.process.link.position.is_writing = is_busy
        if written is not None:
            self.reporter.emit(events.CheckpointWritten(*written))
