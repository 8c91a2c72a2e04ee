"""The session of one rank's call, in parts, and how the call ends. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.checkpoints import WRITE_GRACE
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.rank.position import DataPosition, SampleChecks
from flyte_ddp.rank.reporter import Reporter, ResultFiles
from flyte_ddp.rank.saver import Saver
from flyte_ddp.rank.stop import StopAgreement


@dataclass(eq=False, repr=False)
class Session:
    """The session of one rank's call. The functions of `flyte_ddp.session` call its parts."""

    process: RankProcess
    # figures of the whole run by their names in `events.RunFinished`, on rank 0
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        process = self.process
        self.stop = StopAgreement(process)
        self.position = DataPosition(SampleChecks(process), self.stop)
        self.reporter = Reporter(process, self.position)
        self.saver = Saver(process, self.position, self.stop, self.reporter)
        self.files = ResultFiles(self.reporter)
        process.link.on_stop = self._terminate

    def close(self) -> None:
        """Wait until the checkpoints are written. Raises the errors of `Saver.wait`."""
        self.reporter.send_reports()
        self.saver.wait()
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
                self.reporter.send_reports()
            self.saver.wait_briefly(WRITE_GRACE)
            raise

    def _terminate(self) -> None:
        """Pass a stop on as the signal that asked for it, as torchrun does, to a function that does
        not ask. The signal may end this process, so what was saved is stored first.
        """
        if self.stop.is_heeded():
            self.stop.begin()
            return
        self.stop.was_terminated = True  # each save waits from now on until it is stored
        link = self.process.link
        self.saver.wait_briefly(min(WRITE_GRACE, link.saves_until - time.monotonic()))
        os.kill(os.getpid(), link.stop_signal)
