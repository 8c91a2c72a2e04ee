"""Kill ranks, evict and drain nodes at random while a run trains: `python -m benchmarks.soak --seed
1`.

On a Dask cluster of worker processes on this machine, one model trains: a recipe, or with
`--program function` a loop of one's own. At random moments a rank is killed, or a worker with its
nanny, or a worker is told to go; it comes back under another name some seconds later. In the end it
prints what the time went to, the samples that were lost or trained twice, and whether the weights
equal an undisturbed run's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle

from benchmarks.counting import (
    BATCH_SIZE,
    LEARNING_RATE,
    NUM_SAMPLES,
    SAVE_STEPS,
    STEP_SECONDS_VARIABLE,
    Counting,
    open_shards,
    write_shards,
)
from benchmarks.streams import STORE, slow_store
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.config import resolve
from flyte_ddp.events import Event, RunStarted, RunState
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.rehearsal.faults import Nodes, children, send_to_all

if TYPE_CHECKING:
    from psutil import Process
    from torch import Tensor

STEP_SECONDS = 0.25  # a step's length on any number of nodes, so that the run's length is known
ABSENCE = (3.0, 15.0)  # seconds until an evicted node is back
# share of the time after which nothing more is killed, so that the run ends undisturbed
QUIET = 0.85
NAME = "benchmarks.counting.Counting"


class SoakNodes(Nodes):
    """Nodes that can also drain. It finds their ranks."""

    leaving: tuple[subprocess.Popen[bytes], ...] = ()

    def drain(self, name: str) -> None:
        """Tell a worker to go, as a pod is told that is drained."""
        nanny = self.workers.pop(name)
        nanny.terminate()
        self.leaving += (nanny,)

    def close(self) -> None:
        for process in self.leaving:
            send_to_all(process, signal.SIGKILL)
            process.wait()
        super().close()

    def ranks(self) -> list[Process]:
        return [
            process
            for nanny in list(self.workers.values())  # another thread brings evicted ones back
            for process in children(nanny.pid, recursive=True)
            if _is_rank(process)
        ]


class Faults(threading.Thread):
    """A listener of the run that also does the harm, in a thread, from the first step on."""

    def __init__(
        self, nodes: SoakNodes, seed: int, num_faults: int, seconds: float, announced: float
    ) -> None:
        super().__init__(daemon=True)
        self.nodes = nodes
        self.random = random.Random(seed)
        self.announced = announced  # share of the faults
        self.times = sorted(self.random.uniform(0, QUIET * seconds) for _ in range(num_faults))
        self.state = RunState(keep_reports=False)
        self.done: dict[str, int] = {"rank killed": 0, "node evicted": 0, "node drained": 0}
        self.sizes: list[int] = []
        self.is_over = threading.Event()

    def handle(self, event: Event) -> None:
        self.state.handle(event)
        if isinstance(event, RunStarted):
            self.sizes.append(event.world_size)
            if len(self.sizes) == 1:
                self.start()

    def close(self, error: BaseException | None) -> None:
        self.is_over.set()

    def describe(self) -> str:
        """Return the number of faults made so far, and the number requested."""
        kinds = ", ".join(f"{count} x {what}" for what, count in self.done.items())
        return f"{sum(self.done.values())} of {len(self.times)}: {kinds}"

    def run(self) -> None:
        begun = time.monotonic()
        for moment in self.times:
            if self.is_over.wait(max(0.0, begun + moment - time.monotonic())):
                return
            is_announced = bool(self.announced) and self.random.random() < self.announced
            if is_announced or (len(self.nodes.workers) > 1 and self.random.random() < 0.5):
                while len(self.nodes.workers) < 2:  # The run needs another worker.
                    if self.is_over.wait(0.1):
                        return
                name = self.random.choice(sorted(self.nodes.workers))
                (self.nodes.drain if is_announced else self.nodes.evict)(name)
                self.done["node drained" if is_announced else "node evicted"] += 1
                threading.Timer(self.random.uniform(*ABSENCE), self.nodes.add).start()
            else:
                while not self._kill_a_rank():  # between two attempts there is none
                    if self.is_over.wait(0.1):
                        return

    def _kill_a_rank(self) -> bool:
        with contextlib.suppress(ProcessLookupError, IndexError):
            self.random.choice(self.nodes.ranks()).kill()
            self.done["rank killed"] += 1
            return True
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="of stepping (%(default)s)")
    parser.add_argument(
        "--faults", type=int, default=20, help="kills, evictions and drains (%(default)s)"
    )
    parser.add_argument(
        "--announced", type=float, default=0.0, help="share of them that are drains (%(default)s)"
    )
    parser.add_argument(
        "--program",
        choices=["recipe", "function", "shards"],
        default="recipe",
        help="shards: a function whose data are in such, in an S3 server (%(default)s)",
    )
    parser.add_argument("--nodes", type=int, default=2, help="of a rank each (%(default)s)")
    arguments = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    steps_per_epoch = NUM_SAMPLES // BATCH_SIZE
    epochs = max(1, round(60 * arguments.minutes / STEP_SECONDS / steps_per_epoch))
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        (directory / "data").mkdir()
        prepare_data(Counting(), "", directory / "data")
        prepared = data = str(directory / "data")
        if arguments.program == "shards":
            os.environ.update(STORE, AWS_ENDPOINT_URL=stack.enter_context(slow_store()))
            data = write_shards(directory / "data")
        nodes = stack.enter_context(_nodes(directory, arguments.nodes))
        faults = Faults(
            nodes, arguments.seed, arguments.faults, 60 * arguments.minutes, arguments.announced
        )
        job = _job(arguments.program, epochs, data, directory / "run", STEP_SECONDS)
        _train(job, lambda: prepared, nodes, faults)
        job = _job(arguments.program, epochs, data, directory / "undisturbed", 0.0)
        driver.run(job, LocalPlace(2), lambda: prepared)
        return _report(arguments, epochs, faults, directory)


def _train(job: Job, data: Callable[[], str], nodes: SoakNodes, faults: Faults) -> None:
    cluster = ClusterConfig(
        kind="existing",
        scheduler_address=nodes.address,
        num_nodes=len(nodes.workers),
        min_nodes=1,
        max_restarts=1000,
        return_timeout=0.5,
        grow_delay=1.0,
        grow_interval=0.0,
    )
    with open_cluster(cluster, "soak") as client:
        driver.run(job, DaskPlace(client, cluster), data, [faults])


def _job(name: str, epochs: int, data: str, place: Path, step_seconds: float) -> Job:
    if name == "recipe":
        program = recipe_program(NAME, resolve(Counting.defaults, {"epochs": epochs}))
    else:
        call = cloudpickle.dumps(
            functools.partial(_train_and_keep, name, data, str(place), epochs, step_seconds)
        )
        # Forked from a process that has torch, as a recipe's ranks: most of an attempt would be
        # imports.
        program = Program(name, call, ("benchmarks",), slow_imports=("torch",))
    return Job(program, str(place), time.time())


def _train_and_keep(program: str, data: str, place: str, epochs: int, step_seconds: float) -> bytes:
    """Train as a rank, in a loop that does not ask whether it has to stop, and keep the model as a
    recipe does.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from flyte_ddp import session

    dist.init_process_group("gloo")
    os.environ[STEP_SECONDS_VARIABLE] = str(step_seconds)
    recipe = Counting()
    is_stream = program == "shards"
    dataset = open_shards(data, f"{place}/cache") if is_stream else recipe.datasets(Path(data))[0]
    torch.manual_seed(0)
    model = recipe.model()
    wrapped, optimizer = (
        DistributedDataParallel(model),
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
    )
    state = session.load() or {"step": 0, "model": model.state_dict()}
    model.load_state_dict(state["model"])
    step = state["step"]
    for epoch in session.epochs(epochs):
        for (inputs, targets), weight in session.batches(dataset, BATCH_SIZE, epoch):
            optimizer.zero_grad()
            (weight * recipe.losses(wrapped(inputs), targets).mean()).backward()
            optimizer.step()
            step += 1
            session.report(step=step)
            if step % SAVE_STEPS == 0:
                session.save({"model": model.state_dict(), "step": step}, step)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{place}/model_state.pt")
    return b""


