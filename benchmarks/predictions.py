"""Compare the samples per second of `flyte_ddp.predict` with those of a plain loop in as many
processes: `python -m benchmarks.predictions`.

Both predict the same drawn images with the CNN of recipe mnist, and write the same Parquet files.
What a process does before its first part is not counted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import flyte_ddp
from flyte_ddp.launch.agent.devices import num_cores
from flyte_ddp.recipes.mnist import Mnist

NUM_SAMPLES, BATCH_SIZE, PART_SIZE = 200_000, 256, 64 * 256


class Drawn(Mnist):
    """Images of noise."""

    def prepare_new_data(self, source: str, directory: Path) -> str:
        images = np.random.RandomState(0).randint(256, size=(NUM_SAMPLES, 28, 28), dtype=np.uint8)
        np.savez(directory / "test.npz", images=images, labels=np.zeros(NUM_SAMPLES, np.int64))
        return f"{NUM_SAMPLES:,} images of noise"

    def predict_dataset(self, directory: Path) -> torch.utils.data.TensorDataset:
        with np.load(directory / "test.npz") as arrays:
            return torch.utils.data.TensorDataset(torch.from_numpy(arrays["images"]))


def plain_rate(directory: Path, state: str, number: int, count: int) -> float:
    """Return the samples per second of a loop over every `count`-th part from `number` on."""
    import pyarrow
    from pyarrow import parquet

    torch.set_num_threads(max(1, num_cores() // count))
    recipe = Drawn()
    (images,) = recipe.predict_dataset(directory).tensors
    model = recipe.model().eval()
    model.load_state_dict(torch.load(state, weights_only=True))
    begun, num_done = 0.0, 0
    for part in range(number, -(-NUM_SAMPLES // PART_SIZE), count):
        tables = []
        with torch.no_grad():
            for batch in images[part * PART_SIZE : (part + 1) * PART_SIZE].split(BATCH_SIZE):
                probability, digit = model(recipe.inputs(batch)).softmax(1).max(1)
                names = [str(each) for each in digit.tolist()]
                columns = {"class": names, "probability": probability.numpy()}
                tables.append(pyarrow.table(columns))
        file = directory / f"plain-{part}.parquet"
        parquet.write_table(pyarrow.concat_tables(tables), file)
        if begun:  # the first part warms up
            num_done += sum(len(table) for table in tables)
        begun = begun or time.perf_counter()
    return num_done / (time.perf_counter() - begun)


def our_rate(output: Path, state: str, count: int) -> float:
    """Return the samples per second of each of `count` processes, by the times of their files."""
    flyte_ddp.predict(
        "benchmarks.predictions.Drawn",
        state,
        "",
        str(output),
        batch_size=BATCH_SIZE,
        part_size=PART_SIZE,
        nproc_per_node=count,
        progress=False,
    )
    times = sorted(file.stat().st_mtime for file in output.glob("part-*.parquet"))
    return (len(times) - count) * PART_SIZE / (times[-1] - times[count - 1]) / count


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory, state = Path(scratch), f"{scratch}/state.pt"
        torch.save(Drawn().model().state_dict(), state)
        Drawn().prepare_new_data("", directory)
        for count in (1, 2):
            command = [sys.executable, "-m", "benchmarks.predictions", scratch, state]
            loops = [
                subprocess.Popen([*command, str(number), str(count)], stdout=subprocess.PIPE)
                for number in range(count)
            ]
            rates = [float(loop.communicate()[0]) for loop in loops]
            plain, ours = sum(rates) / count, our_rate(directory / f"out-{count}", state, count)
            print(
                f"{count} processes: {ours:,.0f} samples/s each, {ours / plain:.2f} of {plain:,.0f}"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given, state_file, index, total = sys.argv[1:]
        print(plain_rate(Path(given), state_file, int(index), int(total)))
    else:
        main()
