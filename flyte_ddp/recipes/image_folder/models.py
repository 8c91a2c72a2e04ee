"""torchvision's classification models with a last layer for other classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyte_ddp.config.fields import expect_known
from flyte_ddp.errors import DataError

if TYPE_CHECKING:
    from torch import nn

# Names that are accepted without importing torchvision. Other names are looked up there.
COMMON = (
    "resnet18",
    "resnet34",
    "resnet50",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "vit_b_16",
)
# models that return more than logits, or that need special input
NOT_PLAIN = ("googlenet", "inception_v3", "maxvit_t")


def check_architecture(name: str) -> None:
    """Raise DataError unless torchvision has a model called `name` that returns only logits."""
    if name in COMMON:
        return
    from torchvision import models

    known = [model for model in models.list_models(models) if model not in NOT_PLAIN]
    if name not in known:
        raise DataError(f"architecture: {expect_known('architecture', known, name)}")


def build_model(architecture: str, num_classes: int, image_size: int) -> tuple[nn.Module, str]:
    """Return the model with fresh weights, and the name of its last layer, which computes the
    logits.
    """
    from torch import nn
    from torchvision import models

    options = {}
    if architecture.startswith("vit_"):
        options["image_size"] = image_size
    model: nn.Module = models.get_model(
        architecture, weights=None, num_classes=num_classes, **options
    )
    with_logits = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.weight.shape[0] == num_classes
    ]
    return model, with_logits[-1]
