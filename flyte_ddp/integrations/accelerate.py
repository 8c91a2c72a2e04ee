"""The session for Hugging Face's Accelerate.

    from flyte_ddp.integrations.accelerate import prepare

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

in place of `accelerator.prepare(model, optimizer, loader)`. The loop over the loader then continues
from the newest checkpoint: in an epoch that is done it yields nothing. Accelerate draws the samples
itself. The global batch, and with it the samples of each optimizer step, stay the same at any
number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from flyte_ddp import session
from flyte_ddp.errors import ConfigError
from flyte_ddp.integrations import loaders, training
from flyte_ddp.rank.batches import rank_and_world_size

SAVE_STEPS = 100  # optimizer steps between two checkpoints


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    save_steps: int = SAVE_STEPS,
    global_batch_size: int | None = None,
) -> Any:
    """Prepare objects as `accelerator.prepare`, and have the session keep, resume and end their
    training.

    Under torchrun it is `accelerator.prepare`. Values for `accelerator.log` are reported to the
    run.

    Args:
        objects: a model, optimizers, DataLoaders and others. The first DataLoader is the training's
            loader. Other objects with a state, such as schedulers, are saved too.
        save_steps: optimizer steps between two checkpoints.
        global_batch_size: samples of all ranks' batches together, at any number of ranks; by
            default the loader's batch size times the number of ranks with which the run began.

    Raises:
        ConfigError: there is no model or no DataLoader, the model is split in an unsupported way,
            the ranks do not share the global batch evenly, or it is the second call in a run.

    Example:
        # in every rank
        accelerator = Accelerator()
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
        for epoch in range(10):
            for inputs, targets in loader:
                accelerator.backward(functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    """
    if not session.is_in_run():
        return accelerator.prepare(*objects)
    check_split(accelerator)
    training.begin("prepare")
    kinds = [isinstance(each, nn.Module) for each in objects]
    index = next((index for index, each in enumerate(objects) if isinstance(each, DataLoader)), -1)
    if sum(kinds) != 1 or index < 0:
        raise ConfigError(
            f"prepare: expected one model and a DataLoader, got {sum(kinds)} models among "
            f"{len(objects)}"
        )
    # The loader is prepared last, because the checkpoint may change its batch size. The objects are
    # returned in the user's order.
    others = accelerator.prepare(*objects[:index], *objects[index + 1 :])
    prepared = [others]
    if len(objects) > 2:
        prepared = list(others)
    task = _Training(accelerator, prepared, objects[index], save_steps, global_batch_size)
    prepared.insert(index, task)
    log = accelerator.log

    def report_and_log(values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        session.report(step=session.current().reporter.step, **training.select_numbers(values))
        log(values, step, **options)

    accelerator.log = report_and_log
    return tuple(prepared)


def check_split(accelerator: Accelerator) -> None:
    """Raise ConfigError if the model is split in another way than by FSDP2."""
    kind, layout = accelerator.distributed_type, accelerator.parallelism_config
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        got: Any = "FSDP1"
    elif layout and layout.non_data_parallel_size > 1:
        got = layout
    elif kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        got = kind.value
    else:
        return
    raise ConfigError(
        "accelerator: expected DDP, or FSDP2 by an fsdp_version of 2, of which each rank has "
        f"its own samples, got {got}"
    )


class _Training:
    """A training's loader, which also keeps the training's checkpoints. Each body of the loop over
    it is a step of the training.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        prepared: list[Any],
        loader: Any,
        save_steps: int,
        total: int | None,
    ) -> None:
        self.accelerator = accelerator
        self.save_steps = save_steps
        self.epoch = 0  # number of the next pass
        self._model = accelerator.unwrap_model(
            next(each for each in prepared if isinstance(each, nn.Module))
        )
        optimizers: list[Any] = [each for each in prepared if isinstance(each, Optimizer)]
        self._optimizers = [getattr(each, "optimizer", each) for each in optimizers]
        self._has_stepped = False  # An optimizer has taken a step since the last batch.
        for each in optimizers:
            # The method is wrapped, because only optimizers derived from torch's have hooks.
            each.step = self._noting(each.step)
        # The epoch, the number and the generator's state of the batch in the loop's body. When a
        # loop ends early, they stay those of its last batch.
        self._given: tuple[int, int, torch.Tensor] | None = None
        self._others = [
            each
            for each in (*prepared, accelerator.scaler)
            if hasattr(each, "load_state_dict")
            and not isinstance(each, (nn.Module, Optimizer, DataLoader))
        ]
        self._found = training.load(self._model, self._optimizers, self._others)
        self._kept, share = loaders.share_batch(
            loader.dataset, self._found, total, loader.batch_size, rank_and_world_size()[1]
        )
        # generator that draws the order of the samples
        self._generator = getattr(loader.sampler, "generator", None) or torch.Generator()
        if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
            # Accelerate does the same for several ranks. A single rank would draw the order from
            # the process's own generator.
            loader.sampler.generator = self._generator
            self._generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        self.loader = accelerator.prepare(loaders.with_batches(loader, share))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._end_left_pass()
        epoch, found = self.epoch, self._found
        self.epoch += 1
        if found and epoch < found["epoch"]:
            return
        self._found = None
        first = 0
        if found:
            first = found["num_batches"]
            self._generator.set_state(torch.tensor(list(found["order"]), dtype=torch.uint8))
        order = self._generator.get_state()
        self.loader.set_epoch(epoch)
        batches = self.loader
        if first:
            batches = skip_first_batches(self.loader, first)
        batches.set_epoch(epoch)
        for number, batch in enumerate(batches, first + 1):
            if found and number == first + 1:
                training.set_generators(found)
            self._given, self._has_stepped = (epoch, number, order), False
            yield batch
            self._given = None
            self._end_step(epoch, number, order, number == len(self.loader))

    def _noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def take_step(*arguments: Any, **options: Any) -> Any:
            self._has_stepped = True
            return step(*arguments, **options)

        return take_step

    def _end_left_pass(self) -> None:
        """End the last step of a pass that was left early. The loop may have taken the last batch
        without training on it; then there is no step to end.
        """
        given, self._given = self._given, None
        if given is not None and self._has_stepped:
            self._end_step(*given, is_last=True)

    def _end_step(self, epoch: int, number: int, order: torch.Tensor, is_last: bool) -> None:
        """Report a step, save if a checkpoint is due, and end the run if it has to stop.

        Args:
            number: number of the batch in the epoch.
            order: state of the generator that draws the order of the epoch.
            is_last: no other batch of the epoch follows.
        """
        if not self.accelerator.sync_gradients:
            training.beat()
            return
        step = session.current().reporter.step + 1
        place = epoch, number, order
        if is_last:
            place = epoch + 1, 0, self._generator.get_state()
        session.report(step=step, epoch=epoch + number / len(self.loader))
        if step % self.save_steps == 0:
            self.save(*place)
        training.end_if_stopped(lambda: self.save(*place))

    def save(self, epoch: int, num_batches: int, order: torch.Tensor) -> None:
        """Save the training as it is after an optimizer step. All ranks must call it together.

        Args:
            order: state of the generator that draws the order of the epoch.
        """
        values = {
            **self._kept,
            "epoch": epoch,
            "num_batches": num_batches,
            "order": bytes(order.tolist()),
        }
        step = session.current().reporter.step
        training.save(self._model, self._optimizers, self._others, step, values)
