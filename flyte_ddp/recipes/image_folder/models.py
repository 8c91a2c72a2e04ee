"""torchvision's classification models with a last layer for other classes, and the weights to begin with."""

from __future__ import annotations

import importlib
import pickle
import re
import shutil
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import DataError
from flyte_ddp.storage import fetch_file

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


def fetch_weights(weights: str, architecture: str, file: Path) -> None:
    """Copy the state dict of `weights`, "default" for torchvision's, to `file`. Raises DataError if that fails."""
    if weights == "default":
        _fetch_default(architecture, file)
        return
    try:
        fetch_file(weights, file, "weights")
    except FileNotFoundError:
        raise DataError(
            "weights: expected none, default, or the path or URL of a state dict, "
            f"got {weights!r}, which does not exist"
        ) from None


def _fetch_default(architecture: str, file: Path) -> None:
    import torch

    url = import_torchvision().models.get_model_weights(architecture).DEFAULT.url
    name = url.rpartition("/")[2]
    kept = Path(torch.hub.get_dir()) / "checkpoints" / name  # torch's own cache
    try:
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            # The name ends with the beginning of the contents' SHA-256.
            torch.hub.download_url_to_file(url, str(kept), hash_prefix=kept.stem.rpartition("-")[2], progress=False)
        shutil.copyfile(kept, file)
    except (OSError, RuntimeError) as error:  # RuntimeError: another sum
        raise DataError(
            f"weights: 'default' cannot be downloaded from {url}: {error}; give none, or a state dict's path or URL"
        ) from error


def load_weights(model: nn.Module, head: str, file: Path, weights: str) -> None:
    """Load the state dict in `file`, except a last layer for other classes.

    Args:
        weights: the user's name for it, for errors.

    Raises:
        DataError: it is no state dict of tensors, or one of another model.
    """
    import torch

    expected = "weights: expected a state dict of the same model"
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{expected}, got {weights!r}, which is damaged or more than tensors: {reason}") from error
    if not isinstance(state, dict):
        raise DataError(f"{expected}, got {weights!r} with a {type(state).__name__}")
    own = model.state_dict()
    fitting = {
        name for name in own if isinstance(state.get(name), torch.Tensor) and state[name].shape == own[name].shape
    }
    wrong = sorted(name for name in own.keys() - fitting if not name.startswith(head + "."))
    wrong += sorted(str(name) for name in state.keys() - own.keys())
    if wrong:
        raise DataError(
            f"{expected}, got {weights!r}, of which {len(wrong)} entries are missing, unknown or of another shape, "
            f"such as {', '.join(wrong[:3])}"
        )
    model.load_state_dict({**own, **{name: state[name] for name in fitting}})
