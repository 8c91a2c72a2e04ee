"""The runs of a rehearsal: the same program once undisturbed, and once with each fault. Imports
neither torch nor Dask itself.

All are started by this process, whose server of ranks has imported torch once, so that a run costs
little more than its steps. Each has a directory of its own, with links to the files of the working
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flyte_ddp.config.background import start_thread
from flyte_ddp.config.by_value import dumps
from flyte_ddp.errors import ClusterError, ConfigError, DataError, TrainingStopped
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.protocol.failures import first_line
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.run import Gang
from flyte_ddp.observers.streams import print_line
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
        if len(run.steps) < MIN_STEPS:
            raise ConfigError(
                f"rehearse: expected at least {MIN_STEPS} steps of an optimizer of torch, got "
                f"{len(run.steps)}: more epochs, or more minutes (--minutes)"
            )
        self.fault_step = 5 * len(run.steps) // 8  # in the middle of one of few epochs
        self.seconds_each = max(60.0, 4 * run.seconds)
        return run

    def _run_fault(self, name: str, undisturbed: Run) -> Run:
        writes = undisturbed.is_stored or undisturbed.files
        reasons = {
            "store": "" if undisturbed.is_stored else "it saves nothing through flyte_ddp.session",
            "disk": "" if writes else "it writes no file where the run has its place",
            "smaller": "" if self.num_ranks > 1 else "it has one rank",
            "node": self.num_ranks % 2 * "two nodes need an even number of ranks",
        }
        if reason := reasons.get(name):
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
        num_ranks = self.num_ranks + (1 if name == "larger" else -1)
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
            if not os.path.lexists(link := directory / "work" / entry.name):
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
            gang: its ranks; by default those of the undisturbed run.
            start: how often it was given before there.
            fault: one that the ranks commit themselves.
            make: makes one from outside, while the ranks wait after `fault_step`.
        """
        from flyte_ddp.rehearsal.left import read_tensors
        from flyte_ddp.rehearsal.watch import GO, Spec, WatchedCall

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
        job = Job(program, str(directory / CHECKPOINTS), time.time())
        stop, is_over, begun = StopRequest(GRACE), threading.Event(), time.monotonic()

        def interfere() -> None:
            """Make the fault when all ranks wait for it, and end a run that takes too long."""
            is_due, records, has_begun = make is not None, directory / "records", None
            while not is_over.wait(0.02):
                pids = {int(each.name[7:]): each.read_text() for each in records.glob("paused-*")}
                if is_due and make and len(pids) == num_ranks and all(pids.values()):
                    is_due = False
                    make({rank: int(pid) for rank, pid in pids.items()}, stop)
                    (records / GO).touch()
                if has_begun is None and any(
                    each.stat().st_size for each in records.glob("*.jsonl")
                ):
                    has_begun = time.monotonic()
                if time.monotonic() > (has_begun or math.inf) + (seconds or self.seconds_each):
                    stop.set("SIGTERM")
                    stop.set("SIGTERM")
                    return

        thread = start_thread("faults", interfere)
        error: Exception | None = None
        with open(directory / "output.log", "a") as log:
            try:
                relay = lambda line: print(line, file=log)  # noqa: E731
                with gang.open_place(program) as place_of_ranks:
                    driver.run(job, place_of_ranks, self.data, (), relay, stop)
            except (DataError, ClusterError):
                raise
            except Exception as raised:
                error = raised
            finally:
                is_over.set()
                thread.join()
        took = time.monotonic() - begun
        run = read_run(directory)
        run.name, run.error = name or place, first_line(error) if error else ""
        run.seconds, run.exit_code = took, _exit_code(error)
        run.is_cut = bool(seconds) and isinstance(error, TrainingStopped)
        run.is_resized = num_ranks != self.num_ranks
        run.tensors = {} if run.is_resized else read_tensors(directory)
        print_line(f"{TITLES[run.name]}: {took:.1f} s")
        return run


def shorten(num_steps: int, num_samples: int) -> tuple[int, int]:
    """Return the steps of a run, and the samples of an epoch, for two thirds of the time that these
    steps have taken: two epochs, so that what happens between epochs is seen.
    """
    shorter = num_steps * 2 // 3 // 2 * 2
    return shorter, num_samples * shorter // 2 // max(1, num_steps)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _exit_code(error: Exception | None) -> int:
    if isinstance(error, TrainingStopped):
        return 128 + signal.Signals[error.reason]
    return (2 if isinstance(error, (ConfigError, DataError)) else 1) if error else 0
