"""The run that a training function belongs to: its checkpoints, reports and stop requests. Using it is optional.

    from flyte_ddp import session

    state = session.load()  # None in a new run
    if state:
        model.load_state_dict(state["model"])
    for step in range(state["step"] + 1 if state else 1, 1001):  # counts the steps that are done
        ...
        session.report(step=step, loss=loss.item())
        is_last = session.stop_requested or step == 1000
        if is_last or step % 100 == 0:
            session.save({"step": step, "model": model.state_dict()}, step)
        if is_last:
            return

Under torchrun, or in a plain process, there is no run to ask: `load` returns None, `save` and `report` do nothing, and
`stop_requested` is False. So the same script runs under all of them. Imports no torch before a checkpoint is read or
written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from flyte_ddp.checkpoints.peers import Peers
    from flyte_ddp.checkpoints.store import CheckpointStore
    from flyte_ddp.launch.process.link import RankProcess
    from flyte_ddp.rank.batches import EpochBatches

NUM_KEPT = 2  # newest checkpoints that stay
SAVE_TIMEOUT_SHARE = 0.5  # of `stall_timeout`, for which a rank waits for the others to save a split state

checkpoints: str  # URL of a directory that outlives processes, pods and attempts; "" if the run was given none
stop_requested: (
    bool  # the run is to end soon, a preemption for example: save and return. Read it once a step, on all ranks
)

logger = logging.getLogger(__name__)


def save(state: Mapping[str, Any], step: int) -> None:
    """Keep `state` as the checkpoint of optimizer step `step`. Every rank may call it; rank 0 writes.

    A state with DTensors, such as `torch.distributed.checkpoint.state_dict` returns of a model that is split over the
    ranks, is saved by all of them: each calls it, and writes the part that it has. None is gathered.

    `state` is copied before this returns and written in the background: tensors and plain values, nested in dicts,
    lists, tuples and sets. It is complete or not there at all, and checksummed. The newest ones stay. `load` returns
    what was saved, but NumPy's scalars as Python's numbers, its arrays as tensors (`.numpy()` makes arrays of them),
    and other mappings as dicts.

    Raises:
        ConfigError: `state` holds something that could not be read back, such as an object of a class of yours. The
            message has its place and its type. Or a split state is not saved by all ranks, with the same keys.
        StorageDenied: the store refuses.
        StorageUnavailable: the store has been away for `store_timeout` seconds.
    """
    if _current:
        _current.save(state, step)


def load(into: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the newest complete checkpoint; None in a new run. For all ranks together.

    Args:
        into: a state with the same keys. Its tensors are filled in place and are those that are returned. A split one
            gets this rank's part, whatever the number of ranks and the mesh were that saved it: so no rank ever holds
            the whole. Without it tensors are whole and on the CPU, those that were split as well.

    Raises:
        ConfigError: `into` has other keys or shapes than the checkpoint.
        StorageUnavailable, StorageDenied: what is there could not be found out.
    """
    return _current.load(into) if _current else None


def batches(
    dataset: Any,
    global_batch_size: int,
    epoch: int | None = None,
    *,
    seed: int = 0,
    num_workers: int = 0,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
) -> Iterator[tuple[Any, float]]:
    """Yield this rank's part of each global batch of an epoch, and the weight of its mean loss. For all ranks together.

        for batch, weight in session.batches(data, 64, epoch):
            loss = weight * functional.cross_entropy(model(batch[0]), batch[1])

    Every sample is in one batch of one rank, and which ones share a batch does not depend on the number of ranks. DDP
    and FSDP average gradients over the ranks, so with the weight the gradient is that of the whole batch's mean also
    where a batch does not divide evenly. All ranks get as many batches: one for which no sample is left gets another's,
    with weight 0. A sample's random augmentation is drawn by seed, epoch and sample. So it is under torchrun too.

    After `load` an epoch goes on behind the batches whose steps were saved, and epochs before it yield nothing. `save`
    notes the batch that the loop is at, so call it after the optimizer's step.

    Args:
        dataset: with a length and items; or an iterable, of which every rank reads all samples and keeps its own, in
            the iterable's order. Its `set_epoch` is called.
        epoch: counts passes over the training data. None for other data, such as held-out ones: they are in their own
            order, and begin at the start.
        seed: of the order and of augmentation.
        num_workers: loader processes of this rank; at most 1 for an iterable.
        collate_fn: makes a batch of samples, as in a DataLoader; by default tensors, nested as the samples are.

    Raises:
        ConfigError: `global_batch_size` is smaller than the number of ranks, or the data are not as long as those that
            the checkpoint was written with.
    """
    from flyte_ddp.rank.batches import EpochBatches

    made = EpochBatches(dataset, global_batch_size, epoch, seed, num_workers, collate_fn)
    if _current and epoch is not None:
        yield from _current.track(made, epoch)
    else:
        for batch, weight, _ in made:
            yield batch, weight


