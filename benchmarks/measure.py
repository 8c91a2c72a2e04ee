"""Run two commands in turn and compare the measurements that they print. Knows nothing of models or
data.

A machine's speed drifts from minute to minute, so only neighbouring runs are compared: each round
runs one command after the other and gives one ratio. The table has the median and the range of the
ratios of all rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from flyte_ddp.process.devices import cpu_model

TIMEOUT = 900.0  # seconds that one run of one command may take
OUTPUT_TAIL = 20  # lines of a failed command's output in the error

Outcome = Mapping[str, Any]
"""The measurements of one run, by quantity: some or all of `UNITS`."""

UNITS: dict[str, Callable[[float], str]] = {
    # over all ranks, in the last epoch
    "samples_per_second": lambda value: f"{value:,.0f} samples/s",
    # from the command's start to the first optimizer step's end
    "first_step_seconds": lambda value: f"{value:.1f} s",
}
"""Every quantity that can be measured, with its format."""


class MeasurementError(RuntimeError):
    """A command failed, timed out or printed no measurements."""


@dataclass(frozen=True)
class Variant:
    """One side of a comparison: a command that prints what `outcome_of` parses."""

    name: str
    command: tuple[str, ...]
    num_threads: int  # CPU threads of each of its processes


@dataclass(frozen=True)
class Row:
    """One line of the table: the ratio of `ours` to `theirs` in one quantity."""

    title: str
    quantity: str  # a key of `UNITS` and of both outcomes
    ours: Variant
    theirs: Variant
    goal: str


@dataclass
class Result:
    """The measurements for a row, or why there are none."""

    row: Row
    # (ours, theirs) of every round
    outcomes: Sequence[tuple[Outcome, Outcome]] = field(default_factory=list)
    note: str = ""
    num_failed: int = 0  # rounds in which a side failed; they are left out


def compare(
    rows: Sequence[Row], rounds: int, environment: Mapping[str, str], log: Callable[[str], None]
) -> list[Result]:
    """Measure `rows`. Rows that compare the same two variants share their runs."""
    measured: dict[tuple[Variant, Variant], tuple[list[tuple[Outcome, Outcome]], str, int]] = {}
    for pair in dict.fromkeys((row.ours, row.theirs) for row in rows):
        outcomes: list[tuple[Outcome, Outcome]] = []
        note, num_failed = "", 0
        for number in range(rounds):
            try:
                outcome = run(pair[0], environment), run(pair[1], environment)
            except MeasurementError as error:
                log(str(error))
                num_failed += 1
                if not outcomes:
                    note = "failed: " + str(error).splitlines()[0]
                    break  # a failure in the first round will most likely repeat
                continue
            outcomes.append(outcome)
            log(f"{pair[0].name} / {pair[1].name}, round {number + 1} of {rounds}: {outcomes[-1]}")
        measured[pair] = outcomes, note, num_failed
    return [Result(row, *measured[row.ours, row.theirs]) for row in rows]


def show_rows(table: str, num_shown: int) -> int:
    """Print the lines of `table` after the first `num_shown`; return how many it has. An
    interrupted run shows some.
    """
    lines = table.splitlines()
    for line in lines[num_shown:]:
        print(line, flush=True)
    return len(lines)


def run(variant: Variant, environment: Mapping[str, str]) -> Outcome:
    """Run `variant` once to its end.

    Raises:
        MeasurementError: it failed, took longer than `TIMEOUT` or printed no outcome.
    """
    threads = {"OMP_NUM_THREADS": str(variant.num_threads)}
    started = time.time()
    process = subprocess.Popen(
        variant.command,
        env={**os.environ, **environment, **threads},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"{variant.name} took more than {TIMEOUT:.0f} s") from None
    finally:
        _end(process)
    if process.returncode != 0:
        raise MeasurementError(
            f"{variant.name} ended with exit code {process.returncode}\n{_tail(output)}"
        )
    return outcome_of(output, started)


def outcome_of(output: str, started: float) -> Outcome:
    """Parse the last outcome in the output of a command.

    The outcome is a JSON object at the end of a line. Its first key is `first_step_at`: the end of
    the first optimizer step in seconds since the epoch. The result counts from `started`.

    Raises:
        MeasurementError: there is none.
    """
    for line in reversed(output.splitlines()):
        # A rank's line arrives with the rank's name before it.
        with contextlib.suppress(ValueError):
            values = json.loads(line[line.index('{"first_step_at"') :])
            return {"first_step_seconds": values.pop("first_step_at") - started, **values}
    raise MeasurementError(f"the command printed no outcome\n{_tail(output)}")


def ratios(result: Result) -> list[float]:
    """Return ours divided by theirs, per round."""
    quantity = result.row.quantity
    return [ours[quantity] / theirs[quantity] for ours, theirs in result.outcomes]


def table(results: Sequence[Result]) -> str:
    """Format the results as a Markdown table."""
    lines = [
        "| ours / theirs | goal | ratio: median (range) | ours | theirs |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        row = result.row
        cells = [row.title, row.goal]
        if result.note:
            cells += [result.note, "", ""]
        else:
            found = ratios(result)
            failed = f"; {result.num_failed} rounds failed" if result.num_failed else ""
            cells.append(
                f"**{statistics.median(found):.2f}** ({min(found):.2f} to {max(found):.2f}{failed})"
            )
            for sides in zip(*result.outcomes, strict=True):
                median = statistics.median(side[row.quantity] for side in sides)
                cells.append(UNITS[row.quantity](median))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine(num_cores: int) -> str:
    """Describe the machine in one line."""
    return (
        f"{num_cores} cores of {cpu_model() or platform.machine()}, {platform.system()}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-OUTPUT_TAIL:])


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate `process` if it still runs; kill its group only after 30 s, so that it can stop its
    children.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
