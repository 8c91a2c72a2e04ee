"""Read the tensors that a run has left: in files of torch, numpy and safetensors, and in its newest
checkpoint.

Classes of the user's own are not imported: what they hold is read without them.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from flyte_ddp.checkpoints.assembly import read_alone
from flyte_ddp.checkpoints.files import is_manifest, is_tensors
from flyte_ddp.rehearsal.seen import CHECKPOINTS, list_left
from flyte_ddp.storage import Storage
from flyte_ddp.storage.state_dict_file import from_bytes

MAX_BYTES = 2**31  # bytes of a file that is read
NUM_VALUES = 16  # values of each tensor that are compared, besides sums
# Packages of the classes that are made.
KNOWN = ("torch", "numpy", "collections", "builtins", "_codecs")


class Unknown:
    """An object of a class that is not imported: a list, a mapping or any other."""

    arguments: tuple[Any, ...]
    parts: list[Any]

    # pickle makes most objects without `__init__`
    def __new__(cls, *arguments: Any, **_: Any) -> Unknown:
        made = super().__new__(cls)
        made.arguments, made.parts = arguments, []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, part: Any) -> None:
        self.parts.append(part)

    def __setitem__(self, key: Any, part: Any) -> None:
        self.parts.append(part)


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in KNOWN:
            return super().find_class(module, name)
        return Unknown


# `torch.load` expects a module as its argument.
READER = SimpleNamespace(__name__="pickle", Unpickler=Unpickler, load=pickle.load)


def read_tensors(directory: Path) -> dict[str, list[float]]:
    """Return sums and some values of each tensor that a run has left, by its file and place.

    States of random generators, which are bytes, are left out: who draws nothing from them later
    need not restore them.
    """
    found: dict[str, list[float]] = {}
    for file in list_left(directory):
        name = str(file.relative_to(directory))
        if is_manifest(file.name) or is_tensors(file.name) or file.stat().st_size > MAX_BYTES:
            continue
        with contextlib.suppress(Exception):  # half a file of a fault, or a format of its own
            found |= _summarize_all(name, list(_list_tensors(_read(file), "", set())))
    with contextlib.suppress(Exception):  # a fault may have damaged it
        found |= _read_checkpoint(str(directory / CHECKPOINTS))
    return found


def _read_checkpoint(directory: str) -> dict[str, list[float]]:
    """Return the same of the newest checkpoint of a session or a recipe. Its files have random
    names.
    """
    storage = Storage(directory)
    names = [name for name in storage.names() if is_manifest(name)]
    if not names:
        return {}
    newest = max(names)
    state = read_alone(storage, newest)
    return _summarize_all(newest.removesuffix(".json"), _list_tensors(state, "", set()))


def _summarize_all(name: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    return {
        f"{name}: {place}": _summarize(tensor)
        for place, tensor in tensors
        if tensor.dtype != torch.uint8 and not (tensor.is_complex() or tensor.is_meta)
    }


def _read(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return from_bytes(file.read_bytes())
    if file.suffix in (".npy", ".npz"):
        loaded = numpy.load(file)
        return dict(loaded) if file.suffix == ".npz" else loaded
    if zipfile.is_zipfile(file):
        return torch.load(file, map_location="cpu", weights_only=False, pickle_module=READER)
    return None


def _list_tensors(value: Any, place: str, above: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "fiu":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        yield place, value.detach()
        return
    if id(value) in above:  # an object that has itself as a part
        return
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)  # type: ignore[assignment]
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        parts = vars(value).items()
    else:
        return
    for name, part in parts:
        yield from _list_tensors(part, f"{place}.{name}".lstrip("."), above | {id(value)})


def _summarize(tensor: Tensor) -> list[float]:
    values = tensor.reshape(-1).double().nan_to_num()
    some = values[:: max(1, len(values) // NUM_VALUES)][:NUM_VALUES]
    return [float(values.sum()), float(values.abs().sum()), *some.tolist()]
