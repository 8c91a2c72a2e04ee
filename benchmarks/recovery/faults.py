"""The faults, and what each did to a run: seconds to the next step, steps done again, and the final
weights.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.recovery.systems import System
from benchmarks.recovery.workload import (
    CHECKPOINT_INTERVAL,
    Step,
    longest_pause,
    num_redone,
    read_steps,
)

FAULT_STEP = 2 * CHECKPOINT_INTERVAL + 7  # the first step after which a fault may come
FIRST_STEP_TIMEOUT = 180.0  # seconds from the start of a system
TIMEOUT = 900.0  # seconds from a fault to the end of the run
OUTAGE = 60.0  # seconds for which the store is away
ABSENCE = 2.0  # seconds until nodes that were evicted come back
# config of the runs that have no checkpoint when the fault comes
SELDOM = {"checkpoint_interval": 1000}


@dataclass(frozen=True)
class Outcome:
    """The effect of one fault on a run."""

    seconds: float | None  # time from the fault to the next step; None if there was none
    redone: int  # steps
    # whether the weights equal an undisturbed run's; None if there were no weights
    weights_equal: bool | None
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """When a fault came, and until when its consequences count."""

    begin: float  # seconds since the epoch
    end: float = float("inf")
    # the first step of this many ranks counts; 0: the step after the longest pause
    world_size: int = 0
    # when no rank was left, in seconds since the epoch: the first step after that counts; 0: never
    ended: float = 0.0
    ranks_die: bool = True  # False: the run may go on as if nothing had happened


def kill_rank(system: System, store: Store) -> list[Moment]:
    """Kill the second rank."""
    system.rank_process(1).kill()
    return [Moment(time.time())]


def stop_rank(system: System, store: Store) -> list[Moment]:
    """Stop the second rank, which then hangs."""
    system.rank_process(1).send_signal(signal.SIGSTOP)
    return [Moment(time.time())]


def lose_node(system: System, store: Store) -> list[Moment]:
    """Kill the second rank's node; another one comes when the run has gone on without it."""
    lost_at = time.time()
    system.kill_node(system.node_of(system.rank_process(1)))
    wait_until(
        system, lambda: any(step.world_size == 1 for step in read_steps(system.task.directory))
    )
    time.sleep(ABSENCE)
    back_at = time.time()
    system.add_node()
    return [Moment(lost_at, back_at), Moment(back_at, world_size=2)]


def drain_node(system: System, store: Store) -> list[Moment]:
    """Tell the second rank's node to go; another one comes when the run has gone on without it."""
    told_at = time.time()
    system.drain_node(system.node_of(system.rank_process(1)))
    wait_until(
        system, lambda: any(step.world_size == 1 for step in read_steps(system.task.directory))
    )
    time.sleep(ABSENCE)
    back_at = time.time()
    system.add_node()
    return [Moment(told_at, back_at, ranks_die=False)]


def drain_all(system: System, store: Store) -> list[Moment]:
    """Tell each node to go, the second one when another has come in place of the first."""
    begin = time.time()
    for node in list(system.nodes):
        told_at = time.time()
        system.drain_node(node)
        system.add_node()
        wait_until(system, functools.partial(_is_whole, system, told_at + ABSENCE), OUTAGE)
    return [Moment(begin, ranks_die=False)]


def _is_whole(system: System, since: float) -> bool:
    return any(
        step.world_size == 2 and step.at > since for step in read_steps(system.task.directory)
    )


def silence_node(system: System, store: Store) -> list[Moment]:
    """Stop every process of the second rank's node, as if the network of its machine were cut."""
    node = system.node_of(system.rank_process(1))
    system.stop_node(node)
    return [Moment(time.time())]


def lose_store(system: System, store: Store) -> list[Moment]:
    """Stop the server of the object store for a minute."""
    begin = time.time()
    store.stop()
    wait_until(system, lambda: time.time() > begin + OUTAGE)
    store.start()
    return [Moment(begin, ranks_die=False)]


def damage_checkpoint(system: System, store: Store) -> list[Moment]:
    """Kill the second rank, and overwrite a part of the newest checkpoint."""
    begin = time.time()
    system.rank_process(1).kill()
    newest = max(system.task.directory.rglob("*.pt"), key=lambda file: file.stat().st_mtime)
    damage(newest)
    return [Moment(begin)]


