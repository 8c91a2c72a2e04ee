"""The runs of a rehearsal: the same program once undisturbed, and once with each fault. Imports
neither torch nor Dask itself.

This process starts all runs. Its server of ranks imports torch once, so a run costs little more
than its steps. Each run has a directory of its own, with links to the files of the working
directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flyte_ddp.code.by_value import dumps
from flyte_ddp.errors import ClusterError, ConfigError, DataError, TrainingStopped, first_line
from flyte_ddp.events import AttemptStarted, Event, Listener, RunFinished, RunState
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.run import Gang
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.process.threads import start_thread
from flyte_ddp.rehearsal.faults import Nodes
from flyte_ddp.rehearsal.seen import CHECKPOINTS, Run, read_run

GRACE = 10.0  # seconds from a notice until the ranks are killed
LEFT_TIMEOUT = 5.0  # seconds for which ranks wait for one that has ended
MIN_STEPS = 3
TITLES = {
    "undisturbed": "undisturbed",
    "again": "the same command once more",
    "kill": "a rank killed",
    "notice": "a notice (SIGTERM), and the command again",
    "smaller": "all killed, and one rank less",
    "larger": "all killed, and one rank more",
    "store": "the store away",
    "disk": "a full disk",
    "node": "a node lost, and another one",
}
MakeFault = Callable[[Mapping[int, int], StopRequest], None]  # gets the ranks' process ids


@dataclass
class Rehearsal:
    """The runs of one program.

    Args:
        make_program: returns the program; gets a directory for its outputs, and the samples of a
            shortened epoch, 0 for all.
        data: returns the local directory of a recipe's prepared data; None where none are needed.
        modules: that a server of ranks imports before it makes any.
        seconds: for all runs together.
    """

    make_program: Callable[[str, int], Program]
    data: Callable[[], str] | None
    modules: tuple[str, ...]
    directory: Path
    num_ranks: int
    seconds: float
    home: str = field(default_factory=os.getcwd)  # the user's working directory
    length: int = 0
    num_steps: int = 0
    fault_step: int = 0
    seconds_each: float = 60.0

    def rehearse(self) -> Iterator[Run]:
        """Yield the runs: the undisturbed one first.

        Raises:
            ConfigError: the program fails without a fault, or takes too few steps.
        """
        try:
            logging.disable()  # the runs' own lines on losses and restarts
            undisturbed = self._run_undisturbed()
            yield undisturbed
            for name in list(TITLES)[2:]:
                yield self._run_fault(name, undisturbed)
            # at last, because it goes on in the undisturbed run's place
            if self.num_steps:
                yield Run("again", not_tried="the runs were ended before their own end")
            else:
                yield self._start("undisturbed", start=1, name="again")
        finally:
            logging.disable(logging.NOTSET)
            os.chdir(self.home)

    def _run_undisturbed(self) -> Run:
        share = self.seconds / (len(TITLES) + 1)
        run = self._start("undisturbed", seconds=share)
        if run.is_cut:
            samples = sum(len(step.samples) for step in run.steps)
            self.num_steps, self.length = shorten(len(run.steps), samples)
            os.rename(self.directory / "undisturbed", self.directory / "cut")
            run = self._start("undisturbed")
        if run.exit_code:
            raise ConfigError(
                f"rehearse: expected a program that ends well without a fault, got exit code "
                f"{run.exit_code}: {run.error}"
            )
        self._refuse_shared(run)
        if len(run.steps) < MIN_STEPS:
            raise ConfigError(
                f"rehearse: expected at least {MIN_STEPS} steps of an optimizer of torch, got "
                f"{len(run.steps)}: more epochs, or more minutes (--minutes)"
            )
        self.fault_step = 5 * len(run.steps) // 8  # a step in the middle of one of few epochs
        self.seconds_each = max(60.0, 4 * run.seconds)
        return run

    def _refuse_shared(self, run: Run) -> None:
        """Raise ConfigError if the program saves where no run has a place of its own: the next run
        would go on with this one's checkpoint.
        """
        # a library's temporary files have names of their own
        temporary = os.path.join(os.path.realpath(tempfile.gettempdir()), "tmp")
        own = (f"{os.path.realpath(self.directory)}/", temporary)
        for attempt in run.attempts:
            for call in attempt.calls("save"):
                # a session's save, which has no path, is in a place of its own
                if call["path"] and not call["path"].startswith(own):
                    raise ConfigError(
                        "rehearse: expected checkpoints below the directory in which the rehearsal "
                        "runs, or {outputs} in an argument, got "
                        f"{call['path']!r}, which all runs would share"
                    )

    def _run_fault(self, name: str, undisturbed: Run) -> Run:
        is_stored = undisturbed.is_stored
        writes = is_stored or bool(undisturbed.files)
        reasons = {
            "store": "it saves nothing through flyte_ddp.session" * (not is_stored),
            "disk": "it writes no file where the run has its place" * (not writes),
            "smaller": "it has one rank" * (self.num_ranks == 1),
            "node": "two nodes need an even number of ranks" * (self.num_ranks % 2),
        }
        reason = reasons.get(name)
        if reason:
            return Run(name, not_tried=reason)
        if name == "node":
            return self._lose_node()
        if name in ("store", "disk"):
            return self._start(name, fault=name)
        if name == "kill":
            return self._start(name, make=lambda pids, _: _kill([pids[max(pids)]]))
        if name == "notice":
            self._start(name, make=lambda _, stop: stop.set("SIGTERM"))
            return self._start(name, start=1)
        self._start(name, Gang(1, self.num_ranks), make=lambda pids, _: _kill(pids.values()))
        num_ranks = self.num_ranks + {"larger": 1, "smaller": -1}[name]
        return self._start(name, Gang(1, num_ranks, 1), start=1)

    def _lose_node(self) -> Run:
        directory = self._make_directory("node")
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        nodes = Nodes(directory, {**os.environ, "PYTHONPATH": path})

        def evict(pids: Mapping[int, int], stop: StopRequest) -> None:
            nodes.evict(nodes.find(pids[self.num_ranks - 1]))
            nodes.add()

        with contextlib.closing(nodes):
            nodes.add()
            nodes.add()
            cluster = {"kind": "existing", "scheduler_address": nodes.address}
            gang = Gang(2, self.num_ranks // 2, 1, cluster)
            return self._start("node", gang, make=evict)

    def _make_directory(self, place: str) -> Path:
        """Return the directory of a run, with the links that its ranks find their files by."""
        directory = self.directory / place
        for name in ("records", "outputs", "work"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(self.home):
            link = directory / "work" / entry.name
            if not os.path.lexists(link):
                link.symlink_to(entry.path)
        return directory

    def _start(
        self,
        place: str,
        gang: Gang | None = None,
        *,
        start: int = 0,
        name: str = "",
        fault: str = "",
        make: MakeFault | None = None,
        seconds: float = 0.0,
    ) -> Run:
        """Give the command once in the directory of `place`, and return what was seen of the run so
        far.

        Args:
            gang: the ranks of the run; by default as in the undisturbed run.
            start: how often the command was given there before.
            fault: a fault that the ranks commit themselves.
            make: makes one from outside, while the ranks wait after `fault_step`.
        """
        from flyte_ddp.rehearsal.left import read_tensors
        from flyte_ddp.rehearsal.watch import Spec, WatchedCall

        directory, gang = self._make_directory(place), gang or Gang(1, self.num_ranks, 1)
        num_ranks = int(gang.nnodes or 1) * int(gang.nproc_per_node)
        spec = Spec(
            directory=str(directory / "records"),
            place=str(directory),
            kept=os.path.realpath(self.home),
            start=start,
            fault=fault,
            fault_step=self.fault_step,
            pauses=make is not None,
            length=self.length,
            num_steps=self.num_steps,
        )
        os.chdir(directory / "work")
        program = self.make_program(str(directory / "outputs"), self.length)
        program = dataclasses.replace(
            program,
            call=dumps(WatchedCall(program.call, spec)),
            slow_imports=self.modules,
            left_timeout=LEFT_TIMEOUT,
            stop_grace=GRACE,
        )
        begun = time.monotonic()
        faults = Faults(directory / "records", num_ranks, seconds or self.seconds_each, make)
        error, starts = None, Starts()
        try:
            self._drive(directory, gang, program, faults, starts)
        except (DataError, ClusterError):
            raise
        except Exception as raised:
            error = raised
        took = time.monotonic() - begun
        run = read_run(directory)
        run.name, run.seconds = name or place, took
        run.start_seconds = sum(starts.waits[:1]) + starts.first
        run.waited_seconds = sum(starts.waits[1:])
        if error:
            run.error, run.exit_code = first_line(error), _exit_code(error)
        run.is_cut = bool(seconds) and isinstance(error, TrainingStopped)
        run.is_resized = num_ranks != self.num_ranks
        if not run.is_resized:
            run.tensors = read_tensors(directory)
        print_line(f"{TITLES[run.name]}: {took:.1f} s")
        return run

    def _drive(
        self, directory: Path, gang: Gang, program: Program, faults: Faults, starts: Starts
    ) -> None:
        """Run the program to its end while another thread makes the faults."""
        job = Job(program, str(directory / CHECKPOINTS), time.time())
        thread = start_thread("faults", faults.make_when_due)
        with open(directory / "output.log", "a") as log:
            try:
                relay = lambda line: print(line, file=log)  # noqa: E731
                with gang.open_place(program) as place:
                    driver.run(job, place, self.data, (starts,), relay, faults.stop)
            finally:
                faults.is_over.set()
                thread.join()


@dataclass
class Starts(Listener):
    """Knows how long the ranks of a run took to start, in seconds."""

    waits: list[float] = field(default_factory=list)  # the wait of each attempt for its nodes
    first: float = 0.0  # the first start, without its wait

    def handle(self, event: Event, state: RunState) -> None:
        if isinstance(event, AttemptStarted):
            self.waits.append(event.waited_seconds)
        elif isinstance(event, RunFinished):
            self.first = state.time_spent().starting


@dataclass
class Faults:
    """Makes a fault from outside when all ranks wait for it, and ends a run that takes too long."""

    records: Path
    num_ranks: int
    seconds: float  # from the ranks' first record to the end
    make: MakeFault | None
    stop: StopRequest = field(default_factory=lambda: StopRequest(GRACE))
    is_over: threading.Event = field(default_factory=threading.Event)

    def make_when_due(self) -> None:
        ends_at = math.inf
        while not self.is_over.wait(0.02):
            self._make_if_due()
            files = self.records.glob("*.jsonl")
            if ends_at == math.inf and any(each.stat().st_size for each in files):
                ends_at = time.monotonic() + self.seconds
            if time.monotonic() > ends_at:
                for _ in range(2):  # twice is urgent
                    self.stop.set("SIGTERM")
                return

    def _make_if_due(self) -> None:
        from flyte_ddp.rehearsal.watch import GO

        pids = {int(each.name[7:]): each.read_text() for each in self.records.glob("paused-*")}
        if self.make and len(pids) == self.num_ranks and all(pids.values()):
            self.make({rank: int(pid) for rank, pid in pids.items()}, self.stop)
            self.make = None
            (self.records / GO).touch()


def shorten(num_steps: int, num_samples: int) -> tuple[int, int]:
    """Return the steps of a run, and the samples of an epoch, for two thirds of the time that these
    steps have taken: two epochs, so that what happens between epochs is seen.
    """
    shorter = num_steps * 2 // 3 // 2 * 2
    return shorter, num_samples * shorter // 2 // max(1, num_steps)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _exit_code(error: Exception) -> int:
    if isinstance(error, TrainingStopped):
        return 128 + signal.Signals[error.reason]
    if isinstance(error, ConfigError):
        return 2
    return 1