def report(step: int | None = None, epoch: float | None = None, **values: float) -> None:
    """Report progress and metrics: for the progress bar, the history, the report and W&B. Rank 0's are shown.

    Every rank's call is a heartbeat: after the first one, a run in which no rank reports for `stall_timeout` seconds
    is ended with the stacks of all ranks.

    Args:
        step: optimizer steps since the start of the run; one more than the last by default.
        epoch: of the data, a fraction is fine.
        values: numbers by name, such as loss=0.31, accuracy=0.98.

    Raises:
        ConfigError: a value is no number.
    """
    if _current:
        _current.report(step, epoch, values)


class Session:
    """The session of one rank's call. The module's functions and names are those of the current one.

    Attributes:
        process: of the rank.
        results: figures of the whole run by their names in `events.RunFinished`, on rank 0.
        can_resume: there is a checkpoint, or will be one whenever the run is asked to stop.
    """

    def __init__(self, process: RankProcess, open_store: Callable[[], Store]) -> None:
        self.process = process
        self.checkpoints = process.job.checkpoints
        self.results: dict[str, Any] = {}
        self.has_stopped = False  # the function was told to stop
        self.was_terminated = False  # it was sent a signal instead
        self.step = 0  # the last one that was reported
        self._link = process.link
        self.open_store = open_store
        self._store: CheckpointStore | None = None
        self._has_warned = False
        self._num_loads = 0
        self._num_split_saves = 0
        # Of `batches`: how much is done of which epoch of how many samples, and what it was when the rank resumed.
        self._position: dict[str, Any] = {}
        self._resumed: dict[str, Any] = {}
        self._is_tracking = False  # in an epoch of `batches`
        self._num_polls = 0
        self._link.on_stop = self._terminate
        self.can_resume = process.job.program.can_resume
        self._is_stoppable = False  # the supervisors know, or another rank tells them
        self._num_refused = -1  # calls of `stop_requested` that may have been False; -1 before the stop
        self._stop_at = 0  # number of the call of `stop_requested` from which it is true, once that is agreed
        self._is_agreed = threading.Event()
        self._agreeing = threading.Lock()

    @property
    def stop_requested(self) -> bool:
        """True from the same call on in every rank, if all call it in the same steps, however far apart they are.

        After the stop the first call waits until all ranks know of it. See `_agree_on_stop`.
        """
        self._num_polls += 1
        number = self._num_polls
        if not self._is_stoppable:
            self._is_stoppable = self._announce()
        if not self._link.stop_requested:
            return False
        self._begin_to_stop(number - 1)
        self._is_agreed.wait()
        self.has_stopped = number >= self._stop_at
        return self.has_stopped

    def save(self, state: Mapping[str, Any], step: int) -> None:
        if not self.checkpoints:
            if not self._has_warned:
                logger.warning("session.save: nothing is kept, because the run was given no place for checkpoints")
            self._has_warned = True
            return
        if _may_be_split() and self._save_split(state, step):
            return
        if self._num_split_saves:
            raise ConfigError("session.save: state: expected split tensors, as in the saves before, got none")
        store = self.open_checkpoints()
        if self.process.rank == 0:
            if store.keeps_resumed and self._num_readers() == self.process.node.world_size - 1:
                store.keeps_resumed = False
            self.write({"step": step, "state": state, "position": self._position}, step)

    def _save_split(self, state: Mapping[str, Any], step: int) -> bool:
        """Write this rank's part of `state`; return False where it is not split."""
        from flyte_ddp.checkpoints.peers import Peers
        from flyte_ddp.rank.sharding import split_state
        from flyte_ddp.rank.split_state import check_call, function_world, has_split

        if not has_split(state):
            return False
        world = function_world()
        self._num_split_saves += 1
        timeout = SAVE_TIMEOUT_SHARE * self.process.job.program.stall_timeout
        check_call(state, step, self._num_split_saves, world, self.open_store(), timeout)
        if self._num_split_saves == 1:
            self.open_checkpoints().share_with(Peers(world, self.open_store()))
        whole = {"step": step, "state": state, "position": self._position}
        self.write(split_state(whole, world.is_first), step)
        return True

    def write(self, state: Mapping[str, Any], step: int, best: bool = False, started: float | None = None) -> None:
        """Keep a checkpoint of this format, on rank 0 or, of a split state, on every rank. Raises as `save`.

        Args:
            best: it stays until another one is.
            started: when the training was interrupted for it, by `time.perf_counter`; by default now.
        """
        started = time.perf_counter() if started is None else started
        url = self.open_checkpoints().save(state, step, best)
        self.can_resume = True
        self.emit(events.CheckpointSaved(step, url, best, time.perf_counter() - started))

    def wait(self) -> None:
        """Return when what was saved is in place. Raises as `save`."""
        if self._store is not None:
            self._store.wait(self._beat)

    def load(self, into: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        if not self.checkpoints:
            return None
        found = self._load_parts(into) if into is not None and _may_be_split() else self._load_whole()
        if found is None:
            return None
        self.step, self.can_resume = found["step"], True
        self._position = self._resumed = found.get("position", {})
        state: dict[str, Any] = found["state"]
        if into is not None:
            from flyte_ddp.rank.split_state import fill

            state = fill(into, state)
        return state

    def _load_parts(self, into: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what this rank keeps of the newest checkpoint, which all ranks read together."""
        from flyte_ddp.rank.split_state import function_world, has_split, own_boxes

        if not has_split(into):
            return self._load_whole()
        found, url, skipped = self.open_checkpoints().load_latest(function_world(), own_boxes(into))
        self.emit(events.CheckpointLoaded(found["step"] if found else 0, url, skipped=skipped))
        return found

    def _load_whole(self) -> dict[str, Any] | None:
        """Return the newest checkpoint, which each rank reads for itself: they may have no process group."""
        checkpoints = self.open_checkpoints()
        self._num_loads += 1
        key = f"flyte_ddp/load-{self._num_loads}"
        is_alone = self.process.node.world_size == 1
        # Rank 0 chooses: another rank that failed to read the newest would quietly go on from older weights.
        if self.process.rank == 0:
            found, url, skipped = checkpoints.load_latest()
            if not is_alone:
                checkpoints.keeps_resumed = found is not None
                self.open_store().set(key, str(found["step"] if found else -1))
            self._link.emit(events.CheckpointLoaded(found["step"] if found else 0, url, skipped=skipped))
        else:
            step = int(self.open_store().get(key))
            found = checkpoints.load(step) if step >= 0 else None
            self.open_store().add(f"{key}/num_readers", 1)
        return found

    def track(self, batches: EpochBatches, epoch: int) -> Iterator[tuple[Any, float]]:
        """Yield what is left of an epoch, and note for `save` how much of it is done."""
        resumed, length = self._resumed, batches.length
        if resumed and epoch <= resumed["epoch"]:
            if resumed["length"] != length:
                expected = f"expected {resumed['length']} samples, with which the checkpoint was written"
                raise ConfigError(f"session.batches: dataset: {expected}, got {length}")
            if epoch < resumed["epoch"]:
                return

            batches = dataclasses.replace(batches, first=resumed["num_samples"])
        if self._is_tracking:
            raise ConfigError("session.batches: epoch: expected None for all but one data set at a time")
        self._is_tracking = True
        try:
            for batch, weight, num_samples in batches:
                self._position = {"epoch": epoch, "num_samples": num_samples, "length": length}
                yield batch, weight
        finally:
            self._is_tracking = False

    def report(self, step: int | None, epoch: float | None, values: Mapping[str, float]) -> None:
        self.step = self.step + 1 if step is None else step
        self._link.beat(self.step)
        if self.process.rank > 0:
            return
        metrics = {}
        for name, value in values.items():
            try:
                metrics[name] = float(value)
            except (TypeError, ValueError):
                raise ConfigError(f"session.report: {name}: expected a number, got {value!r}") from None
        self._link.emit(events.Reported(self.step, epoch, metrics))

    def beat(self, step: int) -> None:
        """Report progress; `step` counts optimizer steps from the start of the run."""
        self.step = step
        self._link.beat(step)

    def emit(self, event: events.Event) -> None:
        """Send `event` to the listeners of the run, from rank 0."""
        if self.process.rank == 0:
            self._link.emit(event)

    def emit_start(self, **known: Any) -> None:
        """Emit that the run has started, with what is known of it by its name in `events.RunStarted`."""
        node = self.process.node
        name = self.process.job.program.name
        self.emit(events.RunStarted(name, node.world_size, node.num_nodes, node.num_restarts, **known))

    def wait_for_data(self) -> Path:
        """Return the directory of the prepared data, as soon as this node has it."""
        return self._link.wait_for_data()

    def open_checkpoints(self, num_kept: int = NUM_KEPT, peers: Peers | None = None) -> CheckpointStore:
        """Return the store of the run's checkpoints; the first call says how they are kept.

        Args:
            num_kept: newest ones that stay.
            peers: the ranks, where each of them writes a part of every checkpoint.
        """
        from flyte_ddp.checkpoints.store import CheckpointStore

        if self._store is None:
            job, is_first = self.process.job, self.process.rank == 0
            self._store = CheckpointStore(
                self.checkpoints,
                num_kept,
                job.program.store_timeout,
                job.owner,
                # A supervisor waits for rank 0's writing, which ends last: it waits for the other ranks'.
                on_busy=self._link.set_writing if is_first else None,
                on_written=lambda step, url, best: self._link.emit(events.CheckpointWritten(step, url, best)),
                peers=peers,
            )
        return self._store

    def close(self) -> None:
        """Wait until the checkpoints are written. Raises as `save`."""
        self.wait()
        if self._num_polls and self.process.node.world_size > 1:
            # A rank that has ended refuses all its calls, so that no other rank waits for it, nor stops alone.
            with self._agreeing:
                if self._num_refused < 0:
                    self._num_refused = self._num_polls
            self._publish(self.open_store())

    @contextlib.contextmanager
    def finish_on_error(self) -> Iterator[None]:
        """If the block raises, wait a while for what was saved in it, so that a retry finds it."""
        try:
            yield
        except Exception:
            if self._store is not None:
                with self._store.finish_on_error(self._beat):
                    raise
            raise

    def _num_readers(self) -> int:
        """Return how many ranks have read the checkpoint that rank 0 has chosen last."""
        return int(self.open_store().add(f"flyte_ddp/load-{self._num_loads}/num_readers", 0))

    def _terminate(self) -> None:
        """Pass a stop on as the signal that asked for it, as torchrun does, to a function that does not ask."""
        if self._num_polls:
            self._begin_to_stop(self._num_polls)
        else:
            self.was_terminated = True
            os.kill(os.getpid(), self._link.stop_signal)

    def _beat(self) -> None:
        self._link.beat(self.step)

    def _announce(self) -> bool:
        """Have it known, once, that the run can be stopped and resumed: then its gang may end to grow.

        For that it can resume, and every rank reads `stop_requested`. One that does not would be sent a
        SIGTERM. Returns True when this rank has no more to say.
        """
        others = self.process.node.world_size - 1
        if self.process.rank > 0:
            self.open_store().add("flyte_ddp/num_polling", 1)
        elif not self.can_resume or (others and self.open_store().add("flyte_ddp/num_polling", 0) < others):
            return False
        else:
            self._link.set_stoppable()
        return True

    def _begin_to_stop(self, num_refused: int) -> None:
        """Have the other ranks know, once, that this one has refused so many calls and refuses no more by itself."""
        with self._agreeing:
            if self._num_refused >= 0:
                return
            self._num_refused = num_refused
        threading.Thread(target=self._agree_on_stop, name="stop", daemon=True).start()

    def _agree_on_stop(self) -> None:
        """Find the first call that no rank has refused; all ranks stop there.

        Not by a collective: only the function knows which of them its ranks can take part in. Each rank publishes how
        many calls it has refused as soon as it is asked to stop, from a thread: a rank that is ahead may wait in its
        next call while this one waits for it in a collective. So that call waits only for threads like this one.
        """
        with contextlib.suppress(RuntimeError):  # rank 0 has died, and with it the store: its supervisor ends the run
            world_size = self.process.node.world_size
            refused = [str(self._num_refused)]
            if world_size > 1:
                store = self.open_store().clone()  # the function's own waits for a key would keep it
                self._publish(store)
                refused = [store.get(f"flyte_ddp/stop-{rank}").decode() for rank in range(world_size)]
            self._stop_at = 1 + max(map(int, refused))
            self._is_agreed.set()

    def _publish(self, store: Store) -> None:
        store.set(f"flyte_ddp/stop-{self.process.rank}", str(self._num_refused))


def _may_be_split() -> bool:
    """Return whether a state can have tensors that are split: their class is imported by whoever splits them."""
    return "torch.distributed.tensor" in sys.modules


_current: Session | None = None


def open_session(process: RankProcess, open_store: Callable[[], Store]) -> Session:
    """Make a new session the current one of this process, and return it.

    Args:
        open_store: returns the store where the ranks meet.
    """
    global _current
    _current = Session(process, open_store)
    return _current


def current() -> Session:
    """Return the session of this process, which is one of a rank."""
    assert _current is not None
    return _current


def __getattr__(name: str) -> Any:
    if name == "checkpoints":
        return _current.checkpoints if _current else ""
    if name == "stop_requested":
        return _current.stop_requested if _current else False
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
