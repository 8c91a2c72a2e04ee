"""What a rank reports: its progress, its metrics, the events of the run, and files.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.config.fields import finite_number, plain_number, whole_number
from flyte_ddp.config.waits import BEAT_INTERVAL, POLL_INTERVAL
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.protocol.messages import Emitted, Submitted
from flyte_ddp.launch.protocol.programs import Kind
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.rank.position import DataPosition

if TYPE_CHECKING:
    from flyte_ddp.rank.step_timer import StepTimer

MAX_REPORTS = 1000  # newest reports of another rank than 0 that travel as one message
# packages whose versions each run has in its history
PACKAGES = ("torch", "torchvision", "numpy", "transformers", "lightning", "flyte-ddp")
MAX_NAME = 100  # characters of a picture's name
# Bytes of a file that a rank submits, and of all files that are not taken yet. Each file costs
# some bytes more.
MAX_RESULT, MAX_SUBMITTED, FILE_COST = 64 << 20, 65 << 20, 1 << 20

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Reporter:
    """Sends heartbeats, reports and events to the agent."""

    process: RankProcess
    position: DataPosition
    step: int = 0  # the last one that was reported
    _warnings: set[str] = field(default_factory=set)
    _is_bad: bool = False  # the last loss that was reported
    _timer: StepTimer | None = None  # measures a function's steps, from report to report
    # reports of another rank than 0 that are not sent yet
    _reports: deque[events.Reported] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))

    def beat(self, step: int | None = None) -> None:
        """Report progress; `step` counts optimizer steps from the start of the run."""
        if step is not None:
            self.step = step
        self.process.link.beat(self.step)

    def emit(self, event: events.Event, from_all: bool = False) -> None:
        """Send `event` to the listeners of the run, from rank 0, or `from_all` that call it."""
        if from_all or self.process.rank == 0:
            self.process.link.send(Emitted(event))

    def emit_start(self, **known: Any) -> None:
        """Emit `events.RunStarted` with the given fields."""
        node = self.process.node
        name, versions = self.process.job.program.name, list_versions()
        sizes = node.world_size, node.num_nodes, node.num_restarts
        self.emit(events.RunStarted(name, *sizes, versions=versions, **known))

    def report(self, step: int | None, epoch: float | None, values: Mapping[str, float]) -> None:
        """See `session.report`."""
        if step is None:
            self.step += 1
        else:
            self.step = whole_number("session.report: step", step)
        if epoch is not None:
            epoch = finite_number("session.report: epoch", epoch, minimum=0)
        self.beat()
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
            self.warn_once(
                f"session.report: rank {self.process.rank} reports more than {MAX_REPORTS:,} times "
                f"in {BEAT_INTERVAL:g} s: of each such time the newest {MAX_REPORTS:,} are kept"
            )
        self._reports.append(reported)
        if len(self._reports) == 1:  # a timer that runs already sends this report too
            timer = threading.Timer(BEAT_INTERVAL, self.send_reports)
            timer.daemon = True
            timer.start()

    def show(self, name: str, picture: Any) -> None:
        """See `session.show`."""
        from flyte_ddp.rank.pictures import encode_picture

        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
            raise ConfigError(
                f"session.show: name: expected 1 to {MAX_NAME} characters, got {name!r:.200}"
            )
        if self.process.rank == 0:
            self.emit(events.PictureShown(self.step, name, encode_picture(picture)))

    def send_reports(self) -> None:
        """Send what this rank has reported since the last time. Any thread may call this."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._reports.popleft())
        if found:
            self.emit(events.RankReported(self.process.rank, found), from_all=True)

    def warn_once(self, line: str) -> None:
        """Log a warning, if it was not logged before."""
        if line not in self._warnings:
            self._warnings.add(line)
            logger.warning(line)

    def _check_loss(self, loss: float) -> None:
        """Name the samples of the step behind the first loss that is not finite."""
        was_bad, self._is_bad = self._is_bad, not math.isfinite(loss)
        if was_bad or not self._is_bad:
            return
        reason = f"the loss that rank {self.process.rank} reports is {loss}"
        position = self.position
        bad = events.StepFoundBad(self.step, position.epoch, loss, reason, position.list_samples())
        logger.warning("%s", bad)
        self.emit(bad, from_all=True)

    def _time_report(self) -> None:
        """Publish the time between two reports of a function. Its ranks may wait for each other."""
        if (
            self.process.job.program.kind is Kind.RECIPE
            or "torch.distributed.distributed_c10d" not in sys.modules
        ):
            return
        from torch import device

        from flyte_ddp.rank.step_timer import STEP, StepTimer

        if self._timer is None:
            self._timer = StepTimer(self.process.link.set_pace, device("cpu"))
        self._timer.end_step()
        self._timer.begin(STEP)


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide results, without an import."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


@dataclass(eq=False, repr=False)
class ResultFiles:
    """The files of `session.submit_result`. The agent takes them in their order."""

    reporter: Reporter
    # files that may still be on this node, and what they cost
    _submitted: deque[tuple[Path, int]] = field(default_factory=deque)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def submit(self, path: str, data: str | bytes) -> None:
        """See `session.submit_result`."""
        parts: tuple[str, ...] = ()
        if isinstance(path, str) and path.isprintable():
            parts = PurePosixPath(path).parts
        if not parts or parts[0][0] == "/" or ".." in parts:
            raise ConfigError(
                "session.submit_result: path: expected that of a file below a directory, such as "
                f"rank-1/losses.json, got {path!r}"
            )
        contents = data
        if isinstance(contents, str):
            contents = contents.encode()
        if not isinstance(contents, bytes) or len(contents) > MAX_RESULT:
            size = ""
            if isinstance(contents, bytes):
                size = f" of {len(contents):,} bytes"
            raise ConfigError(
                f"session.submit_result: data: expected str or bytes, at most {MAX_RESULT >> 20} "
                f"MiB, got {type(data).__name__}{size}"
            )
        process = self.reporter.process
        node = process.node
        if not node.results:
            self.reporter.warn_once(
                "session.submit_result: nothing is kept, because the run has no results"
            )
            return
        while self._count_bytes() + len(contents) + FILE_COST > MAX_SUBMITTED:
            time.sleep(POLL_INTERVAL)
        name = f"{node.num_restarts}-{process.rank}-{next(self._numbers)}"
        file = Path(node.results, name)
        os.makedirs(node.results, exist_ok=True)
        file.write_bytes(contents)
        self._submitted.append((file, len(contents) + FILE_COST))
        process.link.send(Submitted(name, "/".join(parts)))

    def _count_bytes(self) -> int:
        """Return the bytes of this rank's files that are not taken yet."""
        while self._submitted and not self._submitted[0][0].exists():
            self._submitted.popleft()
        return sum(size for _, size in self._submitted)
