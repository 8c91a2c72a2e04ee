"""Recipes with the mistakes that people make in theirs, each in one method.

Those that use torchmetrics import it there, as flyte_ddp/recipes/tasks.py does: it takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import flyte_ddp
from flyte_ddp import MultiLabel, Regression
from flyte_ddp.recipes import Recipe

NUM_SAMPLES = 40


class Line(Recipe):
    """A regression, without a mistake."""

    defaults = {"epochs": 2, "global_batch_size": 8, "learning_rate": 0.01}

    def prepare(self, source, directory):
        return "points of a line"

    def samples(self):
        inputs = torch.linspace(-1, 1, NUM_SAMPLES).unsqueeze(1)
        return inputs, 2 * inputs.squeeze(1) + 1

    def datasets(self, directory):
        return TensorDataset(*self.samples()), TensorDataset(*self.samples())

    def model(self):
        return nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))

    def losses(self, outputs, targets):
        return functional.mse_loss(outputs, targets, reduction="none")

    def num_correct(self, outputs, targets):
        return (outputs - targets).abs() < 0.1


class Averaged(Line):
    def losses(self, outputs, targets):
        return functional.mse_loss(outputs, targets)


class Broadcast(Line):
    def model(self):
        return nn.Linear(1, 1)


class BroadcastAndAveraged(Broadcast):
    def losses(self, outputs, targets):
        return ((outputs - targets) ** 2).mean(dim=1)


class BroadcastOfOne(BroadcastAndAveraged):
    """Its batches of one are right, (1, 1) and (1,), but not the larger ones of the evaluation."""

    defaults = {**Line.defaults, "global_batch_size": 1}


class SqueezedInLosses(Broadcast):
    """Correct: losses and metrics see outputs and targets alike."""

    def losses(self, outputs, targets):
        return super().losses(outputs.squeeze(1), targets)

    def num_correct(self, outputs, targets):
        return super().num_correct(outputs.squeeze(1), targets)


class FlatTokens(Line):
    """Correct: outputs (B x T, V) of targets (B, T)."""

    def samples(self):
        tokens = torch.arange(NUM_SAMPLES * 8).view(-1, 8) % 5
        return tokens, tokens.roll(1, dims=1)

    def model(self):
        return nn.Sequential(nn.Embedding(5, 5), nn.Flatten(0, 1))

    def losses(self, outputs, targets):
        return (
            functional.cross_entropy(outputs, targets.flatten(), reduction="none")
            .view(targets.shape)
            .sum(1)
        )

    def num_targets(self, targets):
        return torch.full((len(targets),), targets.shape[1])

    def num_correct(self, outputs, targets):
        return (outputs.argmax(1).view(targets.shape) == targets).sum(1)


class TimeFirst(FlatTokens):
    """Correct: outputs (T, B, V), with T = B in the check."""

    def model(self):
        return nn.Sequential(nn.Embedding(5, 5), Transpose())

    def losses(self, outputs, targets):
        return functional.cross_entropy(outputs.permute(1, 2, 0), targets, reduction="none").sum(1)

    def num_correct(self, outputs, targets):
        return torch.eq(outputs.argmax(2).T, targets).sum(1)


class Transpose(nn.Module):
    def forward(self, batch):
        return batch.transpose(0, 1)


class MetricsInACollection(Line):
    """Correct: torchmetrics' own dict of metrics."""

    def metrics(self):
        from torchmetrics import MeanAbsoluteError, MetricCollection, R2Score

        return MetricCollection([MeanAbsoluteError(), R2Score()])


class OtherInputs(Line):
    def model(self):
        return nn.Linear(2, 1)


class PlainNumber(Line):
    def losses(self, outputs, targets):
        return float(functional.mse_loss(outputs, targets))


class NotDifferentiable(Line):
    def losses(self, outputs, targets):
        return (outputs > targets).long()


class Detached(Line):
    def losses(self, outputs, targets):
        return super().losses(outputs.detach(), targets)


class DefaultLosses(Line):
    losses = Recipe.losses


class DefaultNumCorrect(Line):
    num_correct = Recipe.num_correct


class CountsAll(Line):
    def num_correct(self, outputs, targets):
        return torch.full_like(targets, 13.64)


class WrongNumTargets(Line):
    def num_targets(self, targets):
        return torch.tensor(len(targets))


class Unused(Line):
    def model(self):
        model = super().model()
        model.register_parameter("forgotten", nn.Parameter(torch.zeros(1)))
        return model


class Lazy(Line):
    def model(self):
        return nn.Sequential(nn.LazyLinear(1), nn.Flatten(0))


class SparseGradients(FlatTokens):
    def model(self):
        return nn.Sequential(nn.Embedding(5, 5, sparse=True), nn.Flatten(0, 1))


class FiguresOfText(Line):
    def figures(self, epoch):
        return {"verdict": "good"}


class MetricsOfText(Line):
    def metrics(self):
        return {"mae": "MeanAbsoluteError"}


class MetricsWithoutNames(Line):
    def metrics(self):
        return [self.num_correct]


class MetricOverAll(Line):
    def metrics(self):
        return {"mae": lambda outputs, targets: (outputs - targets).abs().mean()}


class AccuracyInPercent(Line):
    def metrics(self):
        return {"accuracy": lambda outputs, targets: 100 * ((outputs - targets).abs() < 9)}


