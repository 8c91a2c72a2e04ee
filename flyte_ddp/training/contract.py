"""Checks of a recipe's methods, on the first batch of a new run and before its first step.

A wrong method need not fail by itself: a loss that is averaged already, or outputs that broadcast
against targets, train the wrong thing without an error. Each error here is one line with the
recipe's file and line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sized
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import Dataset

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, abbreviate, first_line
from flyte_ddp.events import EpochFinished
from flyte_ddp.process.tracebacks import frames_of_user
from flyte_ddp.rank.data import (
    Samples,
    count_samples,
    isolate_draws,
    seed_generators,
)
from flyte_ddp.rank.nested import describe_kind, map_tensors, tensors_in
from flyte_ddp.rank.plan import as_counted, as_stream, derived_seed
from flyte_ddp.rank.snapshot import unchanged
from flyte_ddp.recipes import Recipe, locate
from flyte_ddp.recipes.base import check_classes
from flyte_ddp.recipes.problems import MultiLabel, Regression, Segmentation
from flyte_ddp.training.initial_state import freeze_layers
from flyte_ddp.training.metrics import (
    HeldOutMetrics,
    check_monitor,
    has_other_ranks,
    is_merged_by_batches,
    own_state,
    read_figures,
    read_value,
)
from flyte_ddp.training.optim import check_kind
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.passes import forward

# The check uses so many samples of a batch, so that it takes milliseconds. It uses the whole batch
# if the model needs it.
MAX_SAMPLES = 8
# The base classes of recipes, with the targets and outputs that their methods take.
BASES: dict[type[Recipe], str] = {
    Recipe: "the default is for classes (B,) and their logits (B, C)",
    Regression: (
        "that of Regression is for numbers, (B,) or (B, ...), and outputs of the same shape"
    ),
    MultiLabel: "that of MultiLabel is for labels (B, L) and their logits (B, L)",
    Segmentation: "that of Segmentation is for classes (B, H, W) and their logits (B, C, H, W)",
}
logger = logging.getLogger(__name__)

NUM_CORRECT = "the number of each sample's targets that are predicted right"
MAX_NAMES = 3  # names of parameters in an error
UNKNOWN = (UninitializedParameter, UninitializedBuffer)  # the tensors of a lazy layer


def open_datasets(
    recipe: Recipe, directory: Path, config: TrainingConfig
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the recipe's training and held-out data, checked. It draws the same in every process
    of a run.

    So a split without a seed is one split: of all ranks, after a resume, and of who compares two
    models later.

    Raises:
        ConfigError: they are no pair of data sets with `__len__` and `__getitem__`, or one is
            empty.
    """
    with isolate_draws([]):
        seed_generators(derived_seed(config.seed, *b"datasets"))
        found: Any = recipe.datasets(directory)
    expected = (
        f"{locate(recipe, 'datasets')}: expected a pair of data sets, for training and held out,"
    )
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise ConfigError(f"{expected} got {describe_kind(found)}")
    for dataset, use in zip(found, ("training", "held-out"), strict=True):
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            got = f"a {type(dataset).__name__} without them"
            raise ConfigError(f"{expected} each with __len__ and __getitem__, got {got}")
        if not len(dataset):
            raise ConfigError(
                f"{expected} each with at least one sample, got none for the {use} data"
            )
    if getattr(as_stream(found[1]), "schedule", None):
        raise ConfigError(f"{expected} got a held-out mixture by a schedule, which needs steps")
    return found[0], found[1]


def open_model(parallelism: Parallelism) -> nn.Module:
    """Return the recipe's model, checked and placed as the kind of parallelism wants it."""
    with parallelism.building():
        expected = f"{locate(parallelism.recipe, 'model')}: expected an nn.Module"
        model = check_kind(parallelism.recipe.model(), nn.Module, expected)
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(isinstance(each, UNKNOWN) for each in own):
            raise ConfigError(
                f"{locate(parallelism.recipe, 'model')}: expected layers of known sizes, got "
                f"{name or 'a model'}, a {type(module).__name__}: give its sizes, or let `model` "
                "call it once with an example"
            )
    freeze_layers(model, parallelism.config.frozen_layers)
    return parallelism.place(model)


