"""Base classes of recipes for tasks other than classification: losses, metrics and predictions of
each.

Each imports torch and torchmetrics inside its methods, as base.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flyte_ddp.config.extras import require
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import Prediction
from flyte_ddp.recipes.base import IGNORED, Recipe, list_class_names, to_png, to_pngs

if TYPE_CHECKING:
    from torch import Tensor, nn


class Regression(Recipe):
    """A recipe with numbers as targets: one for each sample, (B,), or several, (B, ...). The
    model's outputs have the same shape.

    It minimizes the squared error, and measures the mean absolute error `mae` and the share of the
    targets' variance that the model explains, `r2`.

    Example:
        class Prices(Regression):
            def datasets(self, directory):
                sizes = torch.linspace(0, 1, 512).unsqueeze(1)
                data = TensorDataset(sizes, 3 * sizes.squeeze(1) + 1)
                return data, data

            def model(self):
                return nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))
    """

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.float() - targets).square().reshape(len(targets), -1).sum(dim=1)

    def num_targets(self, targets: Tensor) -> Tensor | None:
        if targets.dim() == 1:
            return None
        return targets.new_full((len(targets),), targets[0].numel())

    def metrics(self) -> Mapping[str, nn.Module]:
        require("the metrics of Regression", "torchmetrics")
        from torchmetrics import MeanAbsoluteError, R2Score

        class R2(R2Score):
            """The mean over a sample's numbers, in any shape. The class of torchmetrics takes one
            dimension.
            """

            def update(self, preds: Tensor, target: Tensor) -> None:
                super().update(flatten(preds), flatten(target))

        def flatten(values: Tensor) -> Tensor:
            if values.dim() > 1:
                return values.flatten(1)
            return values

        return {"mae": MeanAbsoluteError(), "r2": R2()}

    def prediction_columns(self, outputs: Tensor) -> Mapping[str, Any]:
        """Return the `prediction`, a number, or a list of several."""
        return {"prediction": outputs}

    def report_samples(self, batch: Tensor, outputs: Tensor, targets: Tensor) -> list[Prediction]:
        """Return the true and the predicted number of each sample; if there are several, the
        first.
        """
        truths, guesses = (
            values.reshape(len(values), -1)[:, 0].tolist() for values in (targets, outputs)
        )
        predictions = []
        for truth, guess in zip(truths, guesses, strict=True):
            numbers, error = [truth, guess], abs(truth - guess)
            prediction = Prediction(
                f"{truth:.4g}", f"{guess:.4g}", {}, numbers=numbers, error=error
            )
            predictions.append(prediction)
        return predictions


class MultiLabel(Recipe):
    """A recipe with a target of 0 or 1 for each of L labels, (B, L). The model's outputs are the
    labels' logits.

    It measures the share of the labels that are predicted right, `accuracy`, and `f1` over all
    labels of all samples.

    Example:
        class Topics(MultiLabel):
            class_names = ("sports", "politics", "science")

            def model(self):
                num_words = 1000
                return nn.Linear(num_words, len(self.class_names))
    """

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn import functional

        losses = functional.binary_cross_entropy_with_logits(
            outputs.float(), targets.float(), reduction="none"
        )
        return losses.sum(dim=1)

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0) == (targets > 0)).sum(dim=1)

    def num_targets(self, targets: Tensor) -> Tensor:
        return targets.new_full((len(targets),), targets[0].numel())

    def metrics(self) -> Mapping[str, Any]:
        require("the metrics of MultiLabel", "torchmetrics")
        from torchmetrics.classification import BinaryF1Score

        return {"accuracy": self.num_correct, "f1": BinaryF1Score()}

    def metric_outputs(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def prediction_columns(self, outputs: Tensor) -> Mapping[str, Any]:
        """Return the probability of each label by its name."""
        names = list_class_names(self, outputs.shape[1])
        return dict(zip(names, outputs.sigmoid().unbind(dim=1), strict=True))

    def report_samples(self, batch: Tensor, outputs: Tensor, targets: Tensor) -> list[Prediction]:
        """Return the labels of each sample, and the score of every label."""
        names = list_class_names(self, outputs.shape[1])

        def label(marks: list[bool]) -> str:
            return (
                ", ".join(name for name, mark in zip(names, marks, strict=True) if mark) or "(none)"
            )

        images = to_pngs(batch, len(targets))
        predictions = []
        for image, output, target in zip(images, outputs, targets, strict=True):
            prediction = Prediction(
                truth=label((target > 0).tolist()),
                guess=label((output > 0).tolist()),
                scores=dict(zip(names, output.sigmoid().tolist(), strict=True)),
                image=image,
            )
            predictions.append(prediction)
        return predictions


class Segmentation(Recipe):
    """A recipe with a class for each pixel as target, (B, H, W); -100 does not count.

    The model's outputs are logits (B, C, H, W), and `class_names` lists all C classes. The metrics
    are `accuracy`, the share of the pixels that are predicted right, and `miou`, the intersection
    over union of each class, averaged over the classes.

    Example:
        class Roads(Segmentation):
            class_names = ("background", "road")

            def model(self):
                features = nn.Conv2d(3, 16, 3, padding=1)
                logits = nn.Conv2d(16, len(self.class_names), 1)
                return nn.Sequential(features, nn.ReLU(), logits)
    """

    prediction_schema = {"mask": "list<list<int64>>"}

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn import functional

        losses = functional.cross_entropy(
            outputs.float(), targets.long(), reduction="none", ignore_index=IGNORED
        )
        return losses.flatten(1).sum(dim=1)

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(dim=1) == targets).flatten(1).sum(dim=1)

    def num_targets(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).flatten(1).sum(dim=1)

    def metrics(self) -> Mapping[str, Any]:
        require("the metrics of Segmentation", "torchmetrics")
        from torchmetrics.classification import MulticlassJaccardIndex

        names = list_class_names(self)
        if len(names) < 2:
            raise ConfigError(
                f"class_names: expected the names of all classes, at least two, got {names!r}"
            )
        index = MulticlassJaccardIndex(len(names), ignore_index=IGNORED)
        return {"accuracy": self.num_correct, "miou": index}

    def metric_outputs(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def prediction_columns(self, outputs: Tensor) -> Mapping[str, Any]:
        """Return the `mask` of each sample: rows of its pixels' classes."""
        return {"mask": outputs.argmax(dim=1)}

    def report_samples(self, batch: Tensor, outputs: Tensor, targets: Tensor) -> list[Prediction]:
        """Return a picture of each sample: its first channel, the true and the predicted mask, side
        by side.
        """
        import torch

        scale = 255 // max(1, len(list_class_names(self)) - 1)  # grey levels between two classes
        shown = []
        for sample, guess, target in zip(
            batch.flatten(1, -3)[:, 0], outputs.argmax(dim=1), targets, strict=True
        ):
            low, high = sample.float().aminmax()
            image = (sample.float() - low) * (255 / (high - low).clamp(min=1e-12))
            masks = [mask.clamp(min=0) * scale for mask in (target, guess)]
            parts = [part.to(torch.uint8) for part in [image, *masks] if part.shape == target.shape]
            counts = target != IGNORED
            error = 0.0
            if counts.any():
                error = float((guess != target)[counts].float().mean())
            names = ", ".join(("image", "truth", "guess")[-len(parts) :])
            words = f"{names}: {100 * error:.0f} % of the pixels wrong"
            shown.append(Prediction("", words, {}, to_png(torch.cat(parts, dim=1)), error=error))
        return shown
