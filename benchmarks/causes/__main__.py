"""Inject faults of 18 kinds, and compare what the product names and does with the truth:
`python -m benchmarks.causes [KIND ...] [--each 3]`.

The kind `nothing` is a run without a fault beside 0 to 16 busy processes. Nothing may be named in
it.

It runs as root on Linux with cgroups of version 1, `ip`, `tc`, `iptables`, `ethtool` and a
C compiler. Each node is a Dask worker with its own network, cgroups and host names. The store is
an S3 server. The truth is in this process alone; the product runs in others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import s3fs

from benchmarks.causes.faults import CONFIG, KINDS, NOTHING, Bench, Fault, begin, draw_faults
from benchmarks.causes.nodes import HOST, KEYS, NAME, Cluster, Store, made_networks
from benchmarks.causes.program import ORDERS
from benchmarks.causes.verdicts import Verdict, read
from benchmarks.counting import STEP_SECONDS_VARIABLE, Counting, write_shards
from benchmarks.node_check import call
from flyte_ddp.recipes.prepare import prepare_data

STEP_SECONDS = "0.05"
RUN_TIMEOUT = 180.0  # seconds; with a bad network a start takes half of them
SMALL_BYTES = 24 << 20  # size of the disk that fills up


class Driver:
    """The process of the driver."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.said: list[dict[str, Any]] = []
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.causes.driver", self.bench.cluster.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=open(self.bench.directory / "driver.log", "a"),  # noqa: SIM115 - it stays open
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.wait("ready")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def wait(self, what: str) -> bool:
        deadline = time.monotonic() + RUN_TIMEOUT
        while not any(what in each for each in list(self.said)):
            if time.monotonic() > deadline or self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def run(self, fault: Fault) -> list[dict[str, Any]]:
        """Train while the fault is injected, and return all that the product said."""
        self.said = self.bench.events = []
        place = f"s3://faults/{uuid.uuid4().hex}"
        if fault.place:
            place = f"{self.bench.directory}/{fault.place}"
        run = {
            "program": fault.program,
            "place": place,
            "num_nodes": fault.num_nodes,
            "config": {**CONFIG, **fault.config},
            "data": str(self.bench.directory / "data"),
        }
        assert self.process.stdin is not None
        with fault.around(self.bench):
            self.process.stdin.write(json.dumps(run) + "\n")
            self.process.stdin.flush()
            thread = begin(fault, self.bench)
            if not self.wait("ended"):
                self.said.append({"ended": ["Timeout", "the run did not end"]})
                self.close()
                self._start()
            if thread.is_alive():
                thread.join(10)
        return self.said

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def made_bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="causes-")))
        stack.enter_context(made_networks())
        store = Store()
        stack.callback(store.server.stop)
        os.environ.update(KEYS, AWS_ENDPOINT_URL=f"http://{HOST}:{store.port}")
        (directory / "data").mkdir()
        prepare_data(Counting(), "", directory / "data")
        files = s3fs.S3FileSystem()
        files.mkdir("faults")
        write_shards(directory / "data", "faults/shards")
        small = directory / "small"
        small.mkdir()
        call(f"mount -t tmpfs -o size={SMALL_BYTES} none {small}")
        stack.callback(call, f"umount -l {small}")
        environment = {
            STEP_SECONDS_VARIABLE: STEP_SECONDS,
            ORDERS: str(directory / "orders"),
            "AWS_ENDPOINT_URL": f"http://{NAME}:{store.port}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        cluster = Cluster(directory, environment)
        stack.callback(cluster.close)
        cluster.wait()
        yield Bench(directory, cluster, store)


def judge(fault: Fault, verdict: Verdict) -> tuple[bool, bool, bool]:
    """Return whether cause, node and action are right."""
    expected = [fault.cause] * bool(fault.cause)
    is_cause = verdict.causes == expected
    if fault.sample:
        is_cause &= any(fault.sample in each for each in verdict.statements)
    is_node = fault.node < 0 or verdict.nodes == [fault.node]
    return is_cause, is_node, verdict.action == fault.action


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.causes", description=__doc__)
    faults = [kind for kind in KINDS if kind != NOTHING]
    parser.add_argument("kinds", nargs="*", default=faults, help=", ".join(KINDS))
    parser.add_argument("--each", type=int, default=3, help="faults of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print what the product said")
    arguments = parser.parse_args()
    for unknown in {*arguments.kinds} - KINDS.keys():
        parser.error(f"kinds: expected some of {', '.join(KINDS)}, got {unknown}")
    right: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    print("| kind | node | step | named | nodes | action | right | seconds |\n|" + "---|" * 8)
    with made_bench() as bench:
        driver = Driver(bench)
        for fault in draw_faults(arguments.kinds, arguments.each, arguments.seed):
            begun = time.monotonic()
            verdict = read(driver.run(fault))
            answers = judge(fault, verdict)
            tried[fault.kind] += 1
            right[fault.kind] += all(answers)
            wrong = [
                what
                for what, is_right in zip(("cause", "node", "action"), answers, strict=True)
                if not is_right
            ]
            named = ", ".join(verdict.causes), ", ".join(map(str, verdict.nodes))
            print(
                f"| {fault.kind} | {fault.node} | {fault.step} | {named[0]} | {named[1]} | "
                f"{verdict.action} | {' and '.join(wrong) + ' wrong' if wrong else 'yes'} | "
                f"{time.monotonic() - begun:.0f} |",
                flush=True,
            )
            if arguments.verbose or wrong:
                for each in verdict.statements:
                    print("    " + each.replace("\n", "\n    ")[:600], file=sys.stderr, flush=True)
        driver.close()
    print("\n| kind | right |\n|---|---|")
    for kind, count in sorted(tried.items()):
        print(f"| {kind} | {right[kind]} of {count} |")
    print(f"| all | {right.total()} of {tried.total()} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
