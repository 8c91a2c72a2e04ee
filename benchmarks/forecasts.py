"""Compare the goodput that `flyte-ddp rehearse` forecasts with that of soaks: `python -m
benchmarks.forecasts [--seeds 1 2 3 4 5]`.

One rehearsal measures what a killed rank and a lost node cost the model of the soaks. Each soak
(benchmarks/soak.py) then has faults of its own. Of these, the forecast knows the numbers alone. The
gangs of the soaks are elastic. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks.counting import STEP_SECONDS_VARIABLE
from benchmarks.measure import machine
from benchmarks.soak import NAME, STEP_SECONDS
from flyte_ddp.process.devices import num_cores

REHEARSAL_MINUTES = 2.0


def rehearse() -> dict[str, Any]:
    """Return the forecast of a rehearsal. Its costs are those of an elastic gang."""
    command = [sys.executable, "-m", "flyte_ddp", "rehearse", "--json", "--elastic"]
    options = ["--per-hour", "kill=1,node=1", "--minutes", str(REHEARSAL_MINUTES)]
    done = subprocess.run(
        [*command, *options, NAME, "--epochs", "2"],
        env={**os.environ, STEP_SECONDS_VARIABLE: str(STEP_SECONDS), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)["forecast"]
    if found["problem"]:
        raise SystemExit(found["problem"])
    return found


def soak(seed: int, minutes: float, num_faults: int) -> tuple[dict[str, int], float]:
    """Return the number of faults of each kind, and the goodput."""
    options = ["--seed", str(seed), "--minutes", str(minutes), "--faults", str(num_faults)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    kinds = {"kill": "rank killed", "node": "node evicted"}
    counts = {
        kind: int(re.search(rf"(\d+) x {text}", done.stdout)[1])  # type: ignore[index]
        for kind, text in kinds.items()
    }
    goodput = re.search(r"\| goodput \| ([\d.]+) %", done.stdout)
    assert goodput is not None, done.stdout
    return counts, float(goodput[1]) / 100


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecasts", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--minutes", type=float, default=3.0, help="of stepping (%(default)s)")
    parser.add_argument("--faults", type=int, default=8, help="of each soak (%(default)s)")
    arguments = parser.parse_args()
    found = rehearse()
    each = {kind: sum(parts.values()) for kind, parts in found["costs"].items()}
    print(f"a rank killed {each['kill']:.1f} s, a node lost {each['node']:.1f} s, ", end="")
    print(f"the start {found['start_seconds']:.1f} s\n")
    print("| seed | ranks killed | nodes lost | forecast | goodput | difference, points |")
    print("|---|---|---|---|---|---|")
    errors = []
    for seed in arguments.seeds:
        counts, goodput = soak(seed, arguments.minutes, arguments.faults)
        lost = found["start_seconds"] + sum(counts[kind] * each[kind] for kind in each)
        stepping = 60 * arguments.minutes
        expected = stepping / (stepping + lost)
        errors.append(100 * abs(expected - goodput))
        print(
            f"| {seed} | {counts['kill']} | {counts['node']} | {expected:.1%} | {goodput:.1%} | "
            f"{100 * (expected - goodput):+.1f} |",
            flush=True,
        )
    print(f"\nmedian error: {median(errors):.1f} points\n\n{machine(num_cores())}")


if __name__ == "__main__":
    main()
