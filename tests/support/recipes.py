"""Tiny recipes that ranks find by dotted name, with faults that a test switches on through the
environment.

FAULT="kind rank step" makes the rank with that number do `kind` in its step with that number,
counted from the start of its process. RECORD=directory makes every rank note there which samples it
computed losses of. STEP_SECONDS, WRITE_SECONDS and PREPARE_SECONDS slow training steps, a rank's
writes of files and the preparation of data down, for tests that have to meet a run on its way.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flyte_ddp.recipes import Recipe
from flyte_ddp.recipes.arrays import load_arrays

NUM_FEATURES, NUM_CLASSES = 8, 3


class Faulty(Recipe):
    """Meets the fault that `FAULT` names."""

    _num_steps = 0

    def meet_fault(self, losses):
        self._num_steps += 1
        kind, rank, step = os.environ.get("FAULT", "none 0 0").split()
        if int(rank) == _rank() and int(step) == self._num_steps:
            losses = FAULTS[kind](losses)
        return losses


class Tiny(Faulty):
    """A small MLP. Targets are (class, sample number) pairs, so that a loss knows its sample."""

    # 97 leaves one sample for the last of the batches of 12: fewer than ranks
    num_train, num_test = 97, 17
    defaults = {
        "epochs": 3,
        "global_batch_size": 12,
        "evaluation_batch_size": 4,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "schedule": "constant",
        "log_interval": 1,
        "model_state": "last",  # a plain loop ends with the last state too
    }

    def prepare(self, source, directory):
        print("preparing", flush=True)
        time.sleep(float(os.environ.get("PREPARE_SECONDS", 0)))
        random_state = np.random.RandomState(int(source or 0))
        for name, size in (("train", self.num_train), ("test", self.num_test)):
            inputs = random_state.standard_normal((size, NUM_FEATURES)).astype(np.float32)
            np.savez(
                directory / f"{name}.npz",
                images=inputs,
                labels=self.draw_targets(random_state, size),
            )
        return f"{self.num_train} samples of noise, seed {source or 0}"

    def draw_targets(self, random_state, size):
        return np.stack([random_state.randint(NUM_CLASSES, size=size), np.arange(size)], axis=1)

    def datasets(self, directory):
        print("the data are opened")
        _slow_down_writes(float(os.environ.get("WRITE_SECONDS", 0)))
        return load_arrays(directory / "train.npz"), load_arrays(directory / "test.npz")

    def model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))

    def losses(self, outputs, targets):
        losses = self.plain_losses(outputs, targets)
        if not outputs.requires_grad:
            _record("test", targets[:, -1].tolist())
            return losses
        pace = (
            "ALONE_SECONDS"
            if os.environ.get("ALONE_SECONDS") and _world_size() == 1
            else "STEP_SECONDS"
        )
        time.sleep(float(os.environ.get(pace, 0)))
        if "RECORD" in os.environ:
            # A sample counts in training by the gradient of its loss; one repeated to fill an empty
            # share has none.
            losses.register_hook(
                lambda gradient: _record("train", targets[:, -1].tolist(), gradient.tolist())
            )
        return self.meet_fault(losses)

    def plain_losses(self, outputs, targets):
        return super().losses(outputs, targets[:, 0])

    def num_correct(self, outputs, targets):
        return super().num_correct(outputs, targets[:, 0])

    def report_samples(self, batch, outputs, targets):
        if os.environ.get("TELL_MODULES"):
            print(f"torch._dynamo imported: {'torch._dynamo' in sys.modules}")
        return super().report_samples(batch, outputs, targets[:, 0])


class Skipping(Tiny):
    """Each rank leaves out a layer of some of its steps, by chance, as stochastic depth does."""

    def model(self):
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
                self.norm = nn.BatchNorm1d(NUM_FEATURES)
                self.last = nn.Linear(NUM_FEATURES, NUM_CLASSES)

            def forward(self, inputs):
                if not self.training or torch.rand(()) < 0.4:
                    inputs = inputs + self.first(inputs)
                return self.last(self.norm(inputs))

        return Net()


@dataclass
class Optional(Tiny):
    """With options of its own."""

    width: int = 16
    slope: float = 0.5
    activation: str = "tanh"
    biased: bool = True
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(
                f"width: {self.width} is out of range; accepted is a whole number of at least 1"
            )

    def prepare(self, source, directory):
        return super().prepare(source, directory) + f", for width {self.width}"

    def model(self):
        from torch import nn

        return nn.Sequential(
            nn.Linear(NUM_FEATURES, self.width, bias=self.biased),
            nn.Tanh(),
            nn.Linear(self.width, NUM_CLASSES),
        )


@dataclass
class WithToken(Optional):
    """Adds an option with the name of a secret."""

    token: str = ""


@dataclass
class WithDefaultToken(WithToken):
    """The default of that option is hidden, too."""

    token: str = "such as this default"


class Restarting(Tiny):
    """With an optimizer and a schedule of its own."""

    def optimizer(self, model, config):
        import torch

        named = dict(model.named_parameters())
        biases = [each for name, each in named.items() if name.endswith("bias")]
        weights = [each for name, each in named.items() if name.endswith("weight")]
        groups = [{"params": weights}, {"params": biases, "lr": 2 * config.learning_rate}]
        return torch.optim.Adagrad(groups, lr=config.learning_rate)

    def schedule(self, optimizer, config, num_steps):
        from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

        return CosineAnnealingWarmRestarts(optimizer, T_0=num_steps // 4)


class Dropping(Tiny):
    """Adds dropout. A resumed run has to repeat its draws."""

    def model(self):
        from torch import nn

        return nn.Sequential(
            nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, NUM_CLASSES)
        )


class Normed(Tiny):
    """Adds BatchNorm. Its running statistics differ between ranks while they train."""

    num_train = 103

    def model(self):
        from torch import nn

        return nn.Sequential(
            nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, NUM_CLASSES)
        )


class NormedWithOneLeft(Normed):
    """Leaves one sample for the last batch, over which BatchNorm cannot compute a variance."""

    num_train = Tiny.num_train


class NormedByBatch(NormedWithOneLeft):
    """Its BatchNorm has no running statistics, not even in an evaluation. The last batch of the
    evaluation has one sample too.
    """

    def model(self):
        from torch import nn

        norm = nn.BatchNorm1d(16, track_running_stats=False)
        return nn.Sequential(
            nn.Linear(NUM_FEATURES, 16), norm, nn.Tanh(), nn.Linear(16, NUM_CLASSES)
        )


class Unshown(Tiny):
    """Trains, but neither its layers nor its predictions can be shown."""

    def model(self):
        from torch import nn

        class Unhooked(nn.Linear):
            def register_forward_hook(self, *arguments, **options):
                raise RuntimeError("no hooks on purpose")

        return nn.Sequential(Unhooked(NUM_FEATURES, NUM_CLASSES))

    def report_samples(self, batch, outputs, targets):
        raise KeyError("no such class")


class Volumes(Tiny):
    """With a 3-D convolution."""

    def model(self):
        from torch import nn

        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 2, 2)),
            nn.Conv3d(1, 4, 2),
            nn.Flatten(),
            nn.Linear(4, NUM_CLASSES),
        )


class Sequences(Tiny):
    """Up to four targets per sample, (N, 4), padded with -1: a mean over targets is not one over
    samples.
    """

    num_train, length = 103, 4

    def draw_targets(self, random_state, size):
        targets = random_state.randint(NUM_CLASSES, size=(size, self.length))
        lengths = random_state.randint(1, self.length + 1, size=(size, 1))
        return np.where(np.arange(self.length) < lengths, targets, -1)

    def model(self):
        from torch import nn

        return nn.Sequential(
            nn.Linear(NUM_FEATURES, self.length * NUM_CLASSES),
            nn.Unflatten(1, (self.length, NUM_CLASSES)),
        )

    def plain_losses(self, outputs, targets):
        from torch.nn import functional

        losses = functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
        )
        return losses.view_as(targets).sum(dim=1)

    def num_correct(self, outputs, targets):
        return (outputs.argmax(dim=2) == targets).sum(dim=1)

    def num_targets(self, targets):
        return (targets >= 0).sum(dim=1)

    def report_samples(self, batch, outputs, targets):
        return []


class Listed(Tiny):
    """The data of `Tiny`, read sample by sample through a DataLoader."""

    augmented = False

    def datasets(self, directory):
        train, test = super().datasets(directory)
        return _List(train.tensors, self.augmented), _List(test.tensors, augmented=False)


class Augmented(Listed, Dropping):
    """Random changes to samples, from each of the generators that augmentations draw from, beside
    dropout.
    """

    augmented = True


class _List:
    def __init__(self, tensors, augmented):
        self.inputs, self.targets = tensors
        self.augmented = augmented

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        import torch

        noise = (
            torch.rand(()) + random.random() + float(np.random.rand()) if self.augmented else 0.0
        )
        return self.inputs[index] + noise, self.targets[index]


not_a_recipe = "something else"


def _raise(losses):
    raise ValueError("broken on purpose")


def _hang(losses):
    print("this rank hangs on purpose")
    while True:
        time.sleep(0.05)


def _stop(losses):
    print("this rank hangs on purpose", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return losses


def _kill(losses):
    print("this rank is killed on purpose")
    os.kill(os.getpid(), signal.SIGKILL)


def _infinite_gradient(losses):
    losses.register_hook(lambda gradient: gradient * float("inf"))
    return losses


def _cuda_oom(losses):
    """Fail like a GPU with memory for three samples."""
    import torch

    if len(losses) > 3 and losses.is_cuda:
        torch.empty(1 << 50, device=losses.device)  # a petabyte
    elif len(losses) > 3:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return losses


def _fork_and_kill(losses):
    if os.fork() == 0:
        time.sleep(600)  # The child holds the rank's pipes open.
    _kill(losses)


def _leak(losses):
    print("reading https://host/a?X-Amz-Signature=hunter2")
    raise ConnectionError("403 for https://host/a?X-Amz-Signature=hunter2")


FAULTS = {
    "cuda-oom": _cuda_oom,
    "fork-kill": _fork_and_kill,
    "leak": _leak,
    "infinite-gradient": _infinite_gradient,
    "none": lambda losses: losses,
    "nan": lambda losses: losses * float("nan"),
    "raise": _raise,
    "hang": _hang,
    "kill": _kill,
    "stop": _stop,
}


def _world_size():
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def _slow_down_writes(seconds):
    from flyte_ddp.storage import Storage

    write = Storage._write

    def write_slowly(*arguments):
        time.sleep(seconds)
        write(*arguments)

    if seconds:
        Storage._write = write_slowly


def _rank():
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def _record(split, samples, gradients=()):
    if directory := os.environ.get("RECORD"):
        path = Path(directory) / f"{split}-{_rank()}.jsonl"
        if gradients and not any(gradients) and not path.exists():
            return  # the check of the recipe before the first step
        with open(path, "a") as file:
            file.write(json.dumps([samples, list(gradients)]) + "\n")
