"""Print the seconds until a mistake in a recipe or its config is seen: `python -m benchmarks.mistakes`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import machine
from flyte_ddp.launch.devices import num_cores

ROOT = Path(__file__).parents[1]
MODULE = "tests.support.mistakes"
# What was done wrong, the recipe and the config. The first run fills the file caches and is left out of the table.
MISTAKES: list[tuple[str, str, str]] = [
    ("", f"{MODULE}.Averaged", "{}"),
    ("`losses` returns a mean", f"{MODULE}.Averaged", "{}"),
    ("outputs (B, 1), targets (B,)", f"{MODULE}.Broadcast", "{}"),
    ("a segmentation with the default `losses`", f"{MODULE}.Segmentation", "{}"),
    ("a parameter without a gradient", f"{MODULE}.Unused", "{}"),
    ("`metrics` returns a text", f"{MODULE}.MetricsOfText", "{}"),
    ("one data set in place of two", f"{MODULE}.OneDataset", "{}"),
    ("dict samples without a target", f"{MODULE}.DictSamples", "{}"),
    ("`prepare` without `return`", f"{MODULE}.PrepareWithoutReturn", "{}"),
    ("a batch larger than the data", f"{MODULE}.Line", '{"global_batch_size": 64}'),
    ("`monitor` of an unknown metric", f"{MODULE}.Line", '{"monitor": {"metric": "mea"}}'),
    ("a misspelt field of the config", f"{MODULE}.Line", '{"learning_rat": 0.1}'),
    ("a misspelt class of recipe", f"{MODULE}.Lines", "{}"),
    ("a wrong import within a recipe's file", "wrong_import.Right", "{}"),
]


def measure(recipe: str, config: str, modules: str) -> tuple[float, str]:
    """Return the seconds from the command to the first line of its error, and that line.

    Args:
        modules: a directory with modules of recipes.

    Raises:
        RuntimeError: the command ended without an error's line.
    """
    command = [
        str(Path(sys.executable).with_name("pyflyte")),
        "run",
        "workflows/single_node.py",
        "single_node_training_wf",
    ]
    command += ["--recipe", recipe, "--num_processes", "2", "--config", config]
    start = time.perf_counter()
    environment = {**os.environ, "COLUMNS": "240", "PYTHONPATH": modules}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "│ " in line:  # the error, in its frame
                seconds = time.perf_counter() - start
                process.stdout.read()
                return seconds, line.strip(" │\n")
    raise RuntimeError("".join(lines))


def main() -> None:
    print("| mistake | seen after (s) |\n|---|---|")
    with tempfile.TemporaryDirectory() as modules:
        Path(modules, "wrong_import.py").write_text("from flyte_ddp import Recipes\n")
        for mistake, recipe, config in MISTAKES:
            seconds, line = measure(recipe, config, modules)
            if mistake:
                print(f"| {mistake} | {seconds:.1f} |", flush=True)
                print(line, file=sys.stderr, flush=True)
    print(f"\n{machine(num_cores())}")


if __name__ == "__main__":
    main()
