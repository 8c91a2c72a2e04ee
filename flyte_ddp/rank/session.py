"""The session of one rank's call: its checkpoints, its place in the data, its reports and stops.

Imports no torch before a checkpoint is read or written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.checkpoints import MAX_STEP, WRITE_GRACE
from flyte_ddp.config.fields import finite_number, plain_number, whole_number
from flyte_ddp.errors import ConfigError, StopRequested
from flyte_ddp.launch.protocol.memory import Part
from flyte_ddp.launch.protocol.programs import Kind
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.rank.stop import StopAgreement

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from flyte_ddp.checkpoints.peers import Peers
    from flyte_ddp.checkpoints.resharding import BoxOf
    from flyte_ddp.checkpoints.store import CheckpointStore
    from flyte_ddp.rank.batches import Check, EpochBatches
    from flyte_ddp.rank.step_timer import StepTimer
    from flyte_ddp.world import World

NUM_KEPT = 2  # newest checkpoints that stay
# Of `stall_timeout`, and of a collective's timeout, for which a rank waits for the others to save a
# split state: they may wait for it in a collective, whose failure would end the run without the
# reason.
SAVE_TIMEOUT_SHARE = 0.5
# of the checkpoints of a run that keeps states in the memory of nodes alone; empty
NO_PLACE = "memory://flyte-ddp"
WRITTEN = ", with which the checkpoint was written"
MAX_CHECKED = 4  # data sets of `batches` that are known to be alike on all ranks

logger = logging.getLogger(__name__)


class Session:
    """The session of one rank's call. The module's functions and names are those of the current
    one.
    """

    def __init__(self, process: RankProcess, open_store: Callable[[], Store]) -> None:
        self.process = process
        self.checkpoints = process.job.checkpoints
        # figures of the whole run by their names in `events.RunFinished`, on rank 0
        self.results: dict[str, Any] = {}
        # the function was sent a signal, because it does not ask for a stop
        self.was_terminated = False
        self.step = 0  # the last one that was reported
        self._link = process.link
        self.open_store = open_store
        self.stop = StopAgreement(process, open_store)
        self.has_trainer = False  # a framework's loop has begun, which the checkpoints are of
        self._store: CheckpointStore | None = None
        # damaged checkpoints that `load_values` has set aside, for the load that follows
        self._skipped: list[str] = []
        self._has_warned = False
        self._num_loads = 0
        self._num_split_saves = 0
        self._stored_step = 0  # the newest that this rank has saved for the store
        self._has_memory: bool | None = None  # for a function's states; None before the first
        # Of `batches`: how much is done of the last of an epoch's data sets, and what it was when
        # the rank resumed.
        self._position: dict[str, Any] = {}
        self._resumed: dict[str, Any] = {}
        self._saved_position: dict[str, Any] | None = None  # that of the last save
        self._is_tracking = False  # in an epoch of `batches`
        self._has_begun = False  # with the first batch
        self._epoch: int | None = None  # of `batches`
        # the data sets of that epoch so far, in the order of their calls
        self._sets: list[dict[str, Any]] = []
        self._num_sets = 0  # of the epoch before it; 0 if that is not known
        self._checked: deque[tuple[Any, dict[str, Any]]] = deque(maxlen=MAX_CHECKED)
        self._link.on_stop = self._terminate
        self._timer: StepTimer | None = None  # of a function's steps, from report to report
        # There is a checkpoint, or will be one whenever the run is asked to stop.
        self.can_resume = process.job.program.kind is Kind.RECIPE

    @property
    def stop_requested(self) -> bool:
        """True from the same call on in every rank, if all call it in the same steps, however far
        apart they are.
        """
        return self.stop.poll(self.can_resume)

    def save(self, state: Mapping[str, Any], step: int, in_memory: bool = False) -> None:
        step = whole_number("session.save: step", step, maximum=MAX_STEP)
        if not (self.checkpoints or in_memory):
            if not self._has_warned:
                logger.warning(
                    "session.save: nothing is kept, because the run was given no place "
                    "for checkpoints"
                )
            self._has_warned = True
            return
        if _may_be_split() and self._save_split(state, step, in_memory):
            return
        if self._num_split_saves:
            raise ConfigError(
                "session.save: state: expected split tensors, as in the saves before, got none"
            )
        store = self.open_checkpoints()
        if self.process.rank == 0:
            from flyte_ddp.world import ALONE

            # until the other ranks have read the one that rank 0 has chosen
            if store.retention.keeps_resumed:
                num_readers = int(
                    self.open_store().add(f"flyte_ddp/load-{self._num_loads}/num_readers", 0)
                )
                store.retention.keeps_resumed = num_readers < self.process.node.world_size - 1
            self._write(
                {"step": step, "state": state, "position": self._position}, step, in_memory, ALONE
            )

    def _save_split(self, state: Mapping[str, Any], step: int, in_memory: bool) -> bool:
        """Write this rank's part of `state`; return False where it is not split."""
        from flyte_ddp.checkpoints.peers import Peers
        from flyte_ddp.rank.sharding import split_state
        from flyte_ddp.rank.split_state import (
            check_call,
            collective_timeout,
            function_world,
            has_split,
        )

        if not has_split(state):
            return False
        world = function_world()
        self._num_split_saves += 1
        timeout = SAVE_TIMEOUT_SHARE * min(
            self.process.job.program.stall_timeout, collective_timeout(world)
        )
        check_call(state, step, in_memory, self._num_split_saves, world, self.open_store(), timeout)
        if self.open_checkpoints().peers is None:
            if self._has_memory is not None:
                raise ConfigError(
                    "session.save: state: expected whole tensors, as in memory "
                    "before, got split ones"
                )
            self.wait()  # for what rank 0 may have saved whole
            self.open_checkpoints().share_with(Peers(world, self.open_store()))
        whole = {"step": step, "state": state, "position": self._position}
        self._write(split_state(whole, world.is_first), step, in_memory, world)
        return True

    def _write(self, state: Mapping[str, Any], step: int, in_memory: bool, world: World) -> None:
        """Keep a function's state, which the ranks of `world` save together, in the store or in
        memory alone.

        From the first state in memory on, what the store gets is kept there as well.
        """
        if in_memory and self._has_memory is None:
            from flyte_ddp.checkpoints.resharding import find_tensors
            from flyte_ddp.rank.memory_states import has_memory

            own = sum(tensor.nbytes for _, tensor in find_tensors(state) if not tensor.is_meta)
            num_savers = min(world.world_size, self.process.node.num_ranks)
            self._has_memory = has_memory(
                "session.save: in_memory", num_savers * own, self.process, world
            )
        if self._has_memory or not in_memory:
            self.write(state, step, to_store=not in_memory, to_memory=bool(self._has_memory))

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
        started = time.perf_counter() if started is None else started
        url = self.open_checkpoints().save(state, step, best, to_store, to_memory)
        if to_store:
            self._saved_position, self._stored_step = self._position, step
            if not self.can_resume and self.process.rank == 0:
                self.stop.note_saved()
            self.can_resume = True
        if url is not None:
            self.emit(events.CheckpointSaved(step, url, best, time.perf_counter() - started))
        return url is not None

    def wait(self) -> None:
        """Return when what was saved is in place. Raises as `save`."""
        if self._store is not None:
            self._store.wait(self._beat)

    def load(self, into: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        if not (self.checkpoints or self.process.job.is_in_memory):
            return None
        boxes = None  # of what this rank has of each tensor; None where none is split
        if into is not None and _may_be_split():
            from flyte_ddp.rank.split_state import has_split, own_boxes

            boxes = own_boxes(into) if has_split(into) else None
        found, url = self._find_state(boxes, maps=into is not None)
        self._emit_loaded(found, url)
        if found is None:
            return None
        self.step, self.can_resume = found["step"], True
        self._position = self._resumed = found.get("position", {})
        self._num_sets = self._resumed.get("num_sets", 0)
        state: dict[str, Any] = found["state"]
        if into is not None:
            from flyte_ddp.rank.split_state import fill

            state = fill(into, state)
        return state

    def load_values(self) -> dict[str, Any] | None:
        """Return what the newest checkpoint has besides split tensors, which it leaves empty. For
        all ranks together.

        A `load` has to follow where there is one, which counts.
        """

        def keep_none(_: Any, tensor: Tensor) -> list[range]:
            return [range(0)] * tensor.dim()

        if not (self.checkpoints or self.process.job.is_in_memory):
            return None
        found, url = self._find_state(keep_none, maps=False)
        if found is None:
            self._emit_loaded(None, url)
        values: dict[str, Any] | None = found and found["state"]
        return values

    def _find_state(self, box_of: BoxOf | None, maps: bool) -> tuple[dict[str, Any] | None, str]:
        """Return the newest state, in memory or in the store, and where it was. For all ranks
        together.

        Args:
            box_of: returns what this rank keeps of each tensor; None for all of it.
            maps: the tensors are copied at once.
        """
        self._num_loads += 1
        found, url = self._load_from_memory(box_of)
        if found is None and box_of:
            from flyte_ddp.rank.split_state import function_world

            world = function_world()
            found, url, skipped = self.open_checkpoints().load_latest(world, box_of, maps)
            self._skipped += skipped
        elif found is None:
            found, url = self._load_whole(maps)
        return found, url

    def _load_from_memory(self, box_of: BoxOf | None) -> tuple[dict[str, Any] | None, str]:
        """Return the newest state in memory, and where it was, unless the store has a newer one."""
        key = f"flyte_ddp/memory-load-{self._num_loads}"
        self._note_saves(f"{key}/saved")
        if not self.process.job.is_in_memory:
            self.process.free_parts()
            return None, ""
        from flyte_ddp.checkpoints.resharding import keep_all
        from flyte_ddp.rank.memory_states import load_for_function

        loaded = load_for_function(
            self.process, self.open_store, key, self.open_checkpoints(), box_of or keep_all
        )
        self._skipped += loaded.skipped
        return loaded.state, loaded.place

    def _note_saves(self, key: str) -> None:
        """Wait for what this attempt has saved, and let the next load find it. Rank 0 knows of all
        saves.
        """
        self.wait()
        process = self.process
        saved = json.dumps([bool(self._has_memory), self._stored_step])
        if process.rank == 0 and process.node.world_size > 1:
            self.open_store().set(key, saved)
        in_memory, stored = json.loads(saved if process.rank == 0 else self.open_store().get(key))
        job = process.job
        process.job = dataclasses.replace(
            job,
            is_in_memory=job.is_in_memory or in_memory,
            stored=(*job.stored, *([stored] if stored else [])),
        )
        written = self._store.slots.written.items() if self._store and self._store.slots else ()
        own = [
            Part(process.slots[number], process.node.num_restarts, **values)
            for number, values in written
        ]
        process.parts = [*(each for each in process.parts if each.file not in process.slots), *own]

    def _load_whole(self, maps: bool) -> tuple[dict[str, Any] | None, str]:
        """Return the newest checkpoint in the store, which each rank reads for itself: they may
        have no process group.
        """
        checkpoints, key = self.open_checkpoints(), f"flyte_ddp/load-{self._num_loads}"
        # Rank 0 chooses: another rank that failed to read the newest would quietly go on from older
        # weights.
        if self.process.rank > 0:
            step = int(self.open_store().get(key))
            found = checkpoints.load(step, maps=maps) if step >= 0 else None
            self.open_store().add(f"{key}/num_readers", 1)
            return found, ""
        found, url, skipped = checkpoints.load_latest(maps=maps)
        self._skipped += skipped
        if self.process.node.world_size > 1:
            checkpoints.retention.keeps_resumed = found is not None
            self.open_store().set(key, str(found["step"] if found else -1))
        return found, url

    def _emit_loaded(self, found: dict[str, Any] | None, url: str) -> None:
        lines, self._skipped = list(dict.fromkeys(self._skipped)), []
        self.emit(events.CheckpointLoaded(found["step"] if found else 0, url, skipped=lines))

    def track(self, batches: EpochBatches, epoch: int) -> Iterator[tuple[Any, float]]:
        """Yield what is left of an epoch, and note for `save` how much of it is done."""
        from flyte_ddp.rank.agreement import compare

        if self._is_tracking:
            raise ConfigError(
                "session.batches: epoch: expected None for all but one data set at a time"
            )
        if epoch != self._epoch:
            self._num_sets = len(self._sets) or self._num_sets
            self._epoch, self._sets = epoch, []
        resumed, number = self._resumed, len(self._sets)
        found = resumed.get("sets", [])
        earlier = found[number] if number < len(found) and epoch <= self.first_epoch else {}
        call = {
            "dataset: number of samples": batches.length,
            "shuffle": batches.shuffle,
            "seed": batches.seed,
        }
        compare(earlier.get("call", call), call, dict, "session.batches: ", WRITTEN)
        self._sets.append({"call": call, "samples": earlier.get("samples", {})})
        first = 0
        if resumed:
            last = len(found) - 1
            if (epoch, number) < (resumed["epoch"], last + resumed.get("is_over", False)):
                return
            first = resumed["num_samples"] if (epoch, number) == (resumed["epoch"], last) else 0
            if (
                not self._num_sets
                and resumed.get("is_over")
                and (epoch, number) == (resumed["epoch"] + 1, last + 1)
            ):
                # Of a run's first epoch nobody knows how many data sets follow the one that a save
                # comes after.
                logger.warning(
                    "session.batches: epoch %d has more data sets than epoch %d had when its "
                    "checkpoint was saved: what followed there was not trained. Save in the loops "
                    "over the data sets of the first epoch",
                    epoch,
                    epoch - 1,
                )

        check = self._choose_check(batches, f"{epoch}-{number}", self._sets[-1])
        batches = dataclasses.replace(batches, first=first, check=check)
        position = {
            "epoch": epoch,
            "sets": list(self._sets),
            "is_over": False,
            "num_sets": self._num_sets,
        }
        self._is_tracking = True
        try:
            for batch, weight, num_samples in batches:
                self._end_if_stopped()
                self._position = {**position, "num_samples": num_samples}
                yield batch, weight
            # A save after the loop has the epoch, unless other data sets follow, as in the epoch
            # before. For a stop, a save of the last batch has all batches too.
            is_saved = self._saved_position is self._position
            self._position = {**position, "num_samples": 0, "is_over": True}
            self._saved_position = self._position if is_saved else self._saved_position
        finally:
            self._is_tracking = False

    def epochs(self, num_epochs: int) -> range:
        """Return the epochs that are left, from the one that the checkpoint was written in."""
        return range(self.first_epoch, whole_number("session.epochs: num_epochs", num_epochs))

    @property
    def first_epoch(self) -> int:
        """The one that the checkpoint was written in, or the next one if it was over; 0 without a
        checkpoint.
        """
        resumed = self._resumed
        is_over = resumed.get("is_over", False) and len(resumed["sets"]) >= resumed["num_sets"]
        return int(resumed.get("epoch", 0) + is_over)

    def _choose_check(self, batches: EpochBatches, name: str, own: dict[str, Any]) -> Check | None:
        """Return what compares the samples of a data set with other ranks' and the checkpoint's;
        None if it has been.

        Args:
            name: of the pass over it, the same on all ranks.
            own: what the position has of the data set; its samples are set.
        """
        for dataset, facts in self._checked:
            if dataset is batches.dataset:
                if isinstance(dataset, Iterator):
                    expected = "expected an iterable that begins anew in each epoch"
                    raise ConfigError(
                        f"session.batches: dataset: {expected}, got a "
                        f"{type(dataset).__name__} again"
                    )
                own["samples"] = facts
                return None

        def check(samples: dict[int, Any], read: Callable[[], dict[int, Any]]) -> None:
            from flyte_ddp.rank.agreement import check_in_store, compare, name_samples

            facts, again = name_samples(samples), lambda: name_samples(read())
            if batches.length is not None:  # a stream's are those of one place in one epoch
                compare(own["samples"] or facts, facts, again, "session.batches: ", WRITTEN)
                own["samples"] = facts
            self._checked.append((batches.dataset, own["samples"]))
            ranks = batches.readers or range(self.process.node.world_size)
            if len(ranks) > 1:
                facts = {**own["call"], "global_batch_size": batches.global_batch_size, **facts}
                store, key = self.open_store().clone(), f"flyte_ddp/batches-{name}"
                check_in_store(facts, again, store, key, self.process.rank, ranks)

        return check

    def _end_if_stopped(self) -> None:
        """Raise StopRequested before a batch, if the run is to end and the function itself does not
        ask for that.
        """
        if self.stop.is_asked or not self._has_begun:  # in its first step it had no chance to
            self._has_begun = True
        elif self.stop.poll_between_batches(
            self.can_resume, self._saved_position is self._position
        ):
            raise StopRequested

    def report(self, step: int | None, epoch: float | None, values: Mapping[str, float]) -> None:
        self.step = self.step + 1 if step is None else whole_number("session.report: step", step)
        epoch = None if epoch is None else finite_number("session.report: epoch", epoch, minimum=0)
        self._link.beat(self.step)
        self._time_report()
        if self.process.rank > 0:
            return
        metrics = {
            name: plain_number(f"session.report: {name}", value) for name, value in values.items()
        }
        self._link.emit(events.Reported(self.step, epoch, metrics))

    def _time_report(self) -> None:
        """Publish the time from report to report of a function whose ranks may wait for one
        another.
        """
        if (
            self.process.job.program.kind is Kind.RECIPE
            or "torch.distributed.distributed_c10d" not in sys.modules
        ):
            return
        from torch import device

        from flyte_ddp.rank.step_timer import STEP, StepTimer

        self._timer = self._timer or StepTimer(self._link.set_pace, device("cpu"))
        self._timer.end_step()
        self._timer.begin(STEP)

    def beat(self, step: int) -> None:
        """Report progress; `step` counts optimizer steps from the start of the run."""
        self.step = step
        self._link.beat(step)

    def emit(self, event: events.Event) -> None:
        """Send `event` to the listeners of the run, from rank 0."""
        if self.process.rank == 0:
            self._link.emit(event)

    def emit_start(self, **known: Any) -> None:
        """Emit that the run has started, with what is known of it by its name in
        `events.RunStarted`.
        """
        node = self.process.node
        name = self.process.job.program.name
        self.emit(
            events.RunStarted(name, node.world_size, node.num_nodes, node.num_restarts, **known)
        )

    def wait_for_data(self) -> Path:
        """Return the directory of the prepared data, as soon as this node has it."""
        return self._link.wait_for_data()

    def open_checkpoints(
        self, num_kept: int = NUM_KEPT, peers: Peers | None = None
    ) -> CheckpointStore:
        """Return the store of the run's checkpoints; the first call says how they are kept.

        Args:
            num_kept: newest ones that stay.
            peers: the ranks, where each of them writes a part of every checkpoint.
        """
        from flyte_ddp.checkpoints.store import CheckpointStore
        from flyte_ddp.rank.copies import Slots

        if self._store is None:
            job, is_first = self.process.job, self.process.rank == 0
            self._store = CheckpointStore(
                self.checkpoints or NO_PLACE,
                num_kept,
                job.program.store_timeout,
                job.owner,
                # An agent waits for rank 0's writing, which ends last: it waits for the other
                # ranks'.
                on_busy=self._link.set_writing if is_first else lambda is_busy: None,
                on_written=lambda step, url, best: self._link.emit(
                    events.CheckpointWritten(step, url, best)
                ),
                peers=peers,
                slots=Slots(self.process, self.open_store),
            )
        return self._store

    def close(self) -> None:
        """Wait until the checkpoints are written. Raises as `save`."""
        self.wait()
        self.stop.close()

    @contextlib.contextmanager
    def finish_on_error(self) -> Iterator[None]:
        """If the block raises, wait up to `WRITE_GRACE` seconds for what was saved in it, so that a
        retry finds it.
        """
        try:
            yield
        except Exception:
            if self._store is not None:
                with contextlib.suppress(Exception):  # the block's error is the one to report
                    self._store.wait(self._beat, WRITE_GRACE)
            raise

    def _terminate(self) -> None:
        """Pass a stop on as the signal that asked for it, as torchrun does, to a function that does
        not ask.
        """
        if self.stop.is_heeded(self.can_resume):
            self.stop.begin()
        else:
            self.was_terminated = True
            os.kill(os.getpid(), self._link.stop_signal)

    def _beat(self) -> None:
        self._link.beat(self.step)


def _may_be_split() -> bool:
    """Return whether a state can have tensors that are split: their class is imported by whoever
    splits them.
    """
    return "torch.distributed.tensor" in sys.modules
