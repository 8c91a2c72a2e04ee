"""Checks of a recipe's methods, on the first batch of a new run and before its first step.

A wrong method need not fail by itself: a loss that is averaged already, or outputs that broadcast
against targets, train the wrong thing without an error. Each error here is one line with the
recipe's file and line.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished
from flyte_ddp.launch.process.frames import frames_of_user
from flyte_ddp.rank.data import Samples, derived_seed, isolate_draws, seed_generators
from flyte_ddp.rank.initial_state import abbreviate
from flyte_ddp.rank.metrics import HeldOutMetrics, check_monitor, read_figures, read_value
from flyte_ddp.rank.nested import map_tensors, tensors_in
from flyte_ddp.rank.passes import autocast, model_inputs
from flyte_ddp.rank.sharding import is_sharded
from flyte_ddp.rank.snapshot import unchanged
from flyte_ddp.recipes import Recipe, locate
from flyte_ddp.recipes.base import check_classes
from flyte_ddp.recipes.tasks import MultiLabel, Regression, Segmentation
from flyte_ddp.world import World

# of the batch, so that the check takes milliseconds; all of it where the model takes no fewer
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
MAX_NAMES = 3  # of parameters in an error


def check_datasets(recipe: Recipe, found: Any) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the training and the held-out data that `recipe.datasets` has returned.

    Raises:
        ConfigError: they are no pair of data sets with `__len__` and `__getitem__`, or one is
            empty.
    """
    expected = (
        f"{locate(recipe, 'datasets')}: expected a pair of data sets, for training and held out,"
    )
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        what = (
            f"{len(found)} of them"
            if isinstance(found, (tuple, list))
            else f"a {type(found).__name__}"
        )
        raise ConfigError(f"{expected} got {what}")
    for dataset, use in zip(found, ("training", "held-out"), strict=True):
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"{expected} each with __len__ and __getitem__, got a {type(dataset).__name__} "
                "without them"
            )
        if not len(dataset):
            raise ConfigError(
                f"{expected} each with at least one sample, got none for the {use} data"
            )
    return found[0], found[1]