def evict_all(system: System, store: Store) -> list[Moment]:
    """Kill every node; two others come a little later."""
    begin = time.time()
    for node in list(system.nodes):
        system.kill_node(node)
    ended = time.time()
    time.sleep(ABSENCE)
    system.add_node()
    system.add_node()
    return [Moment(begin, ended=ended)]


@dataclass(frozen=True)
class Fault:
    """A fault: how it is made, and how many epochs its run needs."""

    titles: tuple[str, ...]  # titles of the table's lines
    make: Callable[[System, Store], list[Moment]]
    epochs: int = 3
    needs_store: bool = False
    on_one_node: bool = False  # places the ranks together, without a cluster
    # additional config of our run; if given, only our system is measured
    config: Mapping[str, Any] = field(default_factory=dict)


FAULTS = {
    "kill": Fault(("rank killed",), kill_rank),
    "kill-on-one-node": Fault(("one node, rank killed",), kill_rank, on_one_node=True),
    "stop": Fault(("rank stopped",), stop_rank),
    "node": Fault(("node lost", "node back"), lose_node, epochs=12),
    "drain": Fault(("node drained",), drain_node, epochs=12),
    "drain-all": Fault(("all nodes drained, one after the other",), drain_all, epochs=18),
    "silent": Fault(("node silent",), silence_node),
    "store": Fault((f"store away for {OUTAGE:.0f} s",), lose_store, epochs=36, needs_store=True),
    "damage": Fault(("rank killed, newest checkpoint damaged",), damage_checkpoint),
    "evict": Fault(("all nodes evicted",), evict_all),
    "kill-seldom": Fault(
        ("rank killed, a checkpoint every 1,000 steps",), kill_rank, config=SELDOM
    ),
    "kill-seldom-on-one-node": Fault(
        ("one node, rank killed, a checkpoint every 1,000 steps",),
        kill_rank,
        on_one_node=True,
        config=SELDOM,
    ),
    "node-fsdp": Fault(
        ("node lost, fsdp, a state in memory every 10 steps", "node back, fsdp"),
        lose_node,
        epochs=12,
        config={**SELDOM, "parallel": "fsdp", "memory_interval": 10},
    ),
}


class Store:
    """An object store on this machine that can be stopped and keeps what it has."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def damage(file: Path) -> None:
    """Overwrite the middle third of `file` with zeros, and keep its size."""
    size = file.stat().st_size
    with open(file, "r+b") as contents:
        contents.seek(size // 3)
        contents.write(bytes(size // 3))
        os.fsync(contents.fileno())


def wait_until(system: System, condition: Callable[[], bool], seconds: float = TIMEOUT) -> bool:
    """Wait until `condition`, the end of the run or the end of the time; return True for the
    first.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if system.exit_code() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def seconds_to_next_step(steps: Sequence[Step], moment: Moment) -> float | None:
    """Return the seconds from a fault to the step that shows the recovery; None if there was
    none.
    """
    if not moment.world_size and not moment.ended:
        return longest_pause(steps, moment.begin, moment.end, moment.ranks_die)
    since = max(moment.begin, moment.ended)
    after = [
        step.at for step in steps if step.at > since and moment.world_size in (0, step.world_size)
    ]
    return min(after) - moment.begin if after else None


def measure(system: System, fault: Fault, store: Store) -> list[tuple[float | None, int]]:
    """Make the fault in a run that has just been started, and wait for its end.

    Returns:
        For each of the titles the seconds to the next step and the steps that were done again; none
        if the run did not come to the fault.
    """
    directory = system.task.directory

    def has_come_to(number: int) -> bool:
        steps = read_steps(directory)
        return bool(steps) and steps[-1].number >= number

    if not wait_until(system, lambda: has_come_to(FAULT_STEP), FIRST_STEP_TIMEOUT):
        return []
    moments = fault.make(system, store)
    wait_until(system, lambda: False)
    steps = read_steps(directory)
    return [
        (seconds_to_next_step(steps, moment), num_redone(steps, moment.begin, moment.end))
        for moment in moments
    ]
