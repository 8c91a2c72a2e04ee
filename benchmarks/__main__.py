"""Measure this package against its alternatives and print the table: `python -m benchmarks`, or `--only start`.

GPUs are hidden from both sides: the table is for CPUs. Nothing else should run at the same time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.images import LATENCY, NUM_WORKERS
from benchmarks.measure import Row, Variant, compare, machine, show_rows, table
from benchmarks.mnist_like import MnistLike, write_idx_files
from benchmarks.variants import BATCH_SIZE, PREPARED
from flyte_ddp.launch.devices import num_cores
from flyte_ddp.recipes.prepare import prepare_data

ROOT = Path(__file__).parents[1]
NUM_BATCHES, NUM_BATCHES_QUICK = 100, 10  # per epoch
# Without this, glibc returns a step's memory to the kernel in some runs and not in others, and the page faults make the
# step up to a third slower, so the floor would vary. The alternatives keep the default, which is what their users get.
KEEP_FREED_MEMORY = ("env", f"MALLOC_TRIM_THRESHOLD_={1 << 30}", f"MALLOC_MMAP_THRESHOLD_={1 << 30}")
BUSY_LOAD = 0.5  # load average above which the machine is not idle


def rows(data: Path, names: str = "") -> dict[str, list[Row]]:
    """Return all rows of the table by the names that `--only` takes. Add further comparisons here.

    Args:
        names: file or URL of the pet names; "" is the recipe's own list.
    """

    def variant(name: str, num_ranks: int = 1, precision: str = "fp32", needs: str = "") -> Variant:
        options = ("--data", str(data), "--precision", precision, "--ranks", str(num_ranks))
        launcher: tuple[str, ...] = (sys.executable,)
        if name == "floor":
            launcher = (*KEEP_FREED_MEMORY, *launcher)
        if name in ("torchrun", "torchrun_killed", "fabric", "accelerate"):
            launcher += ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
        if name == "torchrun_killed":
            launcher += ("--max-restarts", "3")  # gloo's first rendezvous after a restart sometimes fails
        command = (*launcher, "-m", "benchmarks.variants", name, *options)
        return Variant(f"{name} {precision} x{num_ranks}", command, num_threads(num_ranks), needs)

    def script(module: str, *arguments: str) -> tuple[Variant, Variant]:
        """Return a script under our launcher and under torchrun."""
        launchers = {"flyte_ddp": ("flyte_ddp", "run"), "torchrun": ("torch.distributed.run", "--standalone")}
        flags = ("--nproc-per-node", "2", "-m", f"benchmarks.{module}", *arguments)
        ours, theirs = (
            Variant(f"{module} by {name}", (sys.executable, "-m", *launcher, *flags), num_threads(2))
            for name, launcher in launchers.items()
        )
        return ours, theirs

    def generator(name: str) -> Variant:
        return Variant(name, (sys.executable, "-m", "benchmarks.names", name), num_threads(1))

    def reader(name: str) -> Variant:
        return Variant(f"images {name}", (sys.executable, "-m", "benchmarks.images", name), 1, "moto")

    def language_model(name: str, num_ranks: int = 1) -> Variant:
        launcher = (*KEEP_FREED_MEMORY, sys.executable) if name == "loop" else (sys.executable,)
        if name == "loop" and num_ranks > 1:
            launcher += ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
        command = (*launcher, "-m", "benchmarks.text", name, "--ranks", str(num_ranks))
        return Variant(f"text {name} x{num_ranks}", command, num_threads(num_ranks))

    def shards(name: str, *num_layers: str) -> Variant:
        num_ranks = 2 if name in ("fsdp", "ddp") else 1
        command = (sys.executable, "-m", "benchmarks.shards", name, *num_layers)
        return Variant(f"shards {name}", command, num_threads(num_ranks))

    def checkpoints(name: str) -> Variant:
        command = (sys.executable, "-m", "benchmarks.checkpoints", name)
        return Variant(f"checkpoints {name}", command, num_threads(1))

    def session_state(name: str) -> Variant:
        command = (sys.executable, "-m", "benchmarks.session_state", name)
        return Variant(f"session's state {name}", command, num_threads(2))

    split, whole, dcp = (session_state(name) for name in ("split", "whole", "dcp"))
    ours, ours_bf16, ours_twice = variant("ours"), variant("ours", precision="bf16"), variant("ours", 2)
    tutorial, torchrun = variant("tutorial"), variant("torchrun", 2)
    speed, memory, start = "samples_per_second", "peak_memory_bytes", "first_step_seconds"
    return {
        "floor": [
            Row("throughput / the floor, 1 rank, fp32", speed, ours, variant("floor"), ">= 0.95"),
            Row(
                "throughput / the floor, 1 rank, bf16", speed, ours_bf16, variant("floor", precision="bf16"), ">= 0.95"
            ),
        ],
        "tutorial": [
            Row("throughput / tutorial loop, 1 rank, fp32", speed, ours, tutorial, ">= 2"),
            Row("throughput in bf16 / tutorial loop in fp32, 1 rank", speed, ours_bf16, tutorial, ">= 3.5"),
            Row("peak memory of the rank / tutorial loop", memory, ours, tutorial, "<= 1.10"),
            Row("peak memory with its supervisor / tutorial loop", "memory_with_supervisor_bytes", ours, tutorial, ""),
        ],
        "torchrun": [
            Row("throughput / torchrun DDP, 2 ranks, fp32", speed, ours_twice, torchrun, ">= 1.0"),
        ],
        "start": [
            Row("command to first step / torchrun DDP, 2 ranks", start, ours_twice, torchrun, "0.5"),
            Row("`pyflyte run` to first step / torchrun DDP, 2 ranks", start, _pyflyte(), torchrun, ""),
        ],
        "script": [
            Row("command to the first line of a script / torchrun, 2 ranks", start, *script("first_line"), "<= 0.5"),
            Row(
                "throughput of a script / the same under torchrun, 2 ranks, fp32",
                speed,
                *script("variants", "torchrun", "--data", str(data), "--precision", "fp32", "--ranks", "2"),
                ">= 0.98",
            ),
        ],
        "dask": [
            Row("throughput on two Dask nodes / torchrun DDP", speed, variant("dask", 2), torchrun, ">= 0.98"),
            Row("Dask workers ready to first step / torchrun's start-up", start, variant("dask", 2), torchrun, "<= 1"),
        ],
        "recovery": [
            Row(
                "killed rank to next step, two Dask nodes / torchrun --max-restarts",
                "recovery_seconds",
                variant("dask_killed", 2),
                variant("torchrun_killed", 2),
                "",
            )
        ],
        "checkpoints": [
            Row(
                "stall of a checkpoint, 1.2 GB / a plain copy of the bytes",
                "stall_seconds",
                checkpoints("stall"),
                checkpoints("copy"),
                "<= 1.3",
            ),
            Row(
                "throughput with a checkpoint of 1.2 GB every 50 steps / without",
                speed,
                *(2 * [checkpoints("training")]),
                ">= 0.98",
                "samples_per_second_without",
            ),
        ],
        "memory_interval": [
            Row(
                "throughput with a state of 1.2 GB in memory every 5 steps, a store of 50 MB/s / without",
                speed,
                *(2 * [checkpoints("memory")]),
                ">= 0.98",
                "samples_per_second_without",
            ),
        ],
        "pet_names": [
            Row(
                "pet names: time to the tutorial's held-out loss / tutorial",
                "seconds_to_loss",
                _to_quality("ours", names, num_threads(num_cores())),
                _to_quality("tutorial", names, num_cores()),
                "<= 0.25",
            )
        ],
        "fabric": [
            Row(
                "throughput / Lightning Fabric, 2 ranks, fp32",
                speed,
                ours_twice,
                variant("fabric", 2, needs="lightning_fabric"),
                ">= 1.0",
            )
        ],
        "accelerate": [
            Row(
                "throughput / Accelerate, 2 ranks, fp32",
                speed,
                ours_twice,
                variant("accelerate", 2, needs="accelerate"),
                ">= 1.0",
            )
        ],
        "images": [
            Row(
                f"images from S3 at {1000 * LATENCY:.0f} ms, {NUM_WORKERS} loader processes / a client and a temporary "
                "file per image",
                "images_per_second",
                reader("ours"),
                reader("per_image"),
                ">= 5",
            )
        ],
        "text": [
            Row(
                "recipe text, tokens / a plain loop on one batch in memory, 1 rank, fp32",
                "tokens_per_second",
                language_model("ours"),
                language_model("loop"),
                ">= 0.95",
            )
        ],
        "fsdp": [
            Row(
                "recipe text with fsdp, tokens / torchrun with the same FSDP2 wrapping, 2 ranks, fp32",
                "tokens_per_second",
                language_model("ours", 2),
                language_model("loop", 2),
                ">= 1.0",
            )
        ],
        "fsdp_memory": [
            Row(
                "300 million parameters, peak memory of a rank with fsdp / with ddp, 2 ranks",
                memory,
                shards("fsdp", "72"),
                shards("ddp", "72"),
                "<= 0.6",
            )
        ],
        "reshard": [
            Row(
                "reading the checkpoint of 2 ranks in one process, 1.2 GB / torch.load of one file",
                "read_seconds",
                shards("reshard"),
                shards("read"),
                "",
            )
        ],
        "session": [
            Row(
                "session.save, peak memory of a rank, split / whole, 2 ranks",
                "save_memory_bytes",
                split,
                whole,
                "<= 0.6",
            ),
            Row(
                "session.load, peak memory of a rank, split / whole, 2 ranks",
                "load_memory_bytes",
                split,
                whole,
                "<= 0.6",
            ),
            Row(
                "session.save of split state, stall / copy of it",
                "stall_seconds",
                split,
                split,
                "<= 1.3",
                "copy_seconds",
            ),
            Row("session.save / dcp.async_save, until it is written", "save_seconds", split, dcp, "<= 1"),
            Row("session.load, checksummed / dcp.load", "load_seconds", split, dcp, "<= 1"),
        ],
        "names": [
            Row(
                "1,000 names, recipe pet_names / tutorial's generator",
                "names_per_second",
                generator("ours"),
                generator("tutorial"),
                ">= 50",
            ),
            Row(
                "1,000 names, recipe pet_name_windows / tutorial's generator",
                "names_per_second",
                generator("ours_windows"),
                generator("tutorial"),
                "",
            ),
        ],
    }


def num_threads(num_ranks: int) -> int:
    """Return the CPU threads of each of `num_ranks` ranks, as this package sets them."""
    return max(1, num_cores() // num_ranks)


def _to_quality(name: str, names: str, threads: int) -> Variant:
    command = (sys.executable, "-m", "benchmarks.time_to_quality", name, "--names", names)
    return Variant(f"pet names, {name}", command, threads)


def _pyflyte() -> Variant:
    """Return the whole command that users type; it includes flytekit's start and the preparation of the data."""
    return Variant(
        "pyflyte run",
        (
            str(Path(sys.executable).with_name("pyflyte")),
            "run",
            str(ROOT / "workflows" / "single_node.py"),
            "single_node_training_wf",
            "--recipe",
            "benchmarks.mnist_like.TimestampedMnistLike",
            "--num_processes",
            "2",
            "--config",
            f'{{"epochs": 1, "global_batch_size": {BATCH_SIZE}}}',
        ),
        num_threads(2),
    )


def main() -> int:
    comparisons = list(rows(Path()))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side of each pair (%(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=comparisons, default=comparisons, metavar="NAME", help=", ".join(comparisons)
    )
    parser.add_argument("--names", default="", help="file or URL of pet names; the recipe's own list by default")
    parser.add_argument("--quick", action="store_true", help="one short round, to check that everything runs")
    arguments = parser.parse_args()
    num_samples = BATCH_SIZE * (NUM_BATCHES_QUICK if arguments.quick else NUM_BATCHES)
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        _log(f"the load average is {load:.1f}: something else runs on this machine and will distort the ratios")
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as directory:
        data = Path(directory)
        (data / PREPARED).mkdir()
        prepare_data(MnistLike(), str(num_samples), data / PREPARED)
        write_idx_files(num_samples, data)
        chosen = [row for name, group in rows(data, arguments.names).items() if name in arguments.only for row in group]
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