def open_datasets(
    recipe: Recipe, directory: Path, config: TrainingConfig
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the recipe's training and held-out data, checked. It draws the same in every process
    of a run.

    So a split without a seed is one split: of all ranks, after a resume, and of who compares two
    models later.
    """
    with isolate_draws([]):
        seed_generators(derived_seed(config.seed, *b"datasets"))
        return check_datasets(recipe, recipe.datasets(directory))


def check_model(recipe: Recipe, found: Any) -> nn.Module:
    """Return the model that `recipe.model` has returned. Raises ConfigError if it is none, or not
    whole.
    """
    if not isinstance(found, nn.Module):
        got = (
            f"the class {found.__name__}"
            if isinstance(found, type)
            else f"a {type(found).__name__}"
        )
        raise ConfigError(f"{locate(recipe, 'model')}: expected an nn.Module, got {got}")
    tensors = [*found.named_parameters(), *found.named_buffers()]
    if lazy := [name for name, each in tensors if is_lazy(each)]:
        raise ConfigError(
            f"{locate(recipe, 'model')}: expected parameters with a shape, got none yet for "
            f"{abbreviate(lazy, MAX_NAMES)}: give each layer the number of its inputs, as "
            "nn.Linear for nn.LazyLinear, "
            "or call the model on a sample before it is returned"
        )
    return found


def check_contract(
    recipe: Recipe,
    model: nn.Module,
    train: Samples,
    config: TrainingConfig,
    world: World,
    held_out: Samples | None = None,
) -> None:
    """Check what the recipe's methods return for a first micro-batch. Every rank calls it, at a new
    run's start.

    What the methods, the model and the data change is put back: see `unchanged`.

    Raises:
        ConfigError: a method broke its contract; one line.
        DataError: the default losses are for classes, and a target is none; one line.
    """
    size = len(train)
    if config.global_batch_size > size:
        expected = f"expected at most {size}, the number of training samples"
        raise ConfigError(f"global_batch_size: {expected}, got {config.global_batch_size}")
    per_rank, without = config.batch.size_per_rank(world.world_size), list[str]()
    for num_samples in sorted({min(per_rank, MAX_SAMPLES), per_rank}):
        with unchanged(model, recipe, getattr(train, "dataset", None)):
            first = torch.arange(num_samples, device=train.index_device)
            inputs, targets = next(iter(train.batches([first], epoch=1)))
            model.train()
            try:
                with (
                    autocast(config, world.device) if not is_sharded(model) else torch.enable_grad()
                ):
                    outputs = _call_model(recipe, model, model_inputs(recipe, config, inputs))
            except Exception:
                # the pass of a part of the ranks would hang
                if num_samples == per_rank or is_sharded(model):
                    raise
                continue  # a model may have a state of a whole batch from its start
            if num_samples == 1 and isinstance(outputs, Tensor) and outputs.shape[:1] == (1,):
                # With another, as larger batches of the evaluation would broadcast where a batch of
                # one does not.
                outputs, num_samples = torch.cat([outputs, outputs / 2]), 2
                targets = map_tensors(
                    lambda each: torch.cat([each, torch.zeros_like(each)]), targets
                )
            if _find_base(recipe, "losses") is Recipe:
                for each in (
                    targets,
                    getattr(train, "targets", None),
                    getattr(held_out, "targets", None),
                ):
                    check_classes(outputs, each)
            losses = _check_results(recipe, config, outputs, targets, num_samples)
            (losses.sum() * 0.0).backward()
            trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
            without = [name for name, each in trained.items() if each.grad is None]
            if sparse := [
                name
                for name, each in trained.items()
                if each.grad is not None and each.grad.is_sparse
            ]:
                raise ConfigError(
                    f"{locate(recipe, 'model')}: expected dense gradients, which optimizers here "
                    "take, got "
                    f"sparse ones of {abbreviate(sparse, MAX_NAMES)}: leave out sparse=True, as "
                    "of nn.Embedding"
                )
            break
    if without:
        raise ConfigError(
            f"{locate(recipe, 'model')}: expected a gradient for every parameter, got none for "
            f"{abbreviate(without, MAX_NAMES)}: use them in the forward pass, or freeze them by "
            "requires_grad_(False)"
        )


def _call_model(recipe: Recipe, model: nn.Module, inputs: Any) -> Any:
    try:
        return model(inputs)
    except Exception as error:
        if frames_of_user(error):
            raise  # they say more
        expected = (
            f"{locate(recipe, 'model')}: expected a model of the samples' inputs, here "
            f"{_shapes(inputs)}"
        )
        raise ConfigError(f"{expected}, got {_describe(error)}") from error


def _check_results(
    recipe: Recipe, config: TrainingConfig, outputs: Any, targets: Any, num_samples: int
) -> Any:
    """Check `losses`, `num_targets` and the metrics; return the losses."""
    try:
        losses: Any = _call(recipe, "losses", outputs, targets)
    except Exception:
        _check_broadcast(recipe, outputs, targets, None, None)
        raise
    fewer = _losses_of_fewer(recipe, outputs, targets, num_samples)
    _check_broadcast(recipe, outputs, targets, losses, fewer)
    _check_shape(
        recipe, "losses", "one loss for each sample", losses, num_samples, outputs, targets
    )
    if fewer is not None:  # a dimension may have the length of the batch by chance
        _check_shape(
            recipe,
            "losses",
            "one loss for each sample",
            fewer,
            num_samples - 1,
            outputs[:-1],
            targets[:-1],
        )
    if not losses.is_floating_point():
        raise ConfigError(
            f"{locate(recipe, 'losses')}: expected floating-point losses, got {losses.dtype}"
        )
    if not losses.requires_grad:
        raise ConfigError(
            f"{locate(recipe, 'losses')}: expected losses with a gradient, got some without: "
            "do "
            "not detach"
        )
    with torch.no_grad():
        counts = _call(recipe, "num_targets", targets)
        if counts is not None:
            _check_shape(
                recipe,
                "num_targets",
                "the number of each sample's targets",
                counts,
                num_samples,
                None,
                targets,
            )
        most = torch.ones(num_samples, device=losses.device) if counts is None else counts
        _check_metrics(recipe, config, outputs, targets, most.to(losses.device))
    return losses


def _losses_of_fewer(recipe: Recipe, outputs: Any, targets: Any, num_samples: int) -> Any:
    """Return the losses without the last sample; None where outputs or targets are not by sample,
    or the method fails.

    Outputs may be in another order, such as (T, B, V) or (B x T, V).
    """
    if num_samples == 1 or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if outputs.shape[:1] != (num_samples,) or targets.shape[:1] != (num_samples,):
        return None
    try:
        return _call(recipe, "losses", outputs[:-1], targets[:-1])
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
    if (
        isinstance(losses, Tensor)
        and isinstance(fewer, Tensor)
        and losses.dim() == fewer.dim() == 1
    ):
        first = losses[: len(fewer)]
        if first.shape == fewer.shape and torch.allclose(first, fewer, equal_nan=True):
            return
    raise ConfigError(
        f"{locate(recipe, 'model')}: expected outputs of the targets' shape "
        f"{tuple(targets.shape)}, got "
        f"{tuple(outputs.shape)}, which broadcast to {tuple(together)}: squeeze or unsqueeze one "
        "of them"
    )


def _check_num_correct(recipe: Recipe, outputs: Any, targets: Any, counts: Tensor) -> None:
    correct = _call(recipe, "num_correct", outputs, targets)
    what = "the number of each sample's targets that are predicted right"
    _check_shape(recipe, "num_correct", what, correct, len(counts), outputs, targets)
    if bool(((correct < 0) | (correct > counts)).any()):
        raise ConfigError(
            f"{locate(recipe, 'num_correct')}: expected at most {_number(counts.max())} for a "
            "sample, the number of "
            f"its targets, got {_number(correct.max())}; a sample with several targets needs "
            "num_targets"
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
    if base := _find_base(recipe, method):
        hint = f": {BASES[base]}, so the recipe needs a method of its own"
    elif value.dim() == 0:
        hint = ": use reduction='none'" if method == "losses" else ": do not sum over the samples"
    elif value.dim() > 1 and len(value) == num_samples:
        hint = ": sum over a sample's targets, as by .flatten(1).sum(1)"
        if method == "losses":
            hint += ", and return their number by num_targets"
    shapes = (
        f" (outputs {_shapes(outputs)}, targets {_shapes(targets)})" if outputs is not None else ""
    )
    raise ConfigError(f"{expected} got shape {tuple(value.shape)}{hint}{shapes}")


def _call(recipe: Recipe, method: str, *arguments: Any) -> Any:
    """Call a method; of one that the recipe did not define, explain an error by what it is made
    for.
    """
    try:
        return getattr(recipe, method)(*arguments)
    except Exception as error:
        base = _find_base(recipe, method)
        if not base:
            raise  # the user's own frames say more
        shapes = ", ".join(
            f"{name} {_shapes(each)}"
            for name, each in zip(("outputs", "targets"), arguments, strict=False)
        )
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{locate(recipe, method)}: expected a method of the recipe's own, because "
            f"{BASES[base]}, got {shapes}: "
            f"{reason}"
        ) from error


def _find_base(recipe: Recipe, method: str) -> type[Recipe] | None:
    """Return the base class of this package that the method comes from; None if the recipe defines
    it.
    """
    own = getattr(type(recipe), method)
    return next((base for base in BASES if vars(base).get(method) is own), None)


def _check_metrics(
    recipe: Recipe, config: TrainingConfig, outputs: Any, targets: Any, counts: Tensor
) -> None:
    """Check `metrics`, what `monitor` names of them, and `figures`."""
    place = locate(recipe, "metrics")
    try:
        metrics = HeldOutMetrics(recipe, counts.device)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    for name, function in metrics.functions.items():
        if function == recipe.num_correct:
            _check_num_correct(recipe, outputs, targets, counts)
            continue
        value = function(outputs, targets)
        _check_shape(recipe, "metrics", f"{name} of each sample", value, len(counts))
        if name == "accuracy" and bool((value > counts).any()):  # which is shown in percent
            expected = (
                f"expected at most {_number(counts.max())} for a sample, the number of its targets"
            )
            raise ConfigError(f"{place}: {name}: {expected}, got {_number(value.max())}")
    names = ["test_loss", *metrics.functions]
    for name, metric in metrics.objects.items():
        metric.sync_on_compute = False
        try:
            metric.update(metrics.predict(outputs), targets)
        except Exception as error:
            if frames_of_user(error):
                raise
            shapes = f"outputs {_shapes(outputs)}, targets {_shapes(targets)}"
            raise ConfigError(f"{place}: {name}: {_describe(error)} ({shapes})") from error
        names += _read_names(name, metric, place)
    epoch = EpochFinished(1, 1, 0.5, 0.5, 0.1, 1.0, 1.0, 1.0, metrics=dict.fromkeys(names, 0.5))
    try:
        names += read_figures(recipe, epoch)
    except ConfigError as error:
        raise ConfigError(f"{locate(recipe, 'figures')}: {str(error).partition(': ')[2]}") from None
    except Exception:  # these figures are not a real epoch's
        return  # the trainer checks the monitor after the first one
    check_monitor(config, names)


def _read_names(name: str, metric: Any, place: str) -> list[str]:
    """Return the names of a metric's values; they must be single numbers."""
    try:
        value = metric.compute()
    except Exception:  # some need more samples than these
        return [name]
    try:
        return list(read_value(name, value))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _shapes(value: Any) -> str:
    shapes = [str(tuple(each.shape)) for each in tensors_in(value)]
    return ", ".join(shapes) or type(value).__name__


def _describe(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {reason}"


def _number(value: Tensor) -> str:
    return f"{float(value):g}"
