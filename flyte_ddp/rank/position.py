"""How far a rank's loops over `session.batches` are, for checkpoints and after them.

Knows nothing of checkpoint files. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyte_ddp.config.fields import whole_number
from flyte_ddp.errors import ConfigError, StopRequested
from flyte_ddp.events import BadSample
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.rank.stop import StopAgreement

if TYPE_CHECKING:
    from flyte_ddp.rank.batches import Check, EpochBatches

PLACE = "session.batches: "  # the beginning of each error
ONE_LOOP = f"{PLACE}epoch: expected None for all but one data set at a time"
WRITTEN = ", with which the checkpoint was written"
MAX_CHECKED = 4  # data sets of `batches` that a session remembers
Position = dict[str, Any]  # a plain value, see `DataPosition`
# the position before the first batch
START: Position = {"epoch": 0, "sets": [], "is_over": False, "num_sets": 0, "num_samples": 0}

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class _Loop:
    """A loop over `batches`."""

    batches: EpochBatches  # the batches that the function asked for
    handled_before: BaseException | None  # the error that was handled when the loop began
    place: Position  # the position behind the last batch that the loop was given
    end: Position  # the position behind the loop's data set

    def is_over(self, batches: EpochBatches) -> bool:
        """Return whether the loop goes over these batches."""
        own = self.batches
        return own.dataset is batches.dataset and (
            (own.global_batch_size, own.epoch, own.seed, own.shuffle)
            == (batches.global_batch_size, batches.epoch, batches.seed, batches.shuffle)
        )


@dataclass(eq=False, repr=False)
class SampleChecks:
    """Compares the samples of each data set once: with the other ranks' and the checkpoint's."""

    process: RankProcess
    # data sets that are known to be alike on all ranks, and the facts of their samples
    _checked: deque[tuple[Any, dict[str, Any]]] = field(
        default_factory=lambda: deque(maxlen=MAX_CHECKED)
    )

    def choose(self, batches: EpochBatches, name: str, own: dict[str, Any]) -> Check | None:
        """Return the comparison that is due before a data set's first batch, None for none.

        Args:
            name: the name of the pass over the data set, the same on all ranks.
            own: the position's entry for the data set; the check sets its "samples".
        """
        for dataset, facts in self._checked:
            if dataset is batches.dataset:
                if isinstance(dataset, Iterator):
                    raise ConfigError(
                        f"{PLACE}dataset: expected an iterable that begins anew in each epoch, got "
                        f"a {type(dataset).__name__} again"
                    )
                own["samples"] = facts
                return None

        def check(samples: dict[int, Any], read: Callable[[], dict[int, Any]]) -> None:
            from flyte_ddp.rank.agreement import check_in_store, compare, name_samples
            from flyte_ddp.world import ALONE, RankNotes, World

            facts, again = name_samples(samples), lambda: name_samples(read())
            if batches.length is not None:  # an iterable's samples belong to one place in one epoch
                compare(PLACE, own["samples"] or facts, facts, WRITTEN, read=again)
                own["samples"] = facts
            self._checked.append((batches.dataset, own["samples"]))
            ranks = batches.readers or range(self.process.node.world_size)
            if len(ranks) > 1:
                size = {"global_batch_size": batches.global_batch_size}
                facts = {**own["call"], **size, **own["order"], **facts}
                world = World(self.process.rank, self.process.node.world_size, ALONE.device)
                notes = RankNotes(
                    self.process.open_store().clone(), f"flyte_ddp/batches-{name}", world
                )
                check_in_store(facts, again, notes, ranks)

        return check


@dataclass(eq=False, repr=False)
class DataPosition:
    """The position of one rank in the data of `session.batches`.

    A position is a plain value: the epoch, its data sets so far in the order of their calls, and
    the number of samples that are done in the last data set.
    """

    checks: SampleChecks
    stop: StopAgreement
    current: Position = field(default_factory=lambda: START)
    resumed: Position = field(default_factory=lambda: START)  # the checkpoint's
    epoch: int | None = None  # the epoch of the loop that began last
    _saved: Position | None = None  # the position at the last save
    _sets: list[dict[str, Any]] = field(default_factory=list)  # data sets of the epoch so far
    _num_sets: int = 0  # data sets of the epoch before; 0 if that is not known
    _open: _Loop | None = None  # the loop that runs
    _left: _Loop | None = None  # the last loop, if it was left before its end
    # the loop's current batch: its data set, and its first and last place in the epoch
    _given: tuple[EpochBatches, int, int] | None = None

    def resume(self, position: Position) -> None:
        """Go on from the position of a checkpoint."""
        self.current = self.resumed = position
        self._num_sets = position["num_sets"]

    @property
    def to_save(self) -> Position:
        """The position that a save notes.

        A loop that was left has ended its epoch, unless an error ended the loop. After a save that
        handles the error, a restart has to train the rest.
        """
        left = self._left
        if left is None or self.current is not left.end:
            return self.current
        error = sys.exc_info()[1]
        is_handling = error is not None and error is not left.handled_before
        if is_handling:
            return left.place
        return left.end

    def note_saved(self) -> None:
        """Note that the store gets a checkpoint of the current position."""
        self._saved = self.current

    def epochs(self, num_epochs: int) -> range:
        """Return the epochs that are left, beginning with the checkpoint's epoch."""
        return range(self.first_epoch, whole_number("session.epochs: num_epochs", num_epochs))

    @property
    def first_epoch(self) -> int:
        """The checkpoint's epoch, or the next one if it was over; 0 without a checkpoint."""
        resumed = self.resumed
        is_over = resumed["is_over"] and len(resumed["sets"]) >= resumed["num_sets"]
        return int(resumed["epoch"] + is_over)

    def list_samples(self) -> list[BadSample]:
        """Return the samples of the batch that the loop is at."""
        if self._given is None:
            return []
        batches, begin, end = self._given
        key = getattr(batches.dataset, "key", lambda _: "")
        return [BadSample(each, key(each), None) for each in batches.list_samples(begin, end)]

    def track(self, batches: EpochBatches, epoch: int) -> Iterator[tuple[Any, float]]:
        """Yield the batches that are left of an epoch, and note the position for `save`.

        A loop that is left early ends its data set, unless the run was asked to stop or the same
        loop is opened again.
        """
        # The iterator of an epoch before may still exist: some loaders keep theirs.
        if self._open is not None and epoch == self.epoch:
            raise ConfigError(ONE_LOOP)
        loop = _Loop(batches, sys.exc_info()[1], self.current, self.current)
        earlier = self._enter(batches, epoch)
        # If little is left of a loop that is opened twice, its first pass may reach the end.
        is_opened_twice = earlier.get("is_again", False)
        if is_opened_twice:
            self._left = loop
        place, resumed = (epoch, len(self._sets) - 1), self.resumed
        resumed_at = resumed["epoch"], len(resumed["sets"]) - 1
        if place < resumed_at or (place == resumed_at and resumed["is_over"]):
            return
        self._warn_of_untrained(place)
        first = 0
        if place == resumed_at:
            first = resumed["num_samples"]
        batches = self._continue(batches, first, earlier.get("order"))
        yield from self._follow(loop, batches)
        if is_opened_twice:
            loop.place = loop.end = self.current
            self._left = loop

    def _enter(self, batches: EpochBatches, epoch: int) -> dict[str, Any]:
        """Note the call for the epoch's next data set, or a repeated call for the last data set.
        Return the checkpoint's entry for the data set.

        Raises:
            ConfigError: the checkpoint was written with another call.
        """
        from flyte_ddp.rank.agreement import compare

        if epoch != self.epoch:
            self._num_sets = len(self._sets) or self._num_sets
            self.epoch, self._sets = epoch, []
        is_again = self._left is not None and self._left.is_over(batches)
        if is_again:
            self._sets.pop()
        self._left = None
        call = batches.call
        earlier: dict[str, Any] = {}
        number, found = len(self._sets), self.resumed["sets"]
        if number < len(found) and epoch <= self.first_epoch:
            earlier = found[number]
        compare(PLACE, earlier.get("call", call), call, WRITTEN)
        samples = earlier.get("samples", {})
        self._sets.append({"call": call, "order": {}, "samples": samples, "is_again": is_again})
        return earlier

    def _warn_of_untrained(self, place: tuple[int, int]) -> None:
        """Warn if the first epoch of a run had more data sets than its save knew."""
        epoch, resumed = place[0], self.resumed
        is_next = place == (resumed["epoch"] + 1, len(resumed["sets"]))
        if resumed["is_over"] and is_next and not self._num_sets:
            logger.warning(
                "session.batches: epoch %d has more data sets than epoch %d had when its "
                "checkpoint was saved: what followed there was not trained. Save in the loops "
                "over the data sets of the first epoch",
                epoch,
                epoch - 1,
            )

    def _continue(
        self, batches: EpochBatches, first: int, known: dict[str, Any] | None
    ) -> EpochBatches:
        """Return the batches after the `first` samples of the epoch, with the check that is due.

        Args:
            known: the order of the data in the checkpoint.

        Raises:
            ConfigError: the data have another order than in the checkpoint.
        """
        batches = dataclasses.replace(batches, first=first).continue_order(known or {}, WRITTEN)
        own = self._sets[-1]
        own["order"] = batches.describe_order()
        check = self.checks.choose(batches, f"{self.epoch}-{len(self._sets) - 1}", own)
        return dataclasses.replace(batches, check=check)

    def _follow(self, loop: _Loop, batches: EpochBatches) -> Iterator[tuple[Any, float]]:
        """Yield batches, and note the position behind each of them.

        Raises:
            StopRequested: the run is to end, and the function itself does not ask for that.
        """
        position = {
            "epoch": self.epoch,
            "sets": list(self._sets),
            "is_over": False,
            "num_sets": self._num_sets,
        }
        end = {**position, "num_samples": 0, "is_over": True}
        first = batches.first
        self._open = loop
        try:
            for batch, weight, num_samples in batches:
                if self.stop.poll_between_batches(self._saved is self.current):
                    raise StopRequested
                self._given, first = (batches, first, num_samples), num_samples
                place = self.current = {**position, "num_samples": num_samples}
                yield batch, weight
                if self._open is not loop:
                    raise ConfigError(ONE_LOOP)
            # A save after the loop counts the epoch as done, unless more data sets follow, as in
            # the epoch before. A save of the last batch before a stop covers all batches, too.
            if self._saved is self.current:
                self._saved = end
            self.current = end
        except GeneratorExit:
            if self.current is place and not self.stop.is_stopping:
                loop.place, loop.end = place, end
                self._left, self.current = loop, end
            raise
        finally:
            if self._open is loop:
                self._open = None
