"""The kinds of faults: how each is injected, and what the product should say and do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import s3fs

from benchmarks import node_check
from benchmarks.causes.nodes import CGROUPS, Cluster, Store, with_delay, with_lost_packets
from benchmarks.causes.program import LEAK_BYTES
from benchmarks.counting import NUM_SAMPLES
from benchmarks.node_check import call

RESTART, LEAVE, SKIP, STOP, GO_ON = "restart", "leave the node out", "skip", "stop", "go on"
CONFIG = {"epochs": 4, "store_timeout": 30.0, "stall_timeout": 30.0, "log_interval": 2}
OUTAGE = 4.0  # seconds
LONG_OUTAGE = 13.0  # seconds; clients repeat requests, and remember names, for some ten
CLOCK = Path(__file__).with_name("clock.c")
LONG = {"epochs": 10}
NOTHING = "nothing"  # a kind of its own, which is not among the faults
MAX_LOAD = 16  # busy processes beside it
SLOW_NODES = 3  # nodes of a run whose nodes are compared: two have no median


@dataclass
class Bench:
    """The nodes, the store and the files into which faults are injected."""

    directory: Path
    cluster: Cluster
    store: Store
    events: list[dict[str, Any]] = field(default_factory=list)  # events of the present run

    @property
    def orders(self) -> Path:
        return self.directory / "orders"

    @property
    def small(self) -> Path:
        """A small disk that all nodes see."""
        return self.directory / "small"

    def order(self, **order: Any) -> None:
        """Let a rank carry out a fault. The file appears whole."""
        draft = self.directory / "draft"
        draft.write_text(json.dumps(order))
        draft.rename(self.orders)

    def wait_for(self, kind: str, seconds: float = 60.0) -> None:
        """Wait for an event of the run."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(each.get("event") == kind or kind in each for each in self.events):
                return
            time.sleep(0.05)


@dataclass
class Fault:
    """A fault, and the truth about it."""

    kind: str
    cause: str  # name in `verdicts.CAUSES`; "" if nothing is wrong for the run
    node: int  # -1: of no single node
    action: str
    inject: Callable[[Bench], None] = lambda bench: None  # called at a step
    around: Callable[[Bench], contextlib.AbstractContextManager[Any]] = lambda bench: (
        contextlib.nullcontext()
    )
    sample: str = ""  # a text that the cause has to contain
    step: int = 10
    num_nodes: int = 2
    program: str = "recipe"
    place: str = ""  # directory of the checkpoints; "": in the store
    config: dict[str, Any] = field(default_factory=dict)

    def truth(self) -> dict[str, Any]:
        names = ("kind", "cause", "node", "action", "sample", "step")
        return {name: getattr(self, name) for name in names}


def nothing(draw: random.Random, node: int) -> Fault:
    """No fault, beside busy processes: whatever is named is a false alarm."""
    load = draw.randint(0, MAX_LOAD)
    num_nodes = draw.choice([2, SLOW_NODES])
    return Fault(
        NOTHING,
        "",
        -1,
        GO_ON,
        around=lambda bench: node_check.load(load),
        step=-1,
        num_nodes=num_nodes,
    )


def kill(draw: random.Random, node: int) -> Fault:
    def inject(bench: Bench) -> None:
        bench.cluster.ranks(node)[0].kill()

    return Fault("kill", "killed", node, RESTART, inject)


def fill_memory(kind: str, draw: random.Random, node: int, order: str, spare: int) -> Fault:
    group = CGROUPS / "memory" / f"nc-{node}"

    def inject(bench: Bench) -> None:
        used = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(used + spare))
        bench.order(kind=order, node=node)
        bench.wait_for("AttemptEnded")
        bench.orders.unlink(missing_ok=True)
        (group / "memory.limit_in_bytes").write_text("-1")

    return Fault(kind, "out of memory", node, RESTART, inject)


def memory(draw: random.Random, node: int) -> Fault:
    return fill_memory("out of memory", draw, node, "allocate", 512 << 20)


def leak(draw: random.Random, node: int) -> Fault:
    return fill_memory("memory leak", draw, node, "leak", draw.randint(6, 14) * LEAK_BYTES)