def check_contract(
    model: nn.Module,
    train: Samples,
    parallelism: Parallelism,
    held_out: Samples | None = None,
) -> None:
    """Check what the recipe's methods return for a first micro-batch. Every rank calls it, at the
    start of a new run and of one with another number of ranks.

    What the methods, the model and the data change is put back: see `unchanged`.

    Raises:
        ConfigError: a method broke its contract; one line.
        DataError: the default losses are for classes, and a target is none; one line.
    """
    recipe, config, size = parallelism.recipe, parallelism.config, len(train)
    if config.global_batch_size > size:
        expected = f"expected at most {size}, the number of training samples"
        raise ConfigError(f"global_batch_size: {expected}, got {config.global_batch_size}")
    expected = "expected a model of the samples' inputs"

    def call_model(inputs: Any) -> Any:
        return _call(recipe, "model", expected, model, inputs=inputs)

    per_rank = config.batch.size_per_rank(parallelism.world.world_size)
    if parallelism.world.is_first:  # rank 0 warns for all ranks
        _warn_of_mixing(recipe, train)
    for most in sorted({min(per_rank, MAX_SAMPLES), per_rank}):
        with unchanged(model, recipe, train.dataset):
            inputs, targets, num_samples = _read_first(recipe, train, most)
            _check_stored_counts(recipe, train, targets, most)
            model.train()
            try:
                outputs = forward(call_model, parallelism, inputs)
            except Exception:
                # the pass of a part of the ranks would hang
                if most == per_rank or parallelism.is_collective:
                    raise
                continue  # a model may have a state of a whole batch from its start
            is_one = num_samples == 1 and not train.has_own_sizes
            if is_one and isinstance(outputs, Tensor) and outputs.shape[:1] == (1,):
                # With another, as larger batches of the evaluation would broadcast where a batch of
                # one does not.
                outputs, num_samples = torch.cat([outputs, outputs / 2]), 2
                targets = map_tensors(_double, targets)
            if _find_base(recipe, "losses") is Recipe:
                known = (getattr(each, "targets", None) for each in (train, held_out))
                for each in (*known, targets):
                    check_classes(outputs, each)
            losses = _check_results(recipe, config, outputs, targets, num_samples)
            _check_gradients(losses.sum() * 0.0, model, parallelism)
        return


def _read_first(recipe: Recipe, train: Samples, num_samples: int) -> tuple[Any, Any, int]:
    """Return the first samples as a batch of inputs and targets, and their number."""
    first = torch.arange(num_samples, device=train.index_device)
    inputs, targets, *_ = next(iter(train.batches([first], epoch=1)))
    if train.has_own_sizes or hasattr(train.dataset, "UNREADABLE"):  # some may be left out
        num_samples = count_samples(recipe, inputs, targets)
    return inputs, targets, num_samples


def _check_stored_counts(recipe: Recipe, train: Samples, targets: Any, num_samples: int) -> None:
    """Refuse a recipe that counts other targets than the data set has stored."""
    counted = as_counted(train.dataset)
    if counted is None or train.has_own_sizes:
        return
    stored = counted.count_targets(range(num_samples))
    counts = recipe.num_targets(targets)
    got = num_samples
    if counts is not None:
        got = int(counts.sum())
    if got != stored:
        raise ConfigError(
            f"{locate(recipe, 'num_targets')}: expected the {stored} targets that the data set has "
            f"counted in {num_samples} rows, got {got}: count the labels that are not -100"
        )


def _double(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, torch.zeros_like(tensor)])


def _check_gradients(loss: Tensor, model: nn.Module, parallelism: Parallelism) -> None:
    """Check that each trained parameter has a dense gradient of `loss`."""
    is_collective = parallelism.is_collective
    may_lack = parallelism.config.find_unused_parameters and not is_collective
    sparse, missing = [], []
    for name, gradient in _gradients(loss, model, is_collective).items():
        if gradient is None:
            missing.append(name)
        elif gradient.is_sparse:
            sparse.append(name)
    problem = ""
    if sparse:
        problem = (
            f"dense gradients, which optimizers here take, got sparse ones of "
            f"{abbreviate(sparse, MAX_NAMES)}: leave out sparse=True, as of nn.Embedding"
        )
    elif missing and not may_lack:
        problem = (
            f"a gradient for every parameter, got none for {abbreviate(missing, MAX_NAMES)}: use "
            "them in the forward pass, or freeze them by requires_grad_(False); with ddp the "
            "config's find_unused_parameters allows it"
        )
    if problem:
        raise ConfigError(f"{locate(parallelism.recipe, 'model')}: expected {problem}")


def _gradients(loss: Tensor, model: nn.Module, is_collective: bool) -> dict[str, Tensor | None]:
    """Return the gradient of each trained parameter, None where `loss` has none."""
    if is_collective:
        loss.backward()  # the parameters are split again after this
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if is_collective:
        return {name: each.grad for name, each in trained.items()}
    # A backward pass would call DDP's hooks, and these note the parameters for its next pass.
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return dict(zip(trained, found, strict=True))


