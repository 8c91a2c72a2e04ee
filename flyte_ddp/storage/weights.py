"""A state dict as a file: torch's own format, or safetensors, which many programs read.

A safetensors file has tensors only. What else a state dict has, such as the sizes that a model
writes into its extra state, is JSON in the file's metadata, under `VALUES`. In both formats the
names of the classes travel with a state: equal shapes do not tell a model of cats and dogs from one
of dogs and cats. Imports torch when it is called.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from flyte_ddp.errors import ConfigError
from flyte_ddp.storage.directory import compute_sha256
from flyte_ddp.storage.urls import redact_url

TORCHVISION = "torchvision:"  # the beginning of an initial state that torchvision publishes
PINNED = re.compile(r"(.+) \(sha256 ([0-9a-f]{64})\)", re.S)
VALUES, CLASS_NAMES = "flyte_ddp.values", "flyte_ddp.class_names"  # keys in the metadata


def pin_state(url: str) -> str:
    """Return the path or URL of a state with the checksum of its contents, which are what counts:
    names are reused.

    As text, such as "s3://bucket/model_state.pt (sha256 ...)", so that whatever is compared or
    stored by it has both.

    One that has its checksum stays as it is, and one without a file: a run that resumes does not
    need it.
    """
    if not url or url.startswith(TORCHVISION) or split_pin(url)[1]:
        return url
    url = url if "://" in url else os.path.abspath(url)
    with contextlib.suppress(FileNotFoundError):
        return f"{url} (sha256 {compute_sha256(url, 'initial_model_state')})"
    return url


def describe_missing(state: str) -> str:
    """Return the error if `pin_state` has found no file; "" if it has, or none is needed."""
    if not state or state.startswith(TORCHVISION) or split_pin(state)[1]:
        return ""
    return (
        "initial_model_state: expected the file of a state dict, got "
        f"{redact_url(state)!r}, where there is none"
    )


def split_pin(state: str) -> tuple[str, str]:
    """Return URL and checksum of what `pin_state` returned; "" for no checksum."""
    match = PINNED.fullmatch(state)
    return (match[1], match[2]) if match else (state, "")


def identify_state(state: str) -> str:
    """Return the checksum of what `pin_state` returned, or its URL, without secrets, if it has
    none.
    """
    url, sha256 = split_pin(state)
    return sha256 or redact_url(url)


def is_same_state(one: str, other: str) -> bool:
    """Compare two states by their checksums, or by their URLs where one has none. Both without
    secrets, or none.
    """
    (url, sha256), (other_url, other_sha256) = split_pin(one), split_pin(other)
    return sha256 == other_sha256 if sha256 and other_sha256 else url == other_url


def with_class_names(state: Mapping[str, Any], names: Sequence[str]) -> OrderedDict[str, Any]:
    """Return `state` with the names of its classes as an attribute: torch.save keeps it,
    load_state_dict ignores it.
    """
    named = OrderedDict(state)
    vars(named)["class_names"] = list(names)
    return named


def class_names_of(state: Any) -> list[str]:
    """Return the names that `with_class_names` gave to `state`; none where they are not known."""
    found = getattr(state, "class_names", None)
    return [str(name) for name in found] if isinstance(found, list) else []


def is_safetensors(contents: bytes) -> bool:
    """Return whether a file begins as safetensors does: the size of a header, and its JSON.

    The first byte alone decides nothing: that of a header of 2,688 bytes is a pickle's.
    """
    return contents[8:9] == b"{" and 8 + int.from_bytes(contents[:8], "little") <= len(contents)


def save_safetensors(state: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
    """Write a state dict of contiguous tensors on the CPU in the format safetensors, from where
    they are in memory.

    Raises:
        OSError: the file cannot be written.
        ValueError: it has something that the format cannot hold; names the key.
    """
    import safetensors.torch
    import torch

    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    values = {name: value for name, value in state.items() if name not in tensors}
    for name, value in values.items():
        if json.loads(json.dumps(value, default=str)) != value:
            raise ValueError(f"{name} is a {type(value).__name__} that JSON cannot hold")
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{name} is no dense tensor")
        if tensor.data_ptr() in addresses:  # tied to another one: the format has no such thing
            tensors[name] = tensor.clone()
        addresses.add(tensor.data_ptr())
    found = {VALUES: values, CLASS_NAMES: class_names_of(state)}
    metadata = {"format": "pt", **{key: json.dumps(value) for key, value in found.items() if value}}
    safetensors.torch.save_file(tensors, file, metadata)


def from_bytes(contents: bytes) -> Any:
    """Return the state dict in a file of either format, or one that `pickle.dumps` has made,
    tensors on the CPU. Unpickles tensors and plain values alone.

    Raises:
        pickle.UnpicklingError, RuntimeError, EOFError: it is no such file.
    """
    if not is_safetensors(contents):
        if contents[:1] == pickle.PROTO:  # of torch's older format the first object is a number
            found = _StateUnpickler(io.BytesIO(contents)).load()
            if not isinstance(found, int):
                return found
        return _load(contents)
    import safetensors.torch

    try:
        tensors: dict[str, Any] = safetensors.torch.load(contents)
        size = int.from_bytes(contents[:8], "little")
        metadata = json.loads(contents[8 : 8 + size]).get("__metadata__", {})
        values, names = (json.loads(metadata.get(key, "[]")) for key in (VALUES, CLASS_NAMES))
        return with_class_names({**tensors, **dict(values)}, names)
    except (safetensors.SafetensorError, ValueError, AttributeError, TypeError) as error:
        raise pickle.UnpicklingError(f"it is no safetensors file: {error}") from error


class _StateUnpickler(pickle.Unpickler):
    """Reads a pickle of tensors and plain values. torch's own reads no protocol above 2."""

    def find_class(self, module: str, name: str) -> Any:
        from torch import _utils

        known = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": _utils._rebuild_tensor_v2,
            "torch._utils._rebuild_parameter": _utils._rebuild_parameter,
            "torch.storage._load_from_bytes": _load,
        }
        if (full := f"{module}.{name}") not in known:
            raise pickle.UnpicklingError(_describe_other(full))
        return known[full]


def _load(contents: bytes) -> Any:
    import torch

    try:
        return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose first line advises to trust the file
        if match := re.search(r"Unsupported (?:global|class)\W.*?(\w+(?:\.\w+)+)", str(error)):
            raise pickle.UnpicklingError(_describe_other(match[1])) from None
        raise


def _describe_other(name: str) -> str:
    return f"it has {name}: expected tensors and plain values, as of torch.save(model.state_dict())"


def load_torchvision_state(name: str) -> Any:
    """Return the published weights called `name`, from torch's own cache on this machine or
    downloaded.

    Args:
        name: `torchvision:` and a model, such as resnet50, whose default weights they are, or
            resnet50.IMAGENET1K_V1.

    Raises:
        ConfigError: there are none of this name, or they cannot be downloaded.
    """
    from torchvision import models

    model, _, version = name.removeprefix(TORCHVISION).partition(".")
    try:
        weights = models.get_model_weights(model)[version or "DEFAULT"]
    except (ValueError, KeyError):
        raise ConfigError(
            "initial_model_state: expected the name of a model of torchvision's, such as "
            f"torchvision:resnet50 or torchvision:resnet50.IMAGENET1K_V1, got {name!r}"
        ) from None
    try:
        return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: another checksum
        raise ConfigError(
            f"initial_model_state: {name!r} cannot be downloaded from {weights.url}: {error}; give "
            "the path or URL of a copy"
        ) from error
