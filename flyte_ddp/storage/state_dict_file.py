"""A state dict as a file: torch's own format, or safetensors, which many programs read.

A safetensors file holds tensors only. Other values of a state dict, such as a model's extra state,
are JSON in the file's metadata, under `VALUES`. In both formats the names of the classes travel
with a state, because shapes do not show the order of the classes. Imports torch when it is called.
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
from flyte_ddp.storage.redaction import redact_url

# names in pickled state dicts that are called
PICKLED = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)
TORCHVISION = "torchvision:"  # beginning of the name of a state that torchvision publishes
PINNED = re.compile(r"(.+) \(sha256 ([0-9a-f]{64})\)", re.S)
VALUES, CLASS_NAMES = "flyte_ddp.values", "flyte_ddp.class_names"  # keys in the metadata


def pin_state(url: str) -> str:
    """Return the path or URL of a state with the checksum of its contents, as one text.

    For example "s3://bucket/model_state.pt (sha256 ...)". Names are reused, so states are compared
    by their contents. A state that has its checksum stays as it is. So does a state without a file,
    because a run that resumes does not need the file.
    """
    if not url or url.startswith(TORCHVISION) or split_pin(url)[1]:
        return url
    if "://" not in url:
        url = os.path.abspath(url)
    with contextlib.suppress(FileNotFoundError):
        return f"{url} (sha256 {compute_sha256(url, 'initial_model_state')})"
    return url


def describe_missing(state: str) -> str:
    """Return the error text if `pin_state` found no file; "" if it did, or no file is needed."""
    if not state or state.startswith(TORCHVISION) or split_pin(state)[1]:
        return ""
    return (
        "initial_model_state: expected the file of a state dict, got "
        f"{redact_url(state)!r}, where there is none"
    )


def split_pin(state: str) -> tuple[str, str]:
    """Return the URL and the checksum of a state from `pin_state`; "" for no checksum."""
    match = PINNED.fullmatch(state)
    if match:
        return match[1], match[2]
    return state, ""


def identify_state(state: str) -> str:
    """Return the checksum of a state from `pin_state`, or its URL without secrets if it has no
    checksum.
    """
    url, sha256 = split_pin(state)
    return sha256 or redact_url(url)


def is_same_state(one: str, other: str) -> bool:
    """Compare two states by their checksums, or by their URLs if a checksum is missing. Give both
    URLs with their secrets, or both without.
    """
    (url, sha256), (other_url, other_sha256) = split_pin(one), split_pin(other)
    if sha256 and other_sha256:
        return sha256 == other_sha256
    return url == other_url


def with_class_names(state: Mapping[str, Any], names: Sequence[str]) -> OrderedDict[str, Any]:
    """Return `state` with the names of its classes as an attribute. torch.save keeps the attribute,
    and load_state_dict ignores it.
    """
    named = OrderedDict(state)
    vars(named)["class_names"] = list(names)
    return named


def class_names_of(state: Any) -> list[str]:
    """Return the names that `with_class_names` gave to `state`; an empty list if it has none."""
    found = getattr(state, "class_names", None)
    if not isinstance(found, list):
        return []
    return [str(name) for name in found]


def is_safetensors(contents: bytes) -> bool:
    """Return whether a file begins as safetensors does, with the size of a header and its JSON.

    The first byte alone decides nothing: the size 2,688 begins with the first byte of a pickle.
    """
    return contents[8:9] == b"{" and 8 + int.from_bytes(contents[:8], "little") <= len(contents)


def save_safetensors(state: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
    """Write a state dict of contiguous CPU tensors in the format safetensors, without copying them.

    Raises:
        OSError: the file cannot be written.
        ValueError: the format cannot hold a value. The message names its key.
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
        if tensor.data_ptr() in addresses:  # a tied tensor, which the format cannot express
            tensors[name] = tensor.clone()
        addresses.add(tensor.data_ptr())
    found = {VALUES: values, CLASS_NAMES: class_names_of(state)}
    metadata = {"format": "pt", **{key: json.dumps(value) for key, value in found.items() if value}}
    safetensors.torch.save_file(tensors, file, metadata)


def from_bytes(contents: bytes) -> Any:
    """Return the state dict in a file of either format or in a plain pickle, with tensors on the
    CPU. Only tensors and plain values are unpickled.

    Raises:
        pickle.UnpicklingError, RuntimeError, EOFError: the file holds no state dict.
    """
    if not is_safetensors(contents):
        if contents[:1] == pickle.PROTO:  # torch's older format begins with a pickled number
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
    """Unpickler of tensors and plain values. torch's own unpickler reads no protocol above 2."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "torch.storage._load_from_bytes":
            return _load
        if full not in PICKLED:
            raise pickle.UnpicklingError(_describe_other(full))
        return super().find_class(module, name)


def _load(contents: bytes) -> Any:
    import torch

    try:
        return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's text begins with the advice to trust the file
        match = re.search(r"Unsupported (?:global|class)\W.*?(\w+(?:\.\w+)+)", str(error))
        if match:
            raise pickle.UnpicklingError(_describe_other(match[1])) from None
        raise


def _describe_other(name: str) -> str:
    return f"it has {name}: expected tensors and plain values, as of torch.save(model.state_dict())"


def load_torchvision_state(name: str) -> Any:
    """Return the published weights called `name`. They are downloaded unless torch's cache on this
    machine has them.

    Args:
        name: `torchvision:` and a model, such as resnet50 for its default weights, or
            resnet50.IMAGENET1K_V1.

    Raises:
        ConfigError: no weights have this name, or they cannot be downloaded.
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
    except (OSError, RuntimeError) as error:  # RuntimeError: the checksum is wrong
        raise ConfigError(
            f"initial_model_state: {name!r} cannot be downloaded from {weights.url}: {error}; give "
            "the path or URL of a copy"
        ) from error
