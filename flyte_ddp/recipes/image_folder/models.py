"""torchvision's classification models with a last layer for other classes."""

from __future__ import annotations

import importlib
import re
import sys
import types
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import DataError

if TYPE_CHECKING:
    from torch import nn

# Known without importing torchvision. Others are looked up.
COMMON = ("resnet18", "resnet34", "resnet50", "mobilenet_v3_small", "mobilenet_v3_large", "vit_b_16")
NOT_PLAIN = ("googlenet", "inception_v3", "maxvit_t")  # more outputs than logits, or demands of their own
COMPILER = "torch._dynamo.utils"


def import_torchvision() -> Any:
    """Return the module `torchvision`, with its `models` and `transforms`, without importing torch's compiler.

    The compiler is nine tenths of the import: 8 s of processor time per process. One line of torchvision 0.29 imports
    it: `roi_align`, which no classification model uses, takes one function from `torch._dynamo.utils`. `transforms.v2`
    imports it too, so the recipe uses `transforms`, which gives the same for PIL images.
    """
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = _Placeholder(COMPILER)
    return importlib.import_module("torchvision")


class _Placeholder(types.ModuleType):
    """Placeholder that has the one function; any other use imports the real module and removes the placeholder."""

    def is_compile_supported(self, device_type: str) -> Any:
        return self.__getattr__("is_compile_supported")(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `inspect` asks every module for
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def check_architecture(name: str) -> None:
    """Raise DataError where torchvision has no model called `name` whose outputs are logits."""
    if name in COMMON:
        return
    models = import_torchvision().models
    known = [model for model in models.list_models(models) if model not in NOT_PLAIN]
    if name not in known:
        raise DataError(f"architecture: expected one of {', '.join(known)}, got {name!r}")


def patch_size(architecture: str) -> int:
    """Return the number of pixels that must divide the sides of the model's images."""
    found = re.fullmatch(r"vit_[a-z]_(\d+)", architecture)
    return int(found[1]) if found else 1


def build_model(architecture: str, num_classes: int, image_size: int) -> tuple[nn.Module, str]:
    """Return the model with fresh weights, and the name of its last layer, which computes the logits."""
    from torch import nn

    options = {"image_size": image_size} if architecture.startswith("vit_") else {}
    models = import_torchvision().models
    model: nn.Module = models.get_model(architecture, weights=None, num_classes=num_classes, **options)
    with_logits = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.weight.shape[0] == num_classes
    ]
    return model, with_logits[-1]


def freeze_all_but(model: nn.Module, head: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(head + ".")
