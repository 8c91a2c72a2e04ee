"""What a recipe is: a model with its data. It never sees a rank, a device or a launcher.

This module and the built-in recipes import torch inside their methods. The process that supervises the ranks reads
`defaults` and calls `prepare` and nothing else, and torch's import costs it 3.5 s of processor time that the ranks
could use. A recipe of yours may import what it likes at its top; it only starts a little later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flyte_ddp.events import Prediction

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset


class Recipe:
    """A model with its data. Define `prepare`, `datasets` and `model`; the rest has defaults for classification.

    Every method may be called in a process of its own, so what one leaves for another goes through files in
    `directory`, not through attributes.

    A recipe with options of its own is a frozen dataclass with a field for each of them, of a type that JSON has. Users
    give them in the config as `{"recipe_options": {"field": value}}`; every method finds them as attributes.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """`TrainingConfig` fields for which this recipe wants another default."""

    class_names: Sequence[str] = ()
    """Names of the classes in the order of the model's outputs; "0", "1", ... where empty."""

    def prepare(self, source: str, directory: Path) -> str:
        """Fetch and check the data, once per run, and leave in `directory` what `datasets` reads.

        Args:
            source: a path or URL that the user gave, or "" for the recipe's own data.
            directory: an empty local directory. It is handed to every rank, on other machines as a copy.

        Returns:
            Which data this is, in words, for the log and the report.

        Raises:
            DataError: the data is missing, damaged or not of the right kind.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define prepare")

    def datasets(self, directory: Path) -> tuple[Dataset[Any], Dataset[Any]]:
        """The training and the held-out data, each sample an (input, target) pair.

        A `TensorDataset` is moved to the device whole where it fits and batched there by index; anything else with
        `__len__` and `__getitem__` is read through a DataLoader. Such a data set may also have `prefetch(indices)`,
        which is told the samples of a batch before they are asked for one by one, and `num_replaced`: how many of the
        samples asked for so far could not be read and had another stand in for them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define datasets")

    def model(self) -> nn.Module:
        """A model with fresh weights. The random generator is seeded before the call.

        `datasets` has been called before on the same recipe, which may have learned from it how many classes there are.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define model")

    def inputs(self, batch: Tensor) -> Tensor:
        """What the model takes, from a batch as `datasets` holds it, on the device: normalization goes here.

        By default images in bytes, (B, H, W) or (B, C, H, W), become floats in [0, 1] of shape (B, C, H, W).
        """
        import torch

        if batch.dtype != torch.uint8:
            return batch
        if batch.dim() == 3:
            batch = batch.unsqueeze(1)
        return batch.float().div_(255)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, (B,): summed over the sample's targets, not averaged.

        By default the cross-entropy of logits (B, C) against classes (B,).
        """
        from torch.nn import functional

        return functional.cross_entropy(outputs.float(), targets, reduction="none")

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How many targets of each sample are predicted right, (B,)."""
        return outputs.argmax(dim=1) == targets

    def num_targets(self, targets: Tensor) -> Tensor | None:
        """How many targets each of the N samples has, (N,), where that is not one each. Losses are means over these.

        Called once with the targets of a whole `TensorDataset`; not used for data read through a DataLoader.
        """
        return None

    def predictions(self, batch: Tensor, outputs: Tensor, targets: Tensor) -> list[Prediction]:
        """What to show of these held-out samples; all tensors are on the CPU.

        By default truth, best guess and the score of every class, with the image where `batch` holds bytes.
        """
        scores = outputs.float().softmax(dim=1)
        names = list(self.class_names) or [str(index) for index in range(scores.shape[1])]
        return [
            Prediction(
                truth=names[int(target)],
                guess=names[int(score.argmax())],
                scores=dict(zip(names, score.tolist(), strict=True)),
                image=_png(sample),
            )
            for sample, score, target in zip(batch, scores, targets, strict=True)
        ]


def _png(sample: Tensor) -> bytes:
    """`sample` as a PNG where it is an image in bytes, (H, W) or (1 or 3, H, W); nothing where it is not."""
    import io

    import torch
    from PIL import Image

    if sample.dtype != torch.uint8 or sample.dim() not in (2, 3):
        return b""
    if sample.dim() == 3:
        sample = sample[0] if sample.shape[0] == 1 else sample.permute(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(sample.contiguous().numpy()).save(file, "PNG")
    return file.getvalue()
