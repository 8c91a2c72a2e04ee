"""Measure what a profile of a running run costs it: `python -m benchmarks.profiles`.

Two nodes, which are workers of a local Dask cluster, train a small convolution with a rank each.
A run takes blocks of 200 steps, further steps until it may go on, and blocks of 200 steps more.
Meanwhile every second run has a profile of five steps of rank 1, and the others have none. So the
ranks of each run are new, and what a first profile leaves for good would show. The median block of
rank 1 after the profile is compared with the median block before it, by processor time. Rank 0
has no profile, and shows what else changed on the machine meanwhile: its ratio divides that of rank
1.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from flyte_ddp import run
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.launch.inside import ask
from flyte_ddp.launch.protocol.requests import PROFILE
from flyte_ddp.process.devices import num_cores

NUM_STEPS = 200  # steps of a block
NUM_BLOCKS = 5  # blocks before and after
NUM_PROFILED = 5
NUM_BETWEEN = 20  # steps between two looks for the permission to go on
LIMIT = 10.0  # seconds for a profile, besides its steps


def train(directory: str) -> dict[str, float]:
    """Take the steps in a rank. Return the ratio of the processor times of rank 1's blocks after
    and before, divided by that of rank 0, and the seconds of a step.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2704, 10)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    may_go_on = torch.zeros(1)

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    def measure() -> list[float]:
        used = []
        for _ in range(NUM_BLOCKS):
            started = time.process_time()
            for _ in range(NUM_STEPS):
                step()
            used.append(time.process_time() - started)
        return used

    measure()  # to warm up
    started = time.perf_counter()
    before = measure()
    seconds = (time.perf_counter() - started) / NUM_BLOCKS / NUM_STEPS
    Path(directory, "reached").touch()
    while not may_go_on.item():
        for _ in range(NUM_BETWEEN):
            step()
        may_go_on.fill_(Path(directory, "go-on").exists())
        dist.broadcast(may_go_on, 0)
    after = measure()
    ratios: list[Any] = [None, None]
    dist.all_gather_object(ratios, statistics.median(after) / statistics.median(before))
    return {"ratio": ratios[1] / ratios[0], "step": seconds}


def measure(client: Any, has_profile: bool) -> dict[str, float]:
    """Return what a run measured, and the seconds that the profile took its user."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as threads:
        place = f"{directory}/run"
        options: dict[str, Any] = {"nnodes": 2, "client": client, "checkpoints": place}
        training = threads.submit(run, train, directory, progress=False, **options)
        seconds = 0.0
        try:
            while not Path(directory, "reached").exists() and not training.done():
                time.sleep(0.05)
            if has_profile:
                started = time.perf_counter()
                ask(place, PROFILE, 1, NUM_PROFILED)
                seconds = time.perf_counter() - started
        finally:
            Path(directory, "go-on").touch()
        return {**training.result(), "profile": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=16, help="every second one has a profile")
    options = parser.parse_args()
    logging.getLogger("flyte_ddp").setLevel(logging.ERROR)
    print("| run | processor time of 200 steps, after / before, rank 1 / rank 0 | profile |")
    print("|---|---|---|")
    ratios: dict[bool, list[float]] = {False: [], True: []}
    steps, seconds = [], []
    with open_cluster(ClusterConfig(kind="local", num_nodes=2), "profiles") as client:
        for number in range(options.runs):
            has_profile = number % 2 == 1
            found = measure(client, has_profile)
            ratios[has_profile].append(found["ratio"])
            steps.append(found["step"])
            shown = "none"
            if has_profile:
                seconds.append(found["profile"])
                shown = f"{found['profile']:.1f} s"
            print(f"| {number} | {ratios[has_profile][-1]:.3f} | {shown} |", flush=True)
    for name, has_profile in (("without", False), ("with", True)):
        each = sorted(ratios[has_profile])
        spread = f"{statistics.median(each):.3f} ({each[0]:.3f} to {each[-1]:.3f})"
        print(f"| {name} a profile | {spread} | |")
    limit = LIMIT + NUM_PROFILED * statistics.median(steps)
    print(f"| at most {limit:.1f} s | | {min(seconds):.1f} to {max(seconds):.1f} s |")
    print(machine(num_cores()))


if __name__ == "__main__":
    main()
