"""Compare the estimate of a rank's memory with what its process takes on CPUs: `python -m benchmarks.memory digits`.

Each recipe is trained on two ranks for some steps, with `ddp` and with `fsdp`. The process of a rank is compared whole:
Python, torch and the data, as `flyte-ddp estimate` has them for CPUs, and all kinds of the estimate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flyte_ddp.launch import driver
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.programs import Job, recipe_program
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data

NUM_RANKS = 2
# 100 million parameters in a Transformer of GPT-2's width, on as much text as a few steps need.
LARGE_TEXT = {"layers": 14, "width": 768, "heads": 12, "context": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("digits", {"epochs": 2}),
    "names": ("pet_names", {"epochs": 1, "sample_size": 1_000}),
    "images": ("image_folder", {"epochs": 1, "data_workers": 0}),
    # It draws a text at its end, for minutes on a busy machine. Two steps come after the first copy for a checkpoint.
    "text": (
        "text",
        {"epochs": 1, "sample_size": 40, "global_batch_size": 8, "checkpoint_interval": 3}
        | {"stall_timeout": 1800, "recipe_options": LARGE_TEXT},
    ),
}


def measure(case: str, parallel: str) -> tuple[float, float]:
    """Return the estimated and the measured peak of a rank's process, in bytes.

    In a process of its own, because all ranks of one are forked from a server that has imported what the first needed.
    """
    arguments = [sys.executable, "-m", "benchmarks.memory", case, "--parallel", parallel]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    estimated, measured = json.loads(done.stdout.splitlines()[-1])
    return estimated, measured


def _measure_here(case: str, parallel: str) -> tuple[float, float]:
    from flyte_ddp.rank.estimate import estimate_prepared, measure_process

    name, overrides = CASES[case]
    overrides = {"evaluation_batch_size": 16 if case == "text" else 64, **overrides, "parallel": parallel}
    config = config_of(name, overrides)
    recipe = get_recipe(name, config.recipe_options)
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        data.mkdir()
        prepare_data(recipe, "", data)
        made, process_bytes = estimate_prepared(recipe, config, data), measure_process(name, config, data)
        job = Job(recipe_program(name, config), f"{directory}/checkpoints", time.time())
        finished = driver.run(job, LocalPlace(NUM_RANKS), lambda: str(data)).finished
    memory = made.memory(parallel, NUM_RANKS, config.global_batch_size // NUM_RANKS)
    assert finished is not None  # else it raises
    return process_bytes + memory.device + memory.checkpoint_copy, max(finished.rank_peak_memory_bytes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), help="print the bytes of one case (default: a table)")
    options = parser.parse_args()
    if options.parallel:
        print(json.dumps(_measure_here(options.cases[0], options.parallel)))
        return
    print("| recipe | parallel | estimate | measured | estimate / measured |\n|---|---|---|---|---|")
    for case in options.cases or CASES:
        for parallel in ("ddp", "fsdp"):
            estimated, measured = measure(case, parallel)
            sizes = " | ".join(f"{each / 2**20:,.0f} MiB" for each in (estimated, measured))
            print(f"| {case} | {parallel} | {sizes} | {estimated / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main()
