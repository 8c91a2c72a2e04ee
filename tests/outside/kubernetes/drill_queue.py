"""Ten runs of two to four nodes in a queue of Kueue with four slots. `make drills` runs it, with
`-s` for its table.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

from tests.outside.kubernetes.conftest import Namespace, eventually
from tests.outside.kubernetes.test_queues import (  # noqa: F401 - a fixture
    NUM_SLOTS,
    SLOT,
    URGENT,
    in_queue,
    queue,
)
from tests.outside.kubernetes.test_training import (  # noqa: F401 - a fixture
    CONFIGS,
    WITHOUT_DROPOUT,
    Driver,
    start,
)
from tests.outside.kubernetes.timeline import PodLife, Timeline, longest_partial

# num_nodes, min_nodes, and whether the run evicts others
RUNS = [
    (4, 2, False),
    (2, 2, True),
    (3, 3, False),
    (2, 2, False),
    (4, 3, False),
    (2, 2, True),
    (3, 2, False),
    (4, 4, False),
    (4, 2, False),
    (3, 3, True),
]
EPOCHS = 1
MAX_AT_ONCE = 3  # runs that have not ended: two cores lead no more of them
MAX_PARTIAL = 3.0  # seconds; Kueue takes the gates off one pod after the other
MAX_RETURN = 10.0  # seconds from an eviction to the end of the pod


@pytest.mark.timeout(1800)
def test_ten_gangs_share_four_slots(
    queue: str,  # noqa: F811
    namespace: Namespace,
    start: Callable[..., Driver],  # noqa: F811
) -> None:
    timeline = Timeline(namespace.name, SLOT)
    drivers: list[Driver] = []
    began_at = time.time()
    for number, (num_nodes, min_nodes, is_urgent) in enumerate(RUNS):
        eventually(lambda: count_running(drivers) < MAX_AT_ONCE, 600, "the end of a run")
        name = f"run-{number}"
        CONFIGS[name] = {"epochs": EPOCHS, "global_batch_size": 12}
        labels = {}
        if is_urgent:
            labels = {"kueue.x-k8s.io/priority-class": URGENT}
            eventually(lambda: has_steps(drivers[-1]), 300, "a run whose slots are taken")
        elastic = {"num_nodes": num_nodes, "min_nodes": min_nodes, "grow_delay": 5}
        options = {**elastic, "grow_interval": 0, "alone_seconds": "0.4", "return_timeout": 400}
        drivers.append(
            start(name, name, recipe=WITHOUT_DROPOUT, **options, **in_queue(queue, **labels))
        )
    for driver in drivers:
        driver.succeeded()
    eventually(lambda: not namespace.clusters(), 180, "the end of all clusters")
    timeline.stop()
    print(f"\n{len(RUNS)} runs in {time.time() - began_at:.0f} s")
    print("| run | nodes | waited for admission | partial gang | slots back | sizes | steps |")
    print("|---|---|---|---|---|---|---|")
    for driver, (num_nodes, min_nodes, _) in zip(drivers, RUNS, strict=True):
        lives = [life for life in timeline.lives if f"-{driver.pod}-" in life.owner]
        gang = [life for life in lives if life.group]
        partial = longest_partial(gang, min_nodes + 1)
        returned = [life.gone_at - life.evicted_at for life in find_evicted(lives, driver)]
        waited = min(life.admitted_at for life in gang) - min(life.created_at for life in gang)
        steps = driver.steps(driver.pod)
        back = "-"
        if returned:
            back = f"{max(returned):.1f} s ({len(returned)})"
        print(
            f"| {driver.pod} | {min_nodes} to {num_nodes} | {waited:.0f} s | {partial:.1f} s | "
            f"{back} | {driver.world_sizes(driver.pod)} | {len(steps)} |"
        )
        assert steps == list(range(1, len(steps) + 1)), "a step was lost or done again"
        assert partial < MAX_PARTIAL
        assert max(returned, default=0.0) < MAX_RETURN
    assert most_slots(timeline.lives) <= NUM_SLOTS


def count_running(drivers: list[Driver]) -> int:
    return sum(each.namespace.phase(each.pod) in ("", "Pending", "Running") for each in drivers)


def has_steps(driver: Driver) -> bool:
    has_ended = driver.namespace.phase(driver.pod) in ("Succeeded", "Failed")
    return bool(driver.steps(driver.pod)) or has_ended


def find_evicted(lives: list[PodLife], driver: Driver) -> list[PodLife]:
    """Return the workers' pods that were placed, and were evicted before the run ended."""
    (ended,) = driver.records(run=driver.pod, ended="well")
    return [
        life
        for life in lives
        if life.slots and life.placed_at < math.inf and life.evicted_at < ended["at"]
    ]


def most_slots(lives: list[PodLife]) -> int:
    """Return the largest number of slots that were taken at a time."""
    changes = [(life.placed_at, life.slots) for life in lives if life.placed_at < math.inf]
    changes += [(life.gone_at, -life.slots) for life in lives if life.gone_at < math.inf]
    taken, most = 0, 0
    for _, change in sorted(changes):
        taken += change
        most = max(most, taken)
    return most
