"""Model FLOPs utilization: the share of the devices' measured speed that a training uses."""

from __future__ import annotations

import time

import torch
from torch import nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import EpochFinished
from flyte_ddp.recipes import Recipe
from flyte_ddp.world import World

MATRIX_SIZE, MATRIX_SIZE_ON_GPU = 1024, 4096  # of each side; larger ones are not faster
MEASURED_SECONDS = 0.1


class FlopsUtilization:
    """Compares a training's operations per second with those of large matrix products on the same devices.

    Measures nothing, and so delays no start, where the recipe does not define `flops_per_sample`. Every rank makes one
    at the same time, because the ranks of a node share its cores.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, config: TrainingConfig, world: World) -> None:
        self.flops_per_sample = recipe.flops_per_sample(model)
        self.peak_flops = world.all_reduce(measure_peak_flops(config, world))[0] if self.flops_per_sample else 0.0

    def of(self, epoch: EpochFinished) -> dict[str, float]:
        """Return the epoch's utilization as a metric by name; none where it is not known."""
        if not self.peak_flops:
            return {}
        used = self.flops_per_sample * epoch.samples_per_second
        return {"model_flops_utilization": used / self.peak_flops}


def measure_peak_flops(config: TrainingConfig, world: World) -> float:
    """Return the operations per second of this rank in products of large matrices, in the configured precision."""
    on_gpu = world.device.type == "cuda"
    size = MATRIX_SIZE_ON_GPU if on_gpu else MATRIX_SIZE
    matrix = torch.ones(size, size, device=world.device, dtype=torch.bfloat16 if config.precision == "bf16" else None)
    world.all_reduce(float((matrix @ matrix)[0, 0]))  # warms up, and waits for the other ranks
    products = 0
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < MEASURED_SECONDS:
        product = matrix @ matrix
        for _ in range(9 if on_gpu else 0):  # so that the device does not wait for the host
            product = matrix @ matrix
        products += 10 if on_gpu else 1
        if on_gpu:
            torch.cuda.synchronize(world.device)
    del product, matrix
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)  # which the report has of the training
    return 2.0 * size**3 * products / seconds