def _warn_of_mixing(recipe: Recipe, train: Samples) -> None:
    """Warn if a sample's part of a batch depends on the other samples in it."""
    if not train.has_own_collate or train.has_own_sizes or len(train) == 1:
        return
    first = torch.arange(min(MAX_SAMPLES, len(train)))
    with unchanged(nn.Module(), recipe, train.dataset):
        whole, *halves = train.batches([first, *first.tensor_split(2)], epoch=1)
    if any(len(each) > 2 for each in halves):  # a sample stands in for an unreadable half
        return
    for all_of_it, *parts in zip(tensors_in(whole), *map(tensors_in, halves), strict=True):
        # Samples may be padded to the length of the longest sample.
        if all(each.shape[1:] == all_of_it.shape[1:] for each in parts) and not torch.equal(
            torch.cat(parts), all_of_it
        ):
            logger.warning(
                "%s: it mixes the samples of a batch, so other numbers of ranks train on others",
                locate(recipe, "collate"),
            )
            return


def _check_results(
    recipe: Recipe, config: TrainingConfig, outputs: Any, targets: Any, num_samples: int
) -> Any:
    """Check `losses`, `num_targets` and the metrics; return the losses."""
    given = {"outputs": outputs, "targets": targets}
    try:
        losses: Any = _call_method(recipe, "losses", **given)
    except Exception:
        _check_broadcast(recipe, outputs, targets, None, None)
        raise
    fewer = _losses_of_fewer(recipe, outputs, targets, num_samples)
    _check_broadcast(recipe, outputs, targets, losses, fewer)
    what, place = "one loss for each sample", locate(recipe, "losses")
    _check_shape(recipe, "losses", what, losses, num_samples, **given)
    if fewer is not None:  # a dimension may have the length of the batch by chance
        given = {"outputs": outputs[:-1], "targets": targets[:-1]}
        _check_shape(recipe, "losses", what, fewer, num_samples - 1, **given)
    if not losses.is_floating_point():
        raise ConfigError(f"{place}: expected floating-point losses, got {losses.dtype}")
    if not losses.requires_grad:
        raise ConfigError(
            f"{place}: expected losses with a gradient, got some without: do not detach"
        )
    with torch.no_grad():
        counts = _call_method(recipe, "num_targets", targets=targets)
        if counts is None:
            counts = torch.ones(num_samples)
        what = "the number of each sample's targets"
        _check_shape(recipe, "num_targets", what, counts, num_samples)
        _check_metrics(recipe, config, outputs, targets, counts.to(losses.device))
    return losses


def _losses_of_fewer(recipe: Recipe, outputs: Any, targets: Any, num_samples: int) -> Any:
    """Return the losses without the last sample; None if the first dimension of outputs or targets
    is not the sample, or if the method fails.

    Outputs may be in another order, such as (T, B, V) or (B x T, V).
    """
    if num_samples == 1 or type(recipe).num_samples is not Recipe.num_samples:
        return None
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if outputs.shape[:1] != (num_samples,) or targets.shape[:1] != (num_samples,):
        return None
    try:
        return recipe.losses(outputs[:-1], targets[:-1])
    except Exception:
        return None


def _check_broadcast(recipe: Recipe, outputs: Any, targets: Any, losses: Any, fewer: Any) -> None:
    """Refuse outputs and targets that grow when they meet: (B, 1) and (B,) make (B, B).

    `losses` may bring them together itself. Then a sample's loss is the same among `fewer` samples.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    try:
        # torch's function of that name imports sympy: 0.9 s and 60 MB of each rank.
        together = numpy.broadcast_shapes(outputs.shape, targets.shape)
    except ValueError:
        return
    if math.prod(together) <= max(outputs.numel(), targets.numel()):
        return
    if isinstance(fewer, Tensor) and fewer.dim() == losses.dim() == 1:
        first = losses[: len(fewer)]
        if first.shape == fewer.shape and torch.allclose(first, fewer, equal_nan=True):
            return
    raise ConfigError(
        f"{locate(recipe, 'model')}: expected outputs of the targets' shape "
        f"{tuple(targets.shape)}, got "
        f"{tuple(outputs.shape)}, which broadcast to {tuple(together)}: squeeze or unsqueeze one "
        "of them"
    )


def _check_shape(
    recipe: Recipe,
    method: str,
    what: str,
    value: Any,
    num_samples: int,
    outputs: Any = None,
    targets: Any = None,
) -> None:
    expected = f"{locate(recipe, method)}: expected {what}, shape ({num_samples},),"
    if not isinstance(value, Tensor):
        raise ConfigError(f"{expected} got a {type(value).__name__}")
    if value.shape == (num_samples,):
        return
    hint = ""
    base = _find_base(recipe, method)
    if base:
        hint = f": {BASES[base]}, so the recipe needs a method of its own"
    elif value.dim() == 0 and method == "losses":
        hint = ": use reduction='none'"
    elif value.dim() == 0:
        hint = ": do not sum over the samples"
    elif value.dim() > 1 and len(value) == num_samples:
        hint = ": sum over a sample's targets, as by .flatten(1).sum(1)"
        if method == "losses":
            hint += ", and return their number by num_targets"
    shapes = f" (outputs {_shapes(outputs)}, targets {_shapes(targets)})" * (outputs is not None)
    raise ConfigError(f"{expected} got shape {tuple(value.shape)}{hint}{shapes}")


def _call_method(recipe: Recipe, method: str, **arguments: Any) -> Any:
    base = _find_base(recipe, method)
    why = ""
    if base:
        why = f", because {BASES[base]}"
    expected = f"expected a method of the recipe's own{why}"
    return _call(recipe, method, expected, getattr(recipe, method), **arguments)


def _call(recipe: Recipe, method: str, expected: str, function: Any, **arguments: Any) -> Any:
    """Call a function; explain an error that does not come from the user's own code."""
    try:
        return function(*arguments.values())
    except Exception as error:
        if frames_of_user(error):
            raise  # the frames in the user's code explain more
        given = ", ".join(f"{name} {_shapes(each)}" for name, each in arguments.items())
        got = f"{type(error).__name__} of {given}: {first_line(error)}"
        raise ConfigError(f"{locate(recipe, method)}: {expected}, got {got}") from error