class MetricOfOtherShapes(Line):
    def metrics(self):
        from torchmetrics.classification import MulticlassF1Score

        return {"f1": MulticlassF1Score(3)}


class MetricForEachClass(Line):
    def predict(self, outputs):
        return torch.stack([outputs, 1 - outputs], dim=1)

    def samples(self):
        return super().samples()[0], torch.arange(NUM_SAMPLES) % 2

    def losses(self, outputs, targets):
        return super().losses(outputs, targets.float())

    def metrics(self):
        from torchmetrics.classification import MulticlassF1Score

        return {"f1": MulticlassF1Score(2, average=None)}


class ReservedName(Line):
    def metrics(self):
        return {"test_loss": self.num_correct}


class WideRegression(Regression):
    defaults, prepare, samples, datasets = Line.defaults, Line.prepare, Line.samples, Line.datasets

    def model(self):
        return nn.Linear(1, 2)


class LabelsOfOneColumn(MultiLabel):
    defaults, prepare, datasets, model = (
        Line.defaults,
        Line.prepare,
        Line.datasets,
        WideRegression.model,
    )

    def samples(self):
        return Line.samples(self)[0], torch.arange(NUM_SAMPLES) % 2


class UnnamedClasses(flyte_ddp.Segmentation):
    defaults, prepare, datasets = Line.defaults, Line.prepare, Line.datasets

    def samples(self):
        return Segmentation.samples(self)

    def model(self):
        return nn.Conv2d(1, 2, 1)


class PrepareWithoutReturn(Line):
    def prepare(self, source, directory):
        pass


class OneDataset(Line):
    def datasets(self, directory):
        return super().datasets(directory)[0]


class Streamed(Line):
    def datasets(self, directory):
        class Stream(IterableDataset):
            def __iter__(self):
                yield from zip(*Line().samples(), strict=True)

        return Stream(), super().datasets(directory)[1]


class Empty(Line):
    def datasets(self, directory):
        nothing = TensorDataset(torch.zeros(0, 1), torch.zeros(0))
        return super().datasets(directory)[0], nothing


class _Samples(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return self.make(index)


class OneArgument(Line):
    def losses(self, outputs):
        return outputs


class NoMethod(Line):
    num_correct = 0.5


class TwoRates(Line):
    """Correct: its weight has a rate of its own, its bias the config's."""

    def optimizer_groups(self, model):
        return [
            {"params": [model[0].weight], "lr": 0.3, "name": "weight"},
            {"params": [model[0].bias]},
        ]


class OtherName(Recipe):
    prepare, model = Line.prepare, Line.model

    def dataset(self, directory):
        return Line().datasets(directory)


class DictSamples(Line):
    def datasets(self, directory):
        data = _Samples(lambda index: {"x": torch.ones(1), "y": torch.ones(())})
        return data, data


class Segmentation(Line):
    """With the default methods, which are for one class for each sample."""

    losses, num_correct = Recipe.losses, Recipe.num_correct

    def samples(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(NUM_SAMPLES, 1, 6, 6, generator=generator)
        return images, (images[:, 0] > 0.5).long()

    def model(self):
        return nn.Conv2d(1, 2, 1)


class SegmentationWithoutCounts(Segmentation):
    def losses(self, outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none").flatten(1).sum(1)

    def num_correct(self, outputs, targets):
        return (outputs.argmax(1) == targets).flatten(1).sum(1)


class Masks(SegmentationWithoutCounts):
    """A segmentation without a mistake, of which some pixels do not count."""

    def samples(self):
        images, masks = super().samples()
        for index in range(NUM_SAMPLES):
            masks[index].view(-1)[: index % 5] = -100
        return images, masks

    def num_targets(self, targets):
        return (targets != -100).flatten(1).sum(1)


class LoadedMasks(Masks):
    """The same, read sample by sample."""

    def datasets(self, directory):
        images, masks = self.samples()
        data = _Samples(lambda index: (images[index], masks[index]))
        return data, data


@dataclass
class Ad:
    """A sample with named parts."""

    words: torch.Tensor
    price: float


class TwoInputs(Line):
    """A model with two inputs and two targets, as a dataclass and a dict."""

    defaults = {**Line.defaults, "epochs": 40, "global_batch_size": 2, "learning_rate": 0.05}

    def datasets(self, directory):
        return _Samples(_ad), _Samples(_ad)

    def model(self):
        return _AdModel()

    def losses(self, outputs, targets):
        return sum((outputs[name] - targets[name].float()) ** 2 for name in targets)

    def num_correct(self, outputs, targets):
        return sum((outputs[name] - targets[name]).abs() < 0.1 for name in targets)

    def num_targets(self, targets):
        return torch.full_like(targets["clicks"], 2)


def _ad(index):
    targets = {"clicks": torch.tensor(index % 4 / 2), "cost": torch.tensor(index / NUM_SAMPLES * 3)}
    return Ad(torch.tensor([index % 4, 3]), index / NUM_SAMPLES), targets


class _AdModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(4, 8)
        self.clicks, self.cost = nn.Linear(8, 1), nn.Linear(1, 1)

    def forward(self, ad):
        price = ad.price.float().unsqueeze(1)
        return {
            "clicks": self.clicks(self.words(ad.words)).squeeze(1),
            "cost": self.cost(price).squeeze(1),
        }
