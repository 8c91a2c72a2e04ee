"""Two fillers on two nodes, to which pods of a higher priority come. kube-scheduler evicts in the
first drill, Kueue in the second. `make drills` runs them, with `-s` for their tables.

FLYTE_DDP_DRILL_ARRIVALS and FLYTE_DDP_DRILL_SECONDS change the number of arrivals and the time from
one to the next.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.outside.kubernetes.conftest import (
    CONTAINER_SECURITY,
    IMAGE,
    POD_SECURITY,
    ROOT,
    Namespace,
    apply,
    eventually,
    kubectl,
)
from tests.outside.kubernetes.test_queues import (  # noqa: F401 - fixtures
    NUM_SLOTS,
    SLOT,
    give_slots,
    queue,
)
from tests.outside.kubernetes.test_training import (  # noqa: F401 - a fixture
    CONFIGS,
    WITHOUT_DROPOUT,
    Driver,
    start,
)
from tests.outside.kubernetes.timeline import (
    PodLife,
    Timeline,
    count_free,
    seconds_without_step,
)

NUM_ARRIVALS = int(os.environ.get("FLYTE_DDP_DRILL_ARRIVALS", "20"))
INTERVAL = float(os.environ.get("FLYTE_DDP_DRILL_SECONDS", "60"))
STAY = 20  # seconds for which an arrival keeps its node
FILLERS = ("filler-a", "filler-b")
SETTINGS = 'recipes = ["recipes"]\nfiller_priority_class = "filler"\n'
MAX_NOTICE = 10.0  # seconds from the first eviction to the placement of the arrival
MAX_FREE = 0.05  # share of the time that nodes may be free


@dataclass
class Drill:
    """One way to evict."""

    title: str
    namespace: Namespace
    slots_of_arrival: int  # a node has two
    cluster: dict[str, Any] = field(default_factory=dict)  # fields of the fillers' clusters
    labels: dict[str, str] = field(default_factory=dict)  # labels that the arrivals have

    def send(self, number: int) -> str:
        """Create the pod of an arrival, which has no priority class and so the priority 0."""
        name = f"arrival-{self.title}-{number}"
        amounts = {SLOT: str(self.slots_of_arrival), "cpu": "10m", "memory": "16Mi"}
        container = {
            **CONTAINER_SECURITY,
            "name": "arrival",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "args": ["sleep", str(STAY)],
            "resources": {"requests": amounts, "limits": {SLOT: amounts[SLOT]}},
        }
        metadata = {"name": name, "namespace": self.namespace.name, "labels": self.labels}
        spec = {**POD_SECURITY, "restartPolicy": "Never", "containers": [container]}
        apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return name


@pytest.fixture
def priority() -> Iterator[None]:
    """The PriorityClass of deploy/."""
    kubectl("apply", "-f", str(ROOT / "deploy/filler.yaml"))
    yield
    kubectl("delete", "-f", str(ROOT / "deploy/filler.yaml"))


@pytest.mark.timeout(3600)
def test_fillers_return_nodes_to_pods_that_kube_scheduler_places(
    priority: None,
    namespace: Namespace,
    start: Callable[..., Driver],  # noqa: F811
) -> None:
    give_slots()
    carry_out(Drill("kube-scheduler", namespace, slots_of_arrival=2), start)


@pytest.mark.timeout(3600)
def test_fillers_return_nodes_to_pods_that_kueue_admits(
    priority: None,
    queue: str,  # noqa: F811
    namespace: Namespace,
    start: Callable[..., Driver],  # noqa: F811
) -> None:
    label = {"kueue.x-k8s.io/queue-name": queue}
    drill = Drill("kueue", namespace, slots_of_arrival=1, cluster={"queue": queue}, labels=label)
    carry_out(drill, start)


def carry_out(drill: Drill, start: Callable[..., Driver]) -> None:  # noqa: F811
    """Run two fillers, let pods of a higher priority come, and print and check what it cost."""
    timeline = Timeline(drill.namespace.name, SLOT)
    fillers = [start_filler(drill, start, name) for name in FILLERS]
    eventually(lambda: is_full(timeline.lives), 300, "fillers on all nodes")
    for filler in fillers:
        run = run_of(filler)
        eventually(lambda f=filler, r=run: f.steps(r), 300, f"steps of {run}")
    begin = time.time()
    names = []
    for number in range(NUM_ARRIVALS):
        names.append(drill.send(number))
        time.sleep(max(0.0, begin + (number + 1) * INTERVAL - time.time()))
    end = time.time()
    for filler in fillers:
        step = filler.steps(run_of(filler))[-1]
        filler.wait_for_step(run_of(filler), step + 2)
    lives = timeline.lives
    timeline.stop()
    arrivals = {life.name: life for life in lives if life.name in names}
    waits = [time_of_wait(arrivals[name], lives) for name in names]
    free = count_free(lives, NUM_SLOTS, begin, end)
    print_table(drill, fillers, waits, free, begin, end)
    for filler in fillers:
        steps = filler.steps(run_of(filler))
        assert steps == list(range(1, len(steps) + 1)), "a step was lost or done again"
        drill.namespace.kubectl("delete", "pod", filler.pod, "--wait=false")
    # Kueue keeps the workloads of pods that have ended.
    drill.namespace.kubectl("delete", "pod", *names, "--wait=false")
    assert max(waits) < MAX_NOTICE
    assert free < MAX_FREE


def run_of(filler: Driver) -> str:
    return filler.pod


def start_filler(drill: Drill, start: Callable[..., Driver], name: str) -> Driver:  # noqa: F811
    """Start a filler that could use three of the four slots."""
    run = f"{name}-{drill.title}"
    CONFIGS[run] = {"epochs": 100_000, "global_batch_size": 12, "checkpoint_interval": 1000}
    slots = {SLOT: "1"}
    resources = {"requests": {"cpu": "300m", **slots}, "limits": {"cpu": "2", **slots}}
    container = {"name": "worker", "resources": resources}
    return start(
        run,
        run,
        recipe=WITHOUT_DROPOUT,
        alone_seconds="0.4",
        settings=SETTINGS,
        preset="filler",
        num_nodes=3,
        node_timeout=90,
        scheduler_cpus=0.2,
        pod_template={"containers": [container]},
        autoscaled_nodes=True,
        **drill.cluster,
    )


def is_full(lives: list[PodLife]) -> bool:
    placed = [each for each in lives if each.placed_at < math.inf and each.gone_at == math.inf]
    return sum(each.slots for each in placed) == NUM_SLOTS


def time_of_wait(arrival: PodLife, lives: list[PodLife]) -> float:
    """Return the seconds from the first eviction for an arrival until it was placed; 0 if it needed
    none.
    """
    evictions = [
        life.evicted_at
        for life in lives
        if life.slots and arrival.created_at - 1 <= life.evicted_at <= arrival.placed_at
    ]
    return arrival.placed_at - min(evictions, default=arrival.placed_at)


def print_table(
    drill: Drill,
    fillers: list[Driver],
    waits: list[float],
    free: float,
    begin: float,
    end: float,
) -> None:
    minutes = (end - begin) / 60
    print(f"\n{drill.title}: {len(waits)} arrivals in {minutes:.1f} minutes")
    print("| eviction notice to placement | slots without a pod | steps, seconds without a step |")
    print("|---|---|---|")
    parts = []
    for filler in fillers:
        reports = filler.records(run=run_of(filler), event="Reported")
        times = [each["at"] for each in reports if begin <= each["at"] <= end]
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        step_seconds = statistics.median(gaps)
        lost = seconds_without_step(times, step_seconds)
        sizes = filler.world_sizes(run_of(filler))
        parts.append(
            f"{filler.pod}: {len(times)} steps of {step_seconds:.2f} s, {lost:.0f} s without; "
            f"{len(sizes)} attempts of {min(sizes)} to {max(sizes)} nodes"
        )
    print(
        f"| median {statistics.median(waits):.1f} s, at most {max(waits):.1f} s | {free:.1%} | "
        f"{'; '.join(parts)} |"
    )
    print("waits:", ", ".join(f"{each:.1f}" for each in waits))
