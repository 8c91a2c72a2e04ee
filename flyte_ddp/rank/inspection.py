"""What a model looks like from outside: its layers, the spread of its weights, its guesses. For people to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.events import Histogram, LayerDescribed, Prediction
from flyte_ddp.recipes import Recipe

NUM_BINS = 64


def layers_of(model: nn.Module, sample: Tensor) -> list[LayerDescribed]:
    """The leaf modules that a forward pass over `sample`, a batch of one as the model takes it, visits."""
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
    """How each parameter and its last gradient are distributed, by name. Waits for the device."""
    parameters, gradients = {}, {}
    for name, parameter in model.named_parameters():
        parameters[name] = _histogram(parameter.detach())
        if parameter.grad is not None:
            gradients[name] = _histogram(parameter.grad.detach())
    return parameters, gradients


def predictions_of(
    recipe: Recipe,
    model: nn.Module,
    inputs: Callable[[Tensor], Tensor],
    batches: Iterator[tuple[Tensor, Tensor]],
) -> list[Prediction]:
    """The model's guesses for `batches`, as the recipe shows them; `inputs` makes of a batch what the model takes."""
    shown: list[Prediction] = []
    with evaluating(model):
        for batch, targets in batches:
            outputs = model(inputs(batch))
            shown += recipe.predictions(batch.cpu(), outputs.float().cpu(), targets.cpu())
    return shown


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode and without gradients, for the length of the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def keep_frozen_statistics(model: nn.Module) -> None:
    """Leave each BatchNorm of `model` whose parameters are not trained with the statistics that it has.

    Statistics that moved on beneath frozen weights would make the layers another function than the one that was kept.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            parameters = list(module.parameters())
            if parameters and not any(parameter.requires_grad for parameter in parameters):
                module.eval()


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
