"""The session of one rank's call: its checkpoints, its place in the data, its reports and stops.

Imports no torch before a checkpoint is read or written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.checkpoints import MAX_STEP, WRITE_GRACE
from flyte_ddp.checkpoints.memory import Part
from flyte_ddp.config.fields import finite_number, plain_number, whole_number
from flyte_ddp.config.waits import BEAT_INTERVAL, POLL_INTERVAL
from flyte_ddp.errors import ConfigError, StopRequested
from flyte_ddp.launch.protocol.messages import Emitted, Submitted
from flyte_ddp.launch.protocol.programs import Kind
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.rank.stop import StopAgreement

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from flyte_ddp.checkpoints.assembly import BoxOf
    from flyte_ddp.checkpoints.peers import Peers
    from flyte_ddp.checkpoints.store import CheckpointStore
    from flyte_ddp.rank.batches import Check, EpochBatches
    from flyte_ddp.rank.step_timer import StepTimer
    from flyte_ddp.world import World

NUM_KEPT = 2  # newest checkpoints that stay
MAX_REPORTS = 1000  # newest ones of another rank than 0 that travel as one message
# bytes of a file that a rank submits, and of all that are not taken yet, as which each costs more
MAX_RESULT, MAX_SUBMITTED, FILE_COST = 64 << 20, 65 << 20, 1 << 20
# Of `stall_timeout`, and of a collective's timeout, for which a rank waits for the others to save a
# split state: they may wait for it in a collective, whose failure would end the run without the
# reason.
SAVE_TIMEOUT_SHARE = 0.5
# of the checkpoints of a run that keeps states in the memory of nodes alone; empty
NO_PLACE = "memory://flyte-ddp"
ONE_LOOP = "session.batches: epoch: expected None for all but one data set at a time"
WRITTEN = ", with which the checkpoint was written"
MAX_NAME = 100  # characters of a picture's name
MAX_CHECKED = 4  # data sets of `batches` that a session remembers
# the place in the data of `batches` before the first
START: dict[str, Any] = {"epoch": 0, "sets": [], "is_over": False, "num_sets": 0, "num_samples": 0}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class _LeftLoop:
    """A loop over `batches` that was left before its end."""

    batches: EpochBatches
    place: dict[str, Any]  # the position behind the last batch that it was given
    end: dict[str, Any]  # the position behind its data set
    handled_before: BaseException | None  # the error that was handled when the loop began

    def is_of(self, batches: EpochBatches) -> bool:
        """Return whether a loop over these batches is the same one."""
        facts = [
            (id(each.dataset), each.global_batch_size, each.epoch, each.seed, each.shuffle)
            for each in (self.batches, batches)
        ]
        return facts[0] == facts[1]


@dataclass(eq=False, repr=False)
class Session:
    """The session of one rank's call. The module's functions and names are those of the current
    one.
    """

    process: RankProcess
    open_store: Callable[[], Store]
    # figures of the whole run by their names in `events.RunFinished`, on rank 0
    results: dict[str, Any] = field(default_factory=dict)
    # the function was sent a signal, because it does not ask for a stop
    was_terminated: bool = False
    step: int = 0  # the last one that was reported
    trainer: str = ""  # the framework's call whose loop has begun, which the checkpoints are of
    _store: CheckpointStore | None = None
    _warnings: set[str] = field(default_factory=set)
    _num_loads: int = 0
    _num_split_saves: int = 0
    _stored_step: int = 0  # the newest that this rank has saved for the store
    _newest_step: int = 0  # of the state that was saved or loaded last
    _has_memory: bool | None = None  # for a function's states; None before the first
    # Of `batches`: how much is done of the last of an epoch's data sets, and what it was when the
    # rank resumed.
    _position: dict[str, Any] = field(default_factory=lambda: START)
    _resumed: dict[str, Any] = field(default_factory=lambda: START)
    _saved_position: dict[str, Any] | None = None  # that of the last save
    _tracked: object = None  # the loop over `batches` that is open
    _has_begun: bool = False  # with the first batch
    _epoch: int | None = None  # of `batches`
    # the data sets of that epoch so far, in the order of their calls
    _sets: list[dict[str, Any]] = field(default_factory=list)
    _num_sets: int = 0  # of the epoch before it; 0 if that is not known
    # The last loop over `batches` that was left before its end; None while another one runs.
    _left: _LeftLoop | None = None
    # the batch that the loop is at: of which data, and its first and last place in the epoch
    _given: tuple[EpochBatches, int, int] | None = None
    _is_bad: bool = False  # the last loss that was reported
    # data sets that are known to be alike on all ranks, and the facts of their samples
    _checked: deque[tuple[Any, dict[str, Any]]] = field(
        default_factory=lambda: deque(maxlen=MAX_CHECKED)
    )
    _timer: StepTimer | None = None  # of a function's steps, from report to report
    # of another rank than 0, to be sent
    _reports: deque[events.Reported] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))
    # files that may still be on this node, and what they cost
    _submitted: deque[tuple[Path, int]] = field(default_factory=deque)
    _file_numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.checkpoints = self.process.job.checkpoints
        self._link = self.process.link
        self._link.on_stop = self._terminate
        self.stop = StopAgreement(self.process, self.open_store)
        # There is a checkpoint, or will be one whenever the run is asked to stop.
        self.can_resume = self.process.job.program.kind is Kind.RECIPE

    @property
    def stop_requested(self) -> bool:
        """True from the same call on in every rank, if all call it in the same steps, however far
        apart they are.
        """
        return self.stop.poll(self.can_resume)

    def save(self, state: Mapping[str, Any], step: int, in_memory: bool = False) -> None:
        step = whole_number("session.save: step", step, maximum=MAX_STEP)
        if not (self.checkpoints or in_memory):
            self._warn_once(
                "session.save: nothing is kept, because the run was given no place for checkpoints"
            )
            return
        from flyte_ddp.checkpoints.state import count_bytes, find_tensors, is_split
        from flyte_ddp.world import ALONE

        # An earlier step replaces later ones, which the store may have.
        goes_back, self._newest_step = step < self._newest_step, step
        to_store = not in_memory or bool(goes_back and self.checkpoints)
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
        # From the first state in memory on, what the store gets is kept there as well.
        if self._has_memory or not in_memory:
            saved = {
                "step": step,
                "state": state,
                "position": self._position_to_save(),
                "trainer": self.trainer,
            }
            self.write(saved, step, to_store=to_store, to_memory=bool(self._has_memory))
            if self.was_terminated:
                self.wait()

    def _join_save(self, state: Any, step: int, in_memory: bool) -> World:
        """Return the ranks that save a split state together: those of the function's own group."""
        from flyte_ddp.checkpoints.peers import Peers
        from flyte_ddp.rank.agreement import check_save, function_world

        world, group_timeout = function_world()
        self._num_split_saves += 1
        timeout = SAVE_TIMEOUT_SHARE * min(self.process.job.program.stall_timeout, group_timeout)
        check_save(state, step, in_memory, self._num_split_saves, world, self.open_store(), timeout)
        if self.open_checkpoints().peers.store is None:
            if self._has_memory is not None:
                raise ConfigError(
                    "session.save: state: expected whole tensors, as in memory "
                    "before, got split ones"
                )
            self.wait()  # for what rank 0 may have saved whole
            self.open_checkpoints().share_with(Peers(world, self.open_store()))
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
        if into is None:
            return self.load_state()
        from flyte_ddp.checkpoints.assembly import boxes_of, fill
        from flyte_ddp.checkpoints.state import find_tensors

        found = self.load_state(boxes_of(dict(find_tensors(into)).get))
        return found and fill(into, found)

    def load_state(self, box_of: BoxOf | None = None) -> dict[str, Any] | None:
        """Return the newest state of a function, in memory or in the store; None without one. For
        all ranks together.

        Args:
            box_of: returns what this rank keeps of each tensor; None for all of it.
        """
        if not (self.checkpoints or self.process.job.is_in_memory):
            return None
        from flyte_ddp.checkpoints.assembly import keep_all
        from flyte_ddp.rank.states import check_kind, load_newest, meet

        kept = box_of or keep_all
        self._num_loads += 1
        world = meet(self.process, self.open_store, f"flyte_ddp/load-{self._num_loads}")
        self.note_saves(world)
        loaded = load_newest(
            world,
            self.process,
            self.open_checkpoints(),
            lambda keys, tensor: kept(keys[1:], tensor),  # below "state"
        )
        found = loaded.state
        if found is not None:
            check_kind(found, loaded.origin, is_function=True)
            self._check_trainer(found, loaded.origin)
        step = found["step"] if found else 0
        self.emit(events.CheckpointLoaded(step, loaded.origin, skipped=loaded.skipped))
        if found is None:
            return None
        self.step, self._newest_step, self.can_resume = step, step, True
        self._position = self._resumed = found["position"]
        self._num_sets = self._resumed["num_sets"]
        return dict(found["state"])

    def _check_trainer(self, found: Mapping[str, Any], origin: str) -> None:
        """Check that a checkpoint is of the framework's loop that has begun, if one has."""
        # an earlier version did not note the loop
        saved = found.get("trainer", "" if "generators" not in found["state"] else self.trainer)
        if self.trainer and saved != self.trainer:
            got = f"that of {saved}" if saved else "what a function has saved by itself"
            raise ConfigError(
                f"checkpoints: expected a place with those of {self.trainer}, got {origin}, which "
                f"is {got}: give another place"
            )

    def note_saves(self, world: World) -> None:
        """Wait for what this attempt has saved, and let the next load find it. Rank 0 knows of all
        saves.
        """
        self.wait()
        slots = self._store.slots if self._store else None
        in_memory, stored = world.broadcast_object(
            [bool(slots and slots.written), self._stored_step]
        )
        process = self.process
        job = process.job
        process.job = dataclasses.replace(
            job,
            is_in_memory=job.is_in_memory or in_memory,
            stored=(*(each for each in job.stored if each < stored), stored)
            if stored
            else job.stored,
        )
        written = slots.written.items() if slots else ()
        own = [
            Part(**vars(saved), file=process.slots[slot], attempt=process.node.num_restarts)
            for slot, saved in written
        ]
        process.parts = [*(each for each in process.parts if each.file not in process.slots), *own]

    def _position_to_save(self) -> dict[str, Any]:
        """Return the place in the data of `batches` that a save notes.

        A loop that was left has ended its epoch, unless an error ended it: a save that handles the
        error may be followed by a restart, which has to train the rest.
        """
        left = self._left
        if left is None or self._position is not left.end:
            return self._position
        error = sys.exc_info()[1]
        is_handling = error is not None and error is not left.handled_before
        return left.place if is_handling else left.end

    def track(self, batches: EpochBatches, epoch: int) -> Iterator[tuple[Any, float]]:
        """Yield what is left of an epoch, and note for `save` how much of it is done.

        A loop that is left ends its data set, unless the run was told to stop. It does not if the
        same loop is opened again.
        """
        from flyte_ddp.rank.agreement import compare

        asked = batches
        # The iterator of an epoch before may still exist: some loaders keep theirs.
        if self._tracked is not None and epoch == self._epoch:
            raise ConfigError(ONE_LOOP)
        if epoch != self._epoch:
            self._num_sets = len(self._sets) or self._num_sets
            self._epoch, self._sets = epoch, []
        is_again = self._left is not None and self._left.is_of(batches)
        if is_again:
            self._sets.pop()
        self._left = None
        resumed, number = self._resumed, len(self._sets)
        found, place = resumed["sets"], (epoch, number)
        earlier = found[number] if number < len(found) and epoch <= self.first_epoch else {}
        call: dict[str, Any] = {"shuffle": batches.shuffle, "seed": batches.seed}
        if not batches.stream:  # to which shards may be added between two epochs
            call["dataset: number of samples"] = batches.length
        compare("session.batches: ", earlier.get("call", call), call, WRITTEN)
        samples = earlier.get("samples", {})
        self._sets.append({"call": call, "order": {}, "samples": samples, "is_again": is_again})
        last = len(found) - 1
        handled = sys.exc_info()[1]
        # Where little is left of such a loop, the look before it may find the end.
        is_opened_twice = earlier.get("is_again", False)
        if is_opened_twice:
            self._left = _LeftLoop(asked, self._position, self._position, handled)
        if place < (resumed["epoch"], last + resumed["is_over"]):
            return
        first = resumed["num_samples"] if place == (resumed["epoch"], last) else 0
        is_next = resumed["is_over"] and place == (resumed["epoch"] + 1, last + 1)
        # Of a run's first epoch nobody knows how many data sets follow the one that a save comes
        # after.
        if is_next and not self._num_sets:
            logger.warning(
                "session.batches: epoch %d has more data sets than epoch %d had when its "
                "checkpoint was saved: what followed there was not trained. Save in the loops "
                "over the data sets of the first epoch",
                epoch,
                epoch - 1,
            )
        if batches.stream:
            if known := earlier.get("order"):
                dataset = batches.stream.continue_order(known)
                continued = dataclasses.replace(batches, dataset=dataset)
                remedy = ": other data need another place for the checkpoints"
                order = continued.describe_order()
                if not first:  # another order, and shards that were added, are of this epoch
                    names = [name for name in known if name in order and name.endswith("shards")]
                    known, order = ({name: each[name] for name in names} for each in (known, order))
                compare("session.batches: ", known, order, WRITTEN, remedy=remedy)
                batches = continued if first else batches
            self._sets[-1]["order"] = batches.describe_order()
        check = self._choose_check(batches, f"{epoch}-{number}", self._sets[-1])
        batches = dataclasses.replace(batches, first=first, check=check)
        position = {
            "epoch": epoch,
            "sets": list(self._sets),
            "is_over": False,
            "num_sets": self._num_sets,
        }
        loop = self._tracked = object()
        try:
            for batch, weight, num_samples in batches:
                self._end_if_stopped()
                self._given, first = (batches, first, num_samples), num_samples
                at = self._position = {**position, "num_samples": num_samples}
                yield batch, weight
                if self._tracked is not loop:
                    raise ConfigError(ONE_LOOP)
            # A save after the loop has the epoch, unless other data sets follow, as in the epoch
            # before. For a stop, a save of the last batch has all batches too.
            is_saved = self._saved_position is self._position
            self._position = {**position, "num_samples": 0, "is_over": True}
            self._saved_position = self._position if is_saved else self._saved_position
            if is_opened_twice:
                self._left = _LeftLoop(asked, self._position, self._position, handled)
        except GeneratorExit:
            is_stopping = self.stop.is_reached or self.was_terminated
            if self._position is at and not is_stopping:
                end = {**position, "num_samples": 0, "is_over": True}
                self._left = _LeftLoop(asked, at, end, handled)
                self._position = end
            raise
        finally:
            if self._tracked is loop:
                self._tracked = None

    def epochs(self, num_epochs: int) -> range:
        """Return the epochs that are left, from the one that the checkpoint was written in."""
        return range(self.first_epoch, whole_number("session.epochs: num_epochs", num_epochs))

    @property
    def first_epoch(self) -> int:
        """The one that the checkpoint was written in, or the next one if it was over; 0 without a
        checkpoint.
        """
        resumed = self._resumed
        is_over = resumed["is_over"] and len(resumed["sets"]) >= resumed["num_sets"]
        return int(resumed["epoch"] + is_over)

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
                    raise ConfigError(
                        "session.batches: dataset: expected an iterable that begins anew in each "
                        f"epoch, got a {type(dataset).__name__} again"
                    )
                own["samples"] = facts
                return None

        def check(samples: dict[int, Any], read: Callable[[], dict[int, Any]]) -> None:
            from flyte_ddp.rank.agreement import check_in_store, compare, name_samples

            facts, again = name_samples(samples), lambda: name_samples(read())
            if batches.length is not None:  # a stream's are those of one place in one epoch
                compare("session.batches: ", own["samples"] or facts, facts, WRITTEN, read=again)
                own["samples"] = facts
            self._checked.append((batches.dataset, own["samples"]))
            ranks = batches.readers or range(self.process.node.world_size)
            if len(ranks) > 1:
                size = {"global_batch_size": batches.global_batch_size}
                facts = {**own["call"], **size, **own["order"], **facts}
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
        metrics = {
            name: plain_number(f"session.report: {name}", value) for name, value in values.items()
        }
        self._check_loss(metrics.get("loss", 0.0))
        reported = events.Reported(self.step, epoch, metrics)
        if self.process.rank == 0:
            self.emit(reported)
            return
        if len(self._reports) == MAX_REPORTS:
            self._warn_once(
                f"session.report: rank {self.process.rank} reports more than {MAX_REPORTS:,} times "
                f"in {BEAT_INTERVAL:g} s: of each such time the newest {MAX_REPORTS:,} are kept"
            )
        self._reports.append(reported)
        if len(self._reports) == 1:  # else a timer runs, which takes this one too
            timer = threading.Timer(BEAT_INTERVAL, self._send_reports)
            timer.daemon = True
            timer.start()

    def _check_loss(self, loss: float) -> None:
        """Name the samples of the step behind the first loss that is not finite."""
        was_bad, self._is_bad = self._is_bad, not math.isfinite(loss)
        if was_bad or not self._is_bad:
            return
        samples: list[events.BadSample] = []
        if self._given:
            batches, *places = self._given
            key = getattr(batches.dataset, "key", lambda _: "")
            numbers = batches.list_samples(*places)
            samples = [events.BadSample(each, key(each), None) for each in numbers]
        reason = f"the loss that rank {self.process.rank} reports is {loss}"
        bad = events.StepFoundBad(self.step, self._epoch, loss, reason, samples)
        logger.warning("%s", bad)
        self.emit(bad, from_all=True)

    def show(self, name: str, picture: Any) -> None:
        from flyte_ddp.rank.pictures import encode_picture

        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
            raise ConfigError(
                f"session.show: name: expected 1 to {MAX_NAME} characters, got {name!r:.200}"
            )
        if self.process.rank == 0:
            self.emit(events.PictureShown(self.step, name, encode_picture(picture)))

    def _send_reports(self) -> None:
        """Send what this rank has reported since the last time. Any thread may call this."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._reports.popleft())
        if found:
            self._link.send(Emitted(events.RankReported(self.process.rank, found)))

    def submit_result(self, path: str, data: str | bytes) -> None:
        parts = PurePosixPath(path).parts if isinstance(path, str) and path.isprintable() else ()
        if not parts or parts[0][0] == "/" or ".." in parts:
            raise ConfigError(
                "session.submit_result: path: expected that of a file below a directory, such as "
                f"rank-1/losses.json, got {path!r}"
            )
        contents = data.encode() if isinstance(data, str) else data
        if not isinstance(contents, bytes) or len(contents) > MAX_RESULT:
            size = f" of {len(contents):,} bytes" if isinstance(contents, bytes) else ""
            raise ConfigError(
                f"session.submit_result: data: expected str or bytes, at most {MAX_RESULT >> 20} "
                f"MiB, got {type(data).__name__}{size}"
            )
        node = self.process.node
        if not node.results:
            self._warn_once(
                "session.submit_result: nothing is kept, because the run has no results"
            )
            return
        while self._count_submitted() + len(contents) + FILE_COST > MAX_SUBMITTED:
            time.sleep(POLL_INTERVAL)
        name = f"{node.num_restarts}-{self.process.rank}-{next(self._file_numbers)}"
        file = Path(node.results, name)
        os.makedirs(node.results, exist_ok=True)
        file.write_bytes(contents)
        self._submitted.append((file, len(contents) + FILE_COST))
        self._link.send(Submitted(name, "/".join(parts)))

    def _count_submitted(self) -> int:
        """Return the bytes of this rank's files that are not taken yet, which they are in their
        order.
        """
        while self._submitted and not self._submitted[0][0].exists():
            self._submitted.popleft()
        return sum(size for _, size in self._submitted)

    def _warn_once(self, line: str) -> None:
        if line not in self._warnings:
            self._warnings.add(line)
            logger.warning(line)

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

    def emit(self, event: events.Event, from_all: bool = False) -> None:
        """Send `event` to the listeners of the run, from rank 0, or `from_all` that call it."""
        if from_all or self.process.rank == 0:
            self._link.send(Emitted(event))

    def emit_start(self, **known: Any) -> None:
        """Emit that the run has started, with what is known of it by its name in
        `events.RunStarted`.
        """
        node = self.process.node
        name = self.process.job.program.name
        self.emit(
            events.RunStarted(name, node.world_size, node.num_nodes, node.num_restarts, **known)
        )

    def open_checkpoints(
        self, num_kept: int = NUM_KEPT, peers: Peers | None = None
    ) -> CheckpointStore:
        """Return the store of the run's checkpoints; the first call says how they are kept.

        Args:
            num_kept: newest ones that stay.
            peers: the ranks that save a checkpoint together; None for this one alone.
        """
        from flyte_ddp.checkpoints.memory import Slots
        from flyte_ddp.checkpoints.peers import Peers
        from flyte_ddp.checkpoints.store import CheckpointStore
        from flyte_ddp.world import ALONE

        if self._store is None:
            process = self.process
            slots = Slots(
                process.slots,
                process.rank,
                self._link.send,
                process.node.num_nodes > 1,
                self.open_store,
            )
            self._store = CheckpointStore(
                self.checkpoints or NO_PLACE,
                num_kept,
                process.job.program.store_timeout,
                process.job.owner,
                self._report_writing,
                peers or Peers(ALONE),
                slots,
            )
        return self._store

    def _report_writing(self, is_busy: bool, written: tuple[int, str, bool] | None) -> None:
        # An agent waits for rank 0's writing, which ends last: it waits for the other ranks'.
        if self.process.rank == 0:
            self._link.position.is_writing = is_busy
        if written is not None:
            self.emit(events.CheckpointWritten(*written))

    def close(self) -> None:
        """Wait until the checkpoints are written. Raises as `save`."""
        self._send_reports()
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
            with contextlib.suppress(Exception):  # the block's error is the one to report
                self._send_reports()
            self._wait_briefly(WRITE_GRACE)
            raise

    def _terminate(self) -> None:
        """Pass a stop on as the signal that asked for it, as torchrun does, to a function that does
        not ask. The signal may end this process, so what was saved is stored first.
        """
        if self.stop.is_heeded(self.can_resume):
            self.stop.begin()
            return
        self.was_terminated = True  # from now on, each save waits until it is stored
        self._wait_briefly(min(WRITE_GRACE, self._link.saves_until - time.monotonic()))
        os.kill(os.getpid(), self._link.stop_signal)

    def _wait_briefly(self, seconds: float) -> None:
        """Wait up to `seconds` until what was saved is stored. Raises nothing."""
        if self._store is not None:
            with contextlib.suppress(Exception):  # the reason of the end is the one to report
                self._store.wait(self._beat, seconds)

    def _beat(self) -> None:
        self._link.beat(self.step)