def _find_base(recipe: Recipe, method: str) -> type[Recipe] | None:
    """Return this package's base class that defines the method; None if the recipe defines it."""
    own = getattr(type(recipe), method)
    return next((base for base in BASES if vars(base).get(method) is own), None)


def _check_metrics(
    recipe: Recipe, config: TrainingConfig, outputs: Any, targets: Any, counts: Tensor
) -> None:
    """Check `metrics`, `figures`, and that `monitor` names one of them."""
    place = locate(recipe, "metrics")
    try:
        metrics = HeldOutMetrics(recipe, counts.device)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    given = {"outputs": outputs, "targets": targets}
    for name, function in metrics.functions.items():
        is_own = function == recipe.num_correct
        if is_own:
            source = locate(recipe, "num_correct")
            value = _call_method(recipe, "num_correct", **given)
            _check_shape(recipe, "num_correct", NUM_CORRECT, value, len(counts), **given)
        else:
            source = f"{place}: {name}"
            value = function(outputs, targets)
            _check_shape(recipe, "metrics", f"{name} of each sample", value, len(counts))
        # Reports show an accuracy in percent.
        if (is_own or name == "accuracy") and bool(((value < 0) | (value > counts)).any()):
            raise ConfigError(
                f"{source}: expected at "
                f"most {float(counts.max()):g} for a sample, the number of its targets, got "
                f"{float(value.max()):g}; a sample with several targets needs num_targets"
            )
    names = ["test_loss", *metrics.functions]
    for name, metric in metrics.objects.items():
        metric.sync_on_compute = False
        predicted = {"outputs": recipe.metric_outputs(outputs), "targets": targets}
        expected = f"expected {name} of outputs and targets"
        _call(recipe, "metrics", expected, metric.update, **predicted)
        check_state(f"{place}: {name}", metric, predicted)
        names += _read_names(name, metric, place)
    epoch = EpochFinished(1, 1, 0.5, 0.5, 0.1, 1.0, 1.0, 1.0, metrics=dict.fromkeys(names, 0.5))
    try:
        names += read_figures(recipe, epoch)
    except ConfigError as error:
        raise ConfigError(f"{locate(recipe, 'figures')}: {str(error).partition(': ')[2]}") from None
    except Exception:  # the method may fail, because these figures are not from a real epoch
        return  # the trainer checks the monitor after the first epoch
    check_monitor(config, names)


def check_state(place: str, metric: Any, predicted: dict[str, Any]) -> None:
    """Check that a metric keeps its sums in states that the ranks can merge, and nowhere else."""
    if has_other_ranks() and not is_merged_by_batches(metric):
        before = own_state(metric)
        metric.update(*predicted.values())
        after = own_state(metric)
        changed = [each for each in after if after[each] != before.get(each)]
        if changed:
            raise ConfigError(
                f"{place}: expected states made by add_state alone, which the ranks merge, got "
                f"{changed[0]}, which each rank has for itself"
            )


def _read_names(name: str, metric: Any, place: str) -> list[str]:
    """Return the names of a metric's values; they must be single numbers."""
    try:
        value = metric.compute()
    except Exception:  # some metrics need more samples
        return [name]
    try:
        return list(read_value(name, value))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _shapes(value: Any) -> str:
    shapes = [str(tuple(each.shape)) for each in tensors_in(value)]
    return ", ".join(shapes) or type(value).__name__
