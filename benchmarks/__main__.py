"""Measure this package against its alternatives and print the table: `python -m benchmarks`, or
`--only start`.

GPUs are hidden from both sides: the table is for CPUs. Nothing else should run at the same time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Row, Variant, compare, machine, show_rows, table
from benchmarks.mnist_like import MnistLike
from benchmarks.variants import BATCH_SIZE, PREPARED
from flyte_ddp.process.devices import num_cores
from flyte_ddp.recipes.prepare import prepare_data

ROOT = Path(__file__).parents[1]
NUM_BATCHES, NUM_BATCHES_QUICK = 100, 10  # per epoch
BUSY_LOAD = 0.5  # load average above which the machine is not idle


def rows(data: Path) -> dict[str, list[Row]]:
    """Return all rows of the table by the names that `--only` takes. Add further comparisons
    here.
    """

    def variant(name: str, *launcher: str) -> Variant:
        options = ("-m", "benchmarks.variants", name, "--data", str(data), "--ranks", "2")
        return Variant(f"{name} x2", (sys.executable, *launcher, *options), num_threads(2))

    ours = variant("ours")
    torchrun = variant(
        "torchrun", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    )
    speed, start = "samples_per_second", "first_step_seconds"
    return {
        "torchrun": [
            Row("throughput / torchrun DDP, 2 ranks, fp32", speed, ours, torchrun, ">= 1.0"),
        ],
        "start": [
            Row("command to first step / torchrun DDP, 2 ranks", start, ours, torchrun, "0.5"),
            Row(
                "`pyflyte run` to first step / torchrun DDP, 2 ranks",
                start,
                _pyflyte(data / "outputs"),
                torchrun,
                "",
            ),
            Row(
                "`flyte-ddp train` to first step / torchrun DDP, 2 ranks",
                start,
                _train(data / "runs"),
                torchrun,
                "0.35",
            ),
        ],
    }


def num_threads(num_ranks: int) -> int:
    """Return the CPU threads of each of `num_ranks` ranks, as this package sets them."""
    return max(1, num_cores() // num_ranks)


def _pyflyte(output: Path) -> Variant:
    """Return the whole command that users type; it includes flytekit's start and the preparation of
    the data. Without IPython, which flytekit imports where it is installed, as beside the tests.
    """
    command = (
        "import sys; sys.modules['IPython'] = None; "
        "from flytekit.clis.sdk_in_container.pyflyte import main; main()"
    )
    return Variant(
        "pyflyte run",
        (
            sys.executable,
            "-c",
            command,
            "run",
            str(ROOT / "workflows" / "single_node.py"),
            "single_node_training_wf",
            "--recipe",
            "benchmarks.mnist_like.TimestampedMnistLike",
            "--num_processes",
            "2",
            "--config",
            f'{{"epochs": 1, "global_batch_size": {BATCH_SIZE}}}',
            "--output",
            str(output),
        ),
        num_threads(2),
    )


def _train(directory: Path) -> Variant:
    """Return the command for a laptop, as `_pyflyte`."""
    recipe = "benchmarks.mnist_like.TimestampedMnistLike"
    script = (
        f"cd {ROOT}; exec {sys.executable} -m flyte_ddp train {recipe} --nproc-per-node 2 "
        f"--epochs 1 --global-batch-size {BATCH_SIZE} --checkpoints {directory}/$$"
    )
    return Variant("flyte-ddp train", ("sh", "-c", script), num_threads(2))


def main() -> int:
    comparisons = list(rows(Path()))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of each side of each pair (%(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=comparisons,
        default=comparisons,
        metavar="NAME",
        help=", ".join(comparisons),
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round, to check that everything runs"
    )
    arguments = parser.parse_args()
    num_samples = BATCH_SIZE * (NUM_BATCHES_QUICK if arguments.quick else NUM_BATCHES)
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        _log(
            f"the load average is {load:.1f}: something else runs on this machine and will "
            "distort the ratios"
        )
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as directory:
        data = Path(directory)
        (data / PREPARED).mkdir()
        prepare_data(MnistLike(), str(num_samples), data / PREPARED)
        chosen = [
            row for name, group in rows(data).items() if name in arguments.only for row in group
        ]
        environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        rounds, results, num_shown = 1 if arguments.quick else arguments.rounds, [], 0
        for pair in dict.fromkeys((row.ours, row.theirs) for row in chosen):
            group = [row for row in chosen if (row.ours, row.theirs) == pair]
            results += compare(group, rounds, environment, _log)
            num_shown = show_rows(table(results), num_shown)
    print(f"\n{machine(num_cores())}")
    return 1 if any(result.note.startswith("failed") for result in results) else 0


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


sys.exit(main())