def slow(kind: str, cause: str, node: int, around: Callable[[], Any]) -> Fault:
    return Fault(
        kind,
        cause,
        node,
        LEAVE,
        around=lambda bench: around(),
        num_nodes=SLOW_NODES,
        step=-1,
        config={"epochs": 8},
    )


def cores(draw: random.Random, node: int) -> Fault:
    return slow(
        "half of the CPUs", "slow cores", node, lambda: node_check.with_half_the_cores(node)
    )


def disk(draw: random.Random, node: int) -> Fault:
    return slow("slow disk", "slow disk", node, lambda: node_check.with_slow_disk(node))


def bandwidth(draw: random.Random, node: int) -> Fault:
    limit = draw.choice([node_check.with_slow_sending, node_check.with_slow_receiving])
    return slow("narrow bandwidth", "slow network", node, lambda: limit(node))


def loss(draw: random.Random, node: int) -> Fault:
    share = draw.choice([0.05, 0.1, 0.2])
    return slow("packets lost", "slow network", node, lambda: with_lost_packets(node, share))


def delay(draw: random.Random, node: int) -> Fault:
    seconds = draw.choice([0.02, 0.05, 0.1])
    return slow("delay", "slow network", node, lambda: with_delay(node, seconds))


def full_disk(draw: random.Random, node: int) -> Fault:
    @contextlib.contextmanager
    def around(bench: Bench) -> Iterator[None]:
        try:
            yield
        finally:
            for each in bench.small.iterdir():
                shutil.rmtree(each, ignore_errors=True)

    def inject(bench: Bench) -> None:
        others = bench.small / "others"
        others.mkdir()
        with contextlib.suppress(OSError), open(others / "file", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        time.sleep(OUTAGE)
        shutil.rmtree(others)

    return Fault("full disk", "full disk", -1, GO_ON, inject, around, place="small/run")


def refuse(kind: str, cause: str, answer: str, action: str, seconds: float) -> Fault:
    @contextlib.contextmanager
    def around(bench: Bench) -> Iterator[None]:
        try:
            yield
        finally:
            bench.store.answer = ""

    def inject(bench: Bench) -> None:
        bench.store.answer = answer
        time.sleep(seconds)
        if action == GO_ON:
            bench.store.answer = ""

    return Fault(kind, cause, -1, action, inject, around, config=LONG)


def unavailable(draw: random.Random, node: int) -> Fault:
    code = draw.choice(["SlowDown", "ServiceUnavailable", "InternalError"])
    return refuse("store answers 503", "store away", code, GO_ON, LONG_OUTAGE)


def expired(draw: random.Random, node: int) -> Fault:
    return refuse("store answers ExpiredToken", "credentials", "ExpiredToken", STOP, 0.0)


def names(draw: random.Random, node: int) -> Fault:
    @contextlib.contextmanager
    def around(bench: Bench) -> Iterator[None]:
        try:
            yield
        finally:
            bench.cluster.name_store(node)

    def inject(bench: Bench) -> None:
        bench.cluster.name_store(node, "")
        time.sleep(LONG_OUTAGE)
        bench.cluster.name_store(node)

    # with fsdp every node writes its part of a checkpoint
    return Fault(
        "DNS fails", "host name", node, GO_ON, inject, around, config={"parallel": "fsdp", **LONG}
    )


def clock(draw: random.Random, node: int) -> Fault:
    step = draw.choice([2 * 3600, -45 * 60, 400 * 86_400])  # seconds

    def write(bench: Bench, offset: int) -> None:
        (bench.directory / "clock").write_text(f"{offset}\n")

    @contextlib.contextmanager
    def around(bench: Bench) -> Iterator[None]:
        write(bench, 0)
        library = bench.directory / "clock.so"
        call(f"cc -O2 -shared -fPIC -o {library} {CLOCK} -ldl")
        bench.cluster.replace(
            node, LD_PRELOAD=str(library), CLOCK_OFFSET=str(bench.directory / "clock")
        )
        bench.cluster.wait()
        try:
            yield
        finally:
            bench.cluster.replace(node)
            bench.cluster.wait()

    return Fault("clock step", "", -1, GO_ON, lambda bench: write(bench, step), around)


def deadlock(draw: random.Random, node: int) -> Fault:
    return Fault(
        "deadlock in a loader",
        "stall",
        node,
        RESTART,
        lambda bench: bench.order(kind="deadlock", node=node),
        config={"data_workers": 1, "stall_timeout": 15.0, "epochs": 6},
    )


def collective(draw: random.Random, node: int) -> Fault:
    kind = ("wrong size", "wrong kind", "left out")[draw.randrange(3)]
    return Fault(
        "wrong collective",
        "wrong collective",
        node,
        STOP,
        lambda bench: bench.order(kind=kind, node=node),
        program="function",
        num_nodes=3,
        config={"stall_timeout": 6.0},
    )


def bad_sample(draw: random.Random, node: int) -> Fault:
    sample = draw.randrange(NUM_SAMPLES)

    @contextlib.contextmanager
    def around(bench: Bench) -> Iterator[None]:
        bench.order(kind="nan", sample=sample)
        try:
            yield
        finally:
            bench.orders.unlink(missing_ok=True)

    return Fault(
        "NaN sample",
        "bad loss",
        -1,
        SKIP,
        around=around,
        sample=str(sample),
        step=-1,
        config={"on_bad_step": "skip"},
    )


def flip(draw: random.Random, node: int) -> Fault:
    bit = draw.randint(23, 30)  # a bit of the exponent

    def inject(bench: Bench) -> None:
        bench.order(kind="flip", node=node, bit=bit)
        bench.wait_for("ended")
        bench.orders.unlink(missing_ok=True)

    return Fault(
        "flipped bit",
        "wrong gradient",
        node,
        LEAVE,
        inject,
        num_nodes=draw.choice([2, 3]),
        config={"verify_interval": 4, "epochs": 6},
    )


def shard(draw: random.Random, node: int) -> Fault:
    name = f"{12 * draw.randrange(NUM_SAMPLES // 12):04d}.jsonl"
    how = draw.choice(["cut", "overwritten"])

    @contextlib.contextmanager
    def around(bench: Bench) -> Iterator[None]:
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        whole = files.cat_file(f"faults/shards/{name}")
        damaged = whole[: len(whole) // 2]
        if how == "overwritten":
            damaged = os.urandom(len(whole))
        files.pipe_file(f"faults/shards/{name}", damaged)
        try:
            yield
        finally:
            files.pipe_file(f"faults/shards/{name}", whole)

    return Fault(
        "damaged shard",
        "damaged shard",
        -1,
        STOP,
        around=around,
        sample=name,
        step=-1,
        program="shards",
    )


KINDS: dict[str, Callable[[random.Random, int], Fault]] = {
    NOTHING: nothing,
    "kill": kill,
    "memory": memory,
    "cores": cores,
    "loss": loss,
    "delay": delay,
    "bandwidth": bandwidth,
    "disk": disk,
    "full": full_disk,
    "503": unavailable,
    "expired": expired,
    "dns": names,
    "clock": clock,
    "leak": leak,
    "deadlock": deadlock,
    "collective": collective,
    "nan": bad_sample,
    "flip": flip,
    "shard": shard,
}


def draw_faults(kinds: list[str], each: int, seed: int) -> list[Fault]:
    """Return the faults, in a random order."""
    draw, found = random.Random(seed), []
    for kind in kinds:
        for number in range(each):
            fault = KINDS[kind](draw, (number + draw.randrange(2)) % 2)
            step = fault.step
            if step > 0:
                step = draw.randint(8, 40)
            found.append(dataclasses.replace(fault, step=step))
    draw.shuffle(found)
    return found


def begin(fault: Fault, bench: Bench) -> threading.Thread:
    """Inject a fault, in a thread, once the run has reached its step."""

    def act() -> None:
        while not any(each.get("step", 0) >= fault.step for each in list(bench.events)):
            if any("ended" in each for each in list(bench.events)):
                return
            time.sleep(0.02)
        fault.inject(bench)

    thread = threading.Thread(target=act, daemon=True)
    if fault.step >= 0:
        thread.start()
    return thread
