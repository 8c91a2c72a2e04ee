"""Agree with the other ranks on the call of `session.stop_requested` from which it is true. Imports
no torch.

A function that does not read it, and takes its batches from `session.batches`, is ended between two
of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyte_ddp.launch.protocol.programs import Kind
from flyte_ddp.process.threads import start_thread

if TYPE_CHECKING:
    from torch.distributed import Store

    from flyte_ddp.rank.link import RankProcess

CAN_RESUME = "flyte_ddp/can_resume"  # the store's key for: rank 0 has saved


@dataclass(eq=False)
class StopAgreement:
    """How one rank agrees with the others on the step to stop after."""

    process: RankProcess
    was_terminated: bool = False  # the function got a signal, because it does not ask
    num_polls: int = 0  # calls so far, or batches so far if the function does not ask
    is_asked: bool = False  # the function itself has called
    is_reached: bool = False  # a call has returned that the function should stop
    _has_begun: bool = False  # the function has asked, or has begun its first batch
    _is_stoppable: bool = False  # this rank has announced that the run can be stopped
    _num_refused: int = -1  # calls that may have returned False; -1 before the stop
    # number of the call that returns True, once the ranks agree
    _stop_at: Future[int] = field(default_factory=Future)
    _agreeing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # A recipe always saves a checkpoint before it stops.
        self.can_resume = self.process.job.program.kind is Kind.RECIPE

    @property
    def is_stopping(self) -> bool:
        """True once a call has returned True, or the function got a signal."""
        return self.is_reached or self.was_terminated

    def poll(self) -> bool:
        """Return whether the function should stop. On every rank the same call returns True, if all
        ranks call it in the same steps.

        After the request the first call waits until all ranks know of it. See `_agree`.
        """
        self.is_asked = True
        self.is_reached = self._poll()
        return self.is_reached

    def poll_between_batches(self, is_saved: bool) -> bool:
        """Return whether a function that does not ask is ended before its next batch. All ranks end
        before the same batch.

        The function ends as soon as it has saved all its batches, or when half of the grace is
        over. The other half is for the files that are being written. Rank 0 decides, because the
        other ranks may not call `session.save`. They wait for its decision at each batch after the
        request.

        Args:
            is_saved: rank 0's last save includes all batches so far.
        """
        if (
            self.is_asked or not self._has_begun
        ):  # the function had no chance to ask in its first step
            self._has_begun = True
            return False
        if not self._poll():
            return False
        key, link = f"flyte_ddp/ends-before-{self.num_polls}", self.process.link
        if self.process.rank > 0:
            # Other threads use the first connection.
            self.is_reached = self.process.open_store().clone().get(key) == b"1"
            return self.is_reached
        self.is_reached = is_saved or time.monotonic() > link.saves_until
        if self.process.node.world_size > 1:
            self.process.open_store().set(key, str(int(self.is_reached)))
        return self.is_reached

    def _poll(self) -> bool:
        self.num_polls += 1
        number = self.num_polls
        if not self._is_stoppable:
            self._is_stoppable = self._announce()
        if not self.process.link.stop_requested:
            return False
        self._refuse_no_more(number - 1)
        return number >= self._stop_at.result()

    def is_heeded(self) -> bool:
        """Return whether the function will end when the run is asked to stop: it asks itself, or it
        ends between two batches.

        It ends between two batches only if rank 0 has saved or loaded, because it could not resume
        otherwise.
        """
        if self.is_asked or not self.num_polls or self.process.node.world_size == 1:
            return self.is_asked or (bool(self.num_polls) and self.can_resume)
        # The function's own connection may be waiting for a key.
        return self.can_resume or bool(self.process.open_store().clone().check([CAN_RESUME]))

    def note_saved(self) -> None:
        """Note that there is a checkpoint to resume from. Rank 0 notes it for the other ranks."""
        is_first = self.process.rank == 0 and not self.can_resume
        if is_first and self.process.node.world_size > 1:
            self.process.open_store().set(CAN_RESUME, "1")
        self.can_resume = True

    def begin(self) -> None:
        """Publish to the other ranks that this rank was asked to stop. It must have polled."""
        self._refuse_no_more(self.num_polls)

    def close(self) -> None:
        """Publish to the other ranks that this rank has ended, so that no rank waits for it or
        stops alone.
        """
        if self.num_polls and self.process.node.world_size > 1:
            with self._agreeing:
                if self._num_refused < 0:
                    self._num_refused = self.num_polls
            self._publish(self.process.open_store())

    def _announce(self) -> bool:
        """Announce, once, that the run can be stopped and resumed, so that its gang may end in
        order to grow.

        The run needs a checkpoint, and a function that reads `stop_requested` on every rank: any
        other rank would get a SIGTERM. Returns True when this rank has made its announcement.
        """
        others = self.process.node.world_size - 1
        if self.process.rank > 0:
            self.process.open_store().add("flyte_ddp/num_polling", 1)
        elif not self.can_resume or (
            others and self.process.open_store().add("flyte_ddp/num_polling", 0) < others
        ):
            return False
        else:
            self.process.link.position.is_stoppable = True
        return True

    def _refuse_no_more(self, num_refused: int) -> None:
        """Publish to the other ranks, once, that this rank has refused so many calls and refuses no
        more by itself.
        """
        with self._agreeing:
            if self._num_refused >= 0:
                return
            self._num_refused = num_refused
        start_thread("stop", self._agree)

    def _agree(self) -> None:
        """Find the first call that no rank has refused; all ranks stop there.

        A collective is no option: only the function knows when its ranks can take part in one. As
        soon as a rank is asked to stop, a thread publishes how many calls the rank has refused. A
        rank that is ahead may wait in its next call while other ranks wait for it in a collective.
        So its call waits only for these threads.
        """
        # A RuntimeError means that rank 0 and the store have died. Its agent then ends the run.
        with contextlib.suppress(RuntimeError):
            world_size = self.process.node.world_size
            refused = [str(self._num_refused)]
            if world_size > 1:
                # The function's own connection may be waiting for a key.
                store = self.process.open_store().clone()
                self._publish(store)
                refused = [
                    store.get(f"flyte_ddp/stop-{rank}").decode() for rank in range(world_size)
                ]
            self._stop_at.set_result(1 + max(map(int, refused)))

    def _publish(self, store: Store) -> None:
        store.set(f"flyte_ddp/stop-{self.process.rank}", str(self._num_refused))
