"""Make the same faults under this package and torchrun elastic: `python -m benchmarks.recovery`.

Both train the same model with the same data, batches and checkpoint interval on two nodes of this
machine, which are groups of processes. For each fault: the seconds to the next step, the steps that
were done again, and whether the final weights equal an undisturbed run's. The outputs of runs that
failed are printed on standard error.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, show_rows
from benchmarks.recovery.faults import FAULTS, Fault, Outcome, Store, measure
from benchmarks.recovery.script import MODEL_STATE
from benchmarks.recovery.systems import ROOT, SYSTEMS, Ours, System, Task, free_port, running
from benchmarks.recovery.workload import MAX_RESTARTS, RECIPE, LoggedCounting
from flyte_ddp.config import resolve
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.process.devices import num_cores
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage import open_filesystem, read_file

BUCKET = "s3://recovery"
OUTPUT_TAIL = 15  # lines of a failed run's output


class Suite:
    """The runs of the chosen systems and faults, below one directory."""

    def __init__(self, directory: Path, store: Store) -> None:
        self.directory = directory
        self.store = store
        self.data = directory / "data"
        self.data.mkdir()
        prepare_data(LoggedCounting(), "", self.data)
        self._undisturbed: dict[tuple[bool, int, str], dict[str, Any]] = {}

    def try_run(self, kind: type[System], name: str, fault: Fault) -> dict[str, Outcome]:
        """Return the outcomes as `run` does, or that this could not measure them: the other faults
        are still made.
        """
        try:
            return self.run(kind, name, fault)
        except Exception as error:
            log(traceback.format_exc())
            return {
                title: Outcome(None, 0, None, f"not measured: {type(error).__name__}")
                for title in fault.titles
            }

    def run(self, kind: type[System], name: str, fault: Fault) -> dict[str, Outcome]:
        """Return the outcomes of a fault for a system, by the fault's titles."""
        if fault.needs_store and not kind.has_store:
            return {title: Outcome(None, 0, None, "- (it has no store)") for title in fault.titles}
        if fault.config and kind is not Ours:
            return {title: Outcome(None, 0, None, "- (its own settings)") for title in fault.titles}
        directory = self.directory / f"{kind.__name__}-{name}"
        directory.mkdir()
        # no run finds another one's checkpoints
        url = f"{BUCKET}/{directory.name}" if fault.needs_store else ""
        with running(
            kind, Task(self.data, directory, fault.epochs, url, fault.config), fault.on_one_node
        ) as system:
            results = measure(system, fault, self.store)
            code = system.exit_code()
            equal = self._weights_are_right(system) if code == 0 else None
        if code != 0:
            tail = (
                (directory / "output.log").read_text(errors="replace").splitlines()[-OUTPUT_TAIL:]
            )
            log(
                "\n".join(
                    [
                        f"{kind.name}, {name}: "
                        + ("no end" if code is None else f"exit code {code}"),
                        *tail,
                    ]
                )
            )
        if not results:
            return {title: Outcome(None, 0, None, "it did not start") for title in fault.titles}
        return {
            title: Outcome(*result, equal)
            for title, result in zip(fault.titles, results, strict=True)
        }

    def _weights_are_right(self, system: System) -> bool:
        import torch

        from flyte_ddp.storage.state_dict_file import from_bytes

        def load_state(url: str) -> dict[str, Any]:
            return from_bytes(read_file(url))

        is_ours, task = isinstance(system, Ours), system.task
        key = (is_ours, task.epochs, str(task.config))
        if key not in self._undisturbed:
            self._undisturbed[key] = load_state(self._train_undisturbed(is_ours, task))
        try:
            torch.testing.assert_close(
                dict(load_state(system.weights_url())), dict(self._undisturbed[key])
            )
        except AssertionError:
            return False
        return True

    def _train_undisturbed(self, is_ours: bool, task: Task) -> str:
        """Train with two ranks, without a fault and without waiting in steps; return the URL of the
        weights.
        """
        directory = self.directory / f"undisturbed-{len(self._undisturbed)}"
        directory.mkdir()
        if is_ours:
            config = resolve(LoggedCounting.defaults, {"epochs": task.epochs, **task.config})
            job = Job(recipe_program(RECIPE, config), str(directory), time.time())
            driver.run(job, LocalPlace(2), lambda: str(self.data))
        else:
            # Now and then a thread of gloo aborts a rank that has ended well: benchmarks/README.md.
            launcher = (
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node=2",
                ),
                f"--max-restarts={MAX_RESTARTS}",
            )
            options = Task(self.data, directory, task.epochs).options()
            command = (*launcher, "-m", "benchmarks.recovery.script", *options)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            ended = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
            )
            if ended.returncode:
                log(ended.stderr)
                ended.check_returncode()
        return f"{directory}/{MODEL_STATE}"


def table(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """Format the outcomes, by system and title of the fault, as a Markdown table: one line for each
    fault.
    """
    lines = [f"| fault | {' | '.join(outcomes)} |", "|---" * (1 + len(outcomes)) + "|"]
    for title in dict.fromkeys(title for found in outcomes.values() for title in found):
        cells = [cell(found[title]) if title in found else "" for found in outcomes.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(outcome: Outcome) -> str:
    """Return one outcome in words: seconds, steps done again, and the weights."""
    if outcome.note:
        return outcome.note
    # The run left no weights: steps after the fault do not count.
    if outcome.weights_equal is None:
        return "**the run failed**"
    seconds = "no next step" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
    weights = "weights equal" if outcome.weights_equal else "**weights differ**"
    return f"{seconds}, {outcome.redone} step{'s' * (outcome.redone != 1)} again, {weights}"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=FAULTS, default=list(FAULTS), help="faults (all)"
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(all)"
    )
    arguments = parser.parse_args()
    # No process is left behind after SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [SYSTEMS[name] for name in arguments.systems]
    outcomes: dict[str, dict[str, Outcome]] = {kind.name: {} for kind in chosen}
    # The server would log a line for each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = Store(free_port())
    os.environ.update(store.environment())
    open_filesystem(BUCKET)[0].mkdir(BUCKET.removeprefix("s3://"))
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        suite = Suite(Path(directory), store)
        num_shown = show_rows(table(outcomes), 0)
        for name in arguments.only:
            for kind in chosen:
                outcomes[kind.name] |= suite.try_run(kind, name, FAULTS[name])
            num_shown = show_rows(table(outcomes), num_shown)
    store.stop()
    print(f"\n{machine(num_cores())}")
    ours = outcomes.get(Ours.name, {})
    return int(
        any(outcome.seconds is None or not outcome.weights_equal for outcome in ours.values())
    )


if __name__ == "__main__":
    sys.exit(main())
