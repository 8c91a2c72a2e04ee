"""Views of a model for people to look at: its layers, the distribution of its weights, its predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import Histogram, LayerDescribed, Prediction
from flyte_ddp.rank.data import Samples
from flyte_ddp.rank.forward import evaluating, model_inputs
from flyte_ddp.rank.world import World
from flyte_ddp.recipes import Recipe

NUM_BINS = 64
PREDICTION_BATCH, MAX_PREDICTIONS = 32, 320  # samples


def layers_of(model: nn.Module, sample: Tensor) -> list[LayerDescribed]:
    """Return the leaf modules that a forward pass visits, in this order.

    Args:
        sample: a batch of one, as the model takes it.
    """
    layers: list[LayerDescribed] = []
    handles = []

    def record(name: str, module: nn.Module) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            shape = list(output.shape) if isinstance(output, Tensor) else list(_first_tensor(output).shape)
            parameters = sum(parameter.numel() for parameter in module.parameters())
            layers.append(LayerDescribed(name, type(module).__name__, shape, parameters))

        return module.register_forward_hook(hook)

    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            handles.append(record(name, module))
    try:
        with evaluating(model):
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    return layers


def histograms_of(model: nn.Module) -> tuple[dict[str, Histogram], dict[str, Histogram]]:
    """Return the histograms of each parameter and of its last gradient, by name. Waits for the device."""
    parameters, gradients = {}, {}
    for name, parameter in model.named_parameters():
        parameters[name] = _histogram(parameter.detach())
        if parameter.grad is not None:
            gradients[name] = _histogram(parameter.grad.detach())
    return parameters, gradients


def predictions_of(
    model: nn.Module, recipe: Recipe, samples: Samples, config: TrainingConfig, world: World
) -> list[Prediction]:
    """Return the predictions of `model` for the first of `samples`, as the recipe shows them."""
    indices = torch.arange(min(len(samples), MAX_PREDICTIONS), device=world.device).split(PREDICTION_BATCH)
    predictions: list[Prediction] = []
    with evaluating(model):
        for batch, targets in samples.batches(indices, epoch=0):
            outputs = model(model_inputs(recipe, config, batch))
            predictions += recipe.predictions(batch.cpu(), outputs.float().cpu(), targets.cpu())
    return predictions


def _histogram(values: Tensor) -> Histogram:
    values = values.float().flatten()
    low, high = float(values.min()), float(values.max())
    if low == high:  # histc would take 0 and 0 for "find the range yourself"
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(values, bins=NUM_BINS, min=low, max=high)
    edges = torch.linspace(low, high, NUM_BINS + 1)
    return Histogram([int(count) for count in counts.tolist()], edges.tolist())


def _first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output
