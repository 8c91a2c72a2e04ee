"""Put back what a look at a model leaves behind, so that a run with the look ends as one without
it.

A module may keep anything between two batches: a hidden state, a counter, a target network. It is
put back in place, not tried on a deep copy: locks, CUDA graphs and split models have no copy, and a
hook may refer to the original.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.utils.data import Dataset

from flyte_ddp.checkpoints.state import is_split, local_part
from flyte_ddp.rank.sharding import is_sharded, reshard
from flyte_ddp.recipes import Recipe

MAX_DATA_BYTES = 64 << 20  # the largest array that is copied, unless it is a weight
MAX_ENTRIES, MAX_OBJECTS = 10_000, 1_000_000  # limits for one container, and for all objects
OWN = (nn.Module, Recipe, Optimizer, Dataset)  # objects that are copied in any package
# Packages whose objects, other than `OWN`, are left alone: compiled code, or the run itself.
CLOSED = {*sys.stdlib_module_names, "torch", "numpy", "flyte_ddp"} - {"types"}
# packages whose objects may change by themselves
THREADS = {"threading", "queue", "_queue", "concurrent", "multiprocessing"}
# objects that the first pass initializes
LAZY = (LazyModuleMixin, UninitializedParameter, UninitializedBuffer)
MODULE_FIELDS = [name for name, each in vars(nn.Module()).items() if isinstance(each, dict)]
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of a tensor
# True within `unchanged`, where an optimizer's step is no step of the training
is_look = contextvars.ContextVar("is_look", default=False)


@contextlib.contextmanager
def unchanged(model: nn.Module, *others: object) -> Iterator[None]:
    """Restore `model`, `others` and the random generators after the block, with the objects to
    which they refer.

    This includes weights, buffers, gradients, hooks, modes, and the values of attributes. It does
    not include the values in closures, classes and modules, iterators, files, and large arrays that
    are no weights.
    """
    reshard(model)
    weights = [*model.parameters(), *model.buffers()]
    snapshot = _Snapshot(weights)
    # torch keeps gathered weights in these fields, and adds hooks in the first forward pass.
    if is_sharded(model):
        for module in model.modules():
            snapshot.seen |= {
                id(each): each for name, each in vars(module).items() if name in MODULE_FIELDS
            }
    # The modules hide their generators, but not the generators' methods.
    hidden: Any = (random.random, numpy.random.rand)
    generators = [torch.default_generator, *(method.__self__ for method in hidden)]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    snapshot.take([*model.modules(), *weights, *others, *generators])
    before = is_look.set(True)
    try:
        yield
    finally:
        is_look.reset(before)
        reshard(model)
        with torch.no_grad():
            for restore in snapshot.undo:
                restore()


@dataclass(eq=False, repr=False)
class _Snapshot:
    """The calls that restore objects and all objects to which they refer."""

    given: InitVar[list[Tensor]]  # the weights
    undo: list[Callable[[], object]] = field(default_factory=list)
    # objects by their ids; while an object is here, no other object gets its id
    seen: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self, given: list[Tensor]) -> None:
        self.weights = {id(each) for each in given}
        num_bytes = sum(each.numel() * each.element_size() for each in given if each.is_cuda)
        self.uses_cpu = bool(num_bytes) and 2 * num_bytes > torch.cuda.mem_get_info()[0]

    def take(self, values: Iterable[Any]) -> None:
        waiting = list(values)
        while waiting and len(self.seen) < MAX_OBJECTS:
            value = waiting.pop()
            if id(value) not in self.seen:
                self.seen[id(value)] = value
                # an object of another library may refuse to be looked at
                with contextlib.suppress(Exception):
                    waiting += self._take(value)

    def _take(self, value: Any) -> Iterable[Any]:
        """Remember `value` itself, and return what it refers to."""
        parts: Iterable[Any] = ()
        if isinstance(value, Tensor):
            parts = self._take_tensor(value)
        elif isinstance(value, (dict, list, set, deque, bytearray)):
            parts = self._take_container(value)
        elif isinstance(value, (tuple, frozenset)):
            parts = ()
            if len(value) <= MAX_ENTRIES:
                parts = value
        elif isinstance(value, numpy.ndarray):
            if value.nbytes <= MAX_DATA_BYTES and value.flags.writeable:
                self.undo.append(partial(numpy.copyto, value, value.copy()))
        elif isinstance(value, random.Random):
            self.undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, (torch.Generator, numpy.random.RandomState)):
            found: Any = value
            self.undo.append(partial(found.set_state, found.get_state()))
        elif isinstance(value, numpy.random.Generator):
            self.undo.append(
                partial(setattr, value.bit_generator, "state", value.bit_generator.state)
            )
        else:
            parts = self._take_object(value)
        return parts

    def _take_tensor(self, tensor: Any) -> list[Any]:
        if isinstance(tensor, LAZY) or tensor.is_meta or tensor.is_inference():
            return []
        data = local_part(tensor).detach()
        is_weight = id(tensor) in self.weights
        if not is_weight and data.numel() * data.element_size() > MAX_DATA_BYTES:
            return []
        device = data.device
        if is_weight and self.uses_cpu:
            device = torch.device("cpu")
        copied = data.to(device, copy=True)
        self.undo.append(partial(_restore_tensor, tensor, data, copied))
        if not tensor.is_leaf:
            return []
        hooks = [getattr(tensor, name) for name in HOOKS]
        self.undo.append(partial(_restore_leaf, tensor, tensor.requires_grad, tensor.grad, hooks))
        return [*hooks, tensor.__dict__]

    def _take_container(self, value: Any) -> Iterable[Any]:
        copied: Any = dict(value) if isinstance(value, dict) else list(value)
        self.undo.append(partial(_restore_container, value, copied))
        if len(value) > MAX_ENTRIES or isinstance(value, bytearray):
            return ()
        return _entries(value)

    def _take_object(self, value: Any) -> Iterable[Any]:
        kind, attributes = type(value), getattr(value, "__dict__", {})
        is_own = isinstance(value, OWN) and not isinstance(value, LAZY)
        if not is_own and (
            _package(kind) in CLOSED
            or THREADS & {_package(type(each)) for each in attributes.values()}
        ):
            return ()
        names = [
            name
            for each in kind.__mro__
            for name in getattr(each, "__slots__", ())
            if hasattr(value, name)
        ]
        slots = {name: getattr(value, name) for name in names if not name.startswith("__")}
        for name, each in slots.items():
            self.undo.append(partial(object.__setattr__, value, name, each))
        return attributes, *slots.values()


def _package(owner: Any) -> str:
    return str(owner.__module__).partition(".")[0]


def _entries(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return [*container]


def _restore_tensor(tensor: Any, data: Tensor, copied: Tensor) -> None:
    # Tensors whose entries share memory, such as the results of `expand`, cannot be written.
    with contextlib.suppress(RuntimeError):
        data.copy_(copied)
    if (
        tensor.layout is torch.strided
        and not is_split(tensor)
        and tensor.data_ptr() != data.data_ptr()
    ):
        tensor.data = data


def _restore_leaf(tensor: Any, requires_grad: bool, grad: Tensor | None, hooks: list[Any]) -> None:
    tensor.requires_grad, tensor.grad = requires_grad, grad
    for name, before in zip(HOOKS, hooks, strict=True):
        if before is None and getattr(tensor, name):
            getattr(tensor, name).clear()


def _restore_container(container: Any, copied: Any) -> None:
    if list(map(id, _entries(container))) != list(map(id, _entries(copied))):
        container.clear()
        if isinstance(container, (dict, set)):
            container.update(copied)
        else:
            container.extend(copied)
