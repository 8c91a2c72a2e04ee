"""Measure the time of a comparison of the ranks: `python -m benchmarks.causes.cost`.

Two ranks train a model as recipe `mnist` does. The cost is in time of the CPU, so that other
processes change little.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.mnist_like import MnistLike
from flyte_ddp.config import resolve
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes.prepare import prepare_data

INTERVAL = 10  # optimizer steps
NUM_IMAGES = "20000"
MARK = "comparison: "


class Timed(MnistLike):
    """`MnistLike`, whose ranks print the time of each comparison and of the steps before it."""

    def model(self) -> Any:
        from flyte_ddp.training.verification import Verification

        check, begun_at = Verification.check, time.process_time()

        def check_and_print(verification: Verification, step: int) -> None:
            nonlocal begun_at
            before = time.process_time()
            check(verification, step)
            if step % INTERVAL == 0:
                after = time.process_time()
                print(MARK + json.dumps([after - before, (before - begun_at) / INTERVAL]))
                begun_at = after

        Verification.check = check_and_print  # type: ignore[method-assign]
        return super().model()


def main() -> None:
    lines: list[str] = []
    config = {"epochs": 1, "global_batch_size": 128, "verify_interval": INTERVAL}
    name = "benchmarks.causes.cost.Timed"
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        data.mkdir()
        prepare_data(MnistLike(), NUM_IMAGES, data)
        program = recipe_program(name, resolve(MnistLike.defaults, config))
        job = Job(program, f"{directory}/run", time.time())
        driver.run(job, LocalPlace(2), lambda: str(data), relay=lines.append)
    found = [json.loads(each.partition(MARK)[2]) for each in lines if MARK in each]
    ratios = [check / step for check, step in found[4:]]  # the first steps warm up
    low, *_, high = statistics.quantiles(ratios, n=10)
    print(
        f"a comparison takes {statistics.median(ratios):.2f} of a step ({low:.2f} to {high:.2f} "
        f"in 80 % of {len(ratios)}): at an interval of 500, "
        f"{statistics.median(ratios) / 5:.2f} % of the time"
    )


if __name__ == "__main__":
    main()