def _report(arguments: argparse.Namespace, epochs: int, faults: Faults, directory: Path) -> int:
    """Print the result. Return 0 if every sample was seen once an epoch and the weights are right,
    else 1.
    """
    import torch

    states = [
        torch.load(directory / place / "model_state.pt", weights_only=True)
        for place in ("run", "undisturbed")
    ]
    lost, doubled = lost_and_doubled(states[0]["seen"], epochs)
    difference = 0.0
    try:
        torch.testing.assert_close(states[0], states[1])
    except AssertionError:
        difference = max(
            float((states[0][name] - states[1][name]).abs().max()) for name in states[0]
        )
    spent = faults.state.time_spent()
    grown = sum(later > earlier for earlier, later in itertools.pairwise(faults.sizes))
    rows = {
        "program": arguments.program,
        "seed": str(arguments.seed),
        "faults": faults.describe(),
        "faults a minute": f"{sum(faults.done.values()) / (QUIET * arguments.minutes):.1f}",
        "attempts": f"{len(faults.sizes)}, of which {grown} larger than the one before",
        "ranks": f"{min(faults.sizes)} to {max(faults.sizes)}",
        "samples lost": f"{lost} of {epochs * NUM_SAMPLES:,}",
        "samples trained twice": str(doubled),
        "weights": f"differ by {difference:.2g}" if difference else "those of an undisturbed run",
        "wall time": f"{spent.wall:.0f} s",
        "goodput": f"{100 * spent.goodput:.1f} %",
        **{name.replace("_", " "): f"{seconds:.1f} s" for name, seconds in spent.parts().items()},
    }
    print(
        "\n".join(
            ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
        )
    )
    return int(bool(lost or doubled or difference))


def lost_and_doubled(seen: Tensor, epochs: int) -> tuple[int, int]:
    """Return how many times a sample was left out of an epoch, and how many times it was trained
    once more.
    """
    counts = (seen / (LEARNING_RATE / BATCH_SIZE)).round().long()
    return int((epochs - counts).clamp(min=0).sum()), int((counts - epochs).clamp(min=0).sum())


@contextlib.contextmanager
def _nodes(directory: Path, count: int) -> Iterator[SoakNodes]:
    nodes = SoakNodes(
        directory,
        {**os.environ, STEP_SECONDS_VARIABLE: str(STEP_SECONDS), "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        nodes.close()


def _is_rank(process: Process) -> bool:
    import psutil

    # The process, or a process above it, has just ended.
    with contextlib.suppress(psutil.Error, AttributeError):
        server = process.parent()
        return "forkserver" in str(server.cmdline()) and "flyte_ddp.launch.agent.main" in str(
            server.parent().cmdline()
        )
    return False


if __name__ == "__main__":
    sys.exit(main())
