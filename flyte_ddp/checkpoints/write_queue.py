"""States that wait to be written to the store, and the thread that writes them.

The thread tries again while the store is away. Knows nothing of a state's contents.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field

from flyte_ddp.checkpoints.writer import Write, Writer, yield_cores_to_training
from flyte_ddp.config.waits import BEAT_INTERVAL, POLL_INTERVAL
from flyte_ddp.errors import CheckpointError, ConfigError, StorageUnavailable
from flyte_ddp.process.threads import start_thread
from flyte_ddp.storage import redact_url
from flyte_ddp.storage.directory import FIRST_PAUSE, MAX_PAUSE
from flyte_ddp.storage.failures import describe

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class WriteQueue:
    """The states that wait for the writer: the newest state, and the best state so far. A newer
    state replaces the newest that waits.
    """

    writer: Writer
    # The training is over: on a full disk the model counts more than checkpoints.
    has_finished: bool = False
    _waiting: list[Write] = field(default_factory=list)
    _current: Write | None = None  # the state that is being written
    _failure: Exception | None = None  # the error that has ended the writing
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def add(self, write: Write) -> None:
        """Let the thread write a state."""
        self.writer.report(True, None)
        with self._changed:
            self._waiting.append(write)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = start_thread("checkpoint", self._run)

    def make_room(self, write: Write) -> None:
        """Drop the states that `write` replaces, because it needs their memory. Rank 0 chooses
        the states for all ranks.
        """
        with self._changed:
            if not self.writer.follows:
                wanted = _choose_wanted([*self._waiting, write])
                self._waiting = [each for each in self._waiting if each in wanted]
            kept = [each.number for each in self._unfinished]
        kept = self.writer.peers.world.broadcast_object(kept)
        with self._changed:
            self._waiting = [each for each in self._waiting if each.number in kept]

    @property
    def _unfinished(self) -> list[Write]:
        return [each for each in (self._current, *self._waiting) if each]

    @property
    def has_best(self) -> bool:
        """True while the best state is not in the store yet."""
        return any(each.best for each in self._unfinished)

    def check(self) -> None:
        """Raise if writing has failed for good. See `CheckpointStore.check`."""
        if self._failure is not None:
            raise self._failure
        self.writer.check()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether all states are written."""
        with self._changed:
            if self._unfinished and self._failure is None:
                self._changed.wait(seconds)
            return not self._unfinished and self._failure is None

    # The writing thread runs the methods below.

    def _run(self) -> None:
        yield_cores_to_training()
        pause = FIRST_PAUSE
        while self._failure is None:
            write: Write | None = None
            try:
                write = self._next()
                self.writer.report(True, None)
                self.writer.write(write)
            except StorageUnavailable as error:  # the storage has logged it
                if not self._put_back(write, error):
                    time.sleep(pause)
                    pause = min(2 * pause, MAX_PAUSE)
            except Exception as error:
                self._fail(error)
            else:
                pause = FIRST_PAUSE
                self._finish(write)

    def _next(self) -> Write:
        """Wait for a state to write, and take it from the queue: the oldest state, or on other
        ranks the state that rank 0 has begun.
        """
        pause = POLL_INTERVAL
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                follows = self.writer.follows and self._waiting[0].has_manifest
            number, name = 0, ""
            if follows:
                number, name = self.writer.peers.announced(0)
            with self._changed:
                # Older states are not written any more.
                self._waiting = [each for each in self._waiting if each.number >= number]
                if self._waiting and (not follows or self._waiting[0].number == number):
                    self._current = write = self._waiting.pop(0)
                    write.name = name or write.name
                    return write
                self._changed.notify_all()
            time.sleep(pause)
            pause = min(2 * pause, BEAT_INTERVAL)  # all followers ask one process

    def _finish(self, write: Write) -> None:
        write.free()  # the memory is free before the wait ends
        with self._changed:
            self._current = None
            self.writer.report(bool(self._waiting), None)
            self.writer.end()
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """End the thread with an error that no other try can mend."""
        if not isinstance(error, ConfigError):
            place, why = redact_url(self.writer.sink.url), describe(error.__cause__ or error)
            error = CheckpointError(f"{place}: a checkpoint could not be written: {why}")
        with self._changed:
            self._failure, self._current = error, None
            self.writer.report(False, None)
            self._changed.notify_all()

    def _put_back(self, write: Write | None, error: StorageUnavailable) -> bool:
        """Let a state wait for another try. Return whether that may succeed at once."""
        self.writer.report(False, None)
        self.writer.outage = str(error)
        with self._changed:
            if write:
                self._waiting.insert(0, write)
            if not self.writer.follows:
                self._waiting = _choose_wanted(self._waiting)
            self._current = None
        is_alone = self.writer.peers.world.world_size == 1
        return error.is_full and is_alone and self._make_space()

    def _make_space(self) -> bool:
        """Make space on a full disk: for the next checkpoint during the training, and for the model
        at its end.

        For a checkpoint, all checkpoints but the newest and the best are deleted. For the model,
        the checkpoints that are not written yet are dropped. If the model itself is next, the best
        checkpoint is deleted, too, because it may be a copy of the model.

        Returns:
            True if another try may succeed.
        """
        retention = self.writer.retention
        if not self.has_finished and retention.num_kept > 1:
            logger.warning(
                "the disk is full: from now on only the newest checkpoint and the best one stay"
            )
        with self._changed:
            checkpoints = [write for write in self._waiting if write.has_manifest]
        with contextlib.suppress(Exception):  # the next checkpoint deletes the rest
            if retention.keep_one(keeps_best=bool(checkpoints)):
                return True
        if not (self.has_finished and checkpoints):
            return False
        with self._changed:
            self._waiting = [write for write in self._waiting if not write.has_manifest]
            self.writer.since = 0.0
            self._changed.notify_all()
        logger.warning(
            "the last checkpoint is not written: the disk is full, and the training has finished"
        )
        return True


def _choose_wanted(queue: list[Write]) -> list[Write]:
    """Return the states of `queue` that are worth writing, oldest first: the newest state, and the
    newest that was the best.
    """
    best = [write for write in queue if write.best][-1:]
    return [write for write in queue if write is queue[-1] or write in best]
