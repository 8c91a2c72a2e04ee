"""Views of a model for people to look at: its layers, the distribution of its weights, its
predictions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from flyte_ddp.events import Histogram, LayerDescribed, Prediction
from flyte_ddp.rank.data import Samples
from flyte_ddp.rank.nested import map_tensors, tensors_in
from flyte_ddp.rank.sharding import whole
from flyte_ddp.rank.snapshot import unchanged
from flyte_ddp.recipes import Recipe
from flyte_ddp.training.parallel import Parallelism, count_parameters
from flyte_ddp.training.passes import evaluating, forward, model_inputs

NUM_BINS = 64
PREDICTION_BATCH, MAX_PREDICTIONS = 32, 320  # samples


def describe_layers(model: nn.Module, sample: Any) -> list[LayerDescribed]:
    """Return the leaf modules that a forward pass of `sample`, a batch of one, visits, in this
    order.
    """
    layers: list[LayerDescribed] = []

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = next(tensors_in(output), None)
        shape = []
        if tensor is not None:
            shape = list(tensor.shape)
        kind = type(module).__name__
        layers.append(LayerDescribed(name, kind, shape, count_parameters(module)))

    handles = [
        module.register_forward_hook(functools.partial(note, name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        with evaluating(model):
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    return layers


def sample_inputs(samples: Samples, parallelism: Parallelism) -> Any:
    """Return the first of `samples` as a batch that the model takes."""
    first = torch.zeros(1, dtype=torch.int64, device=samples.index_device)
    batch, *_ = next(iter(samples.batches([first], epoch=0)))
    return model_inputs(parallelism, batch)


def take_histograms(model: nn.Module, parallelism: Parallelism) -> dict[str, Histogram]:
    """Return the histograms of each parameter and of its last gradient, named as in
    `HistogramsTaken`. Waits for the device.

    A histogram counts the finite values. A tensor without finite values has no histogram. Rank 0
    alone gets histograms; the other ranks take part in the collectives.
    """
    histograms: dict[str, Histogram] = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in (("parameters", parameter), ("gradients", parameter.grad)):
            if tensor is None:
                continue
            values = whole(tensor.detach())
            if not parallelism.world.is_first:
                continue
            histogram = _histogram(values)
            if histogram:
                histograms[f"{kind}/{name}"] = histogram
    return histograms


def make_predictions(
    model: nn.Module, samples: Samples, parallelism: Parallelism
) -> list[Prediction]:
    """Return the predictions of `model` for the first of `samples`, as the recipe shows them.
    Changes no state.
    """
    indices = torch.arange(min(len(samples), MAX_PREDICTIONS), device=samples.index_device).split(
        PREDICTION_BATCH
    )
    recipe, predictions, num_batches = parallelism.recipe, [], 0
    stand_in: list[float]
    with unchanged(model, recipe, samples.dataset), evaluating(model):
        for batch, targets, *stand_in in samples.batches(indices, epoch=0):
            outputs = map_tensors(on_cpu, forward(model, parallelism, batch))
            batch, targets = map_tensors(Tensor.cpu, (batch, targets))
            shown = recipe.report_samples(batch, outputs, targets)
            numbers = indices[num_batches].tolist()
            num_batches += 1
            if len(shown) == len(numbers) and not stand_in:  # each sample has a prediction
                shown = [
                    dataclasses.replace(each, sample=number)
                    for each, number in zip(shown, numbers, strict=True)
                ]
            predictions += shown
    return predictions


def generate_sample(model: nn.Module, recipe: Recipe) -> str:
    """Return the recipe's sample text. The changes of its forward passes are put back, because the
    other ranks run no such passes.
    """
    if getattr(recipe.generate_sample, "__func__", None) is Recipe.generate_sample:
        return recipe.generate_sample(model)
    with unchanged(model, recipe):
        return recipe.generate_sample(model)


def on_cpu(output: Tensor) -> Tensor:
    """Return a copy on the CPU, in single precision at least."""
    if output.is_floating_point():
        output = output.float()
    return output.cpu()


def _histogram(values: Tensor) -> Histogram | None:
    # torch.histc has no deterministic kernel for floats on GPUs. NumPy counts block by block,
    # without a copy of a large tensor, and leaves out values beyond the limits. The limits are
    # float64, because the range of float32 values may not fit into a float32.
    array = values.float().cpu().numpy()
    known = numpy.isfinite(array)
    if not known.any():
        return None
    limits = array.min(where=known, initial=numpy.inf), array.max(where=known, initial=-numpy.inf)
    counts, edges = numpy.histogram(array, NUM_BINS, tuple(map(numpy.float64, limits)))
    return Histogram(counts.tolist(), edges.tolist())
