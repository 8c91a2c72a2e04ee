"""The typed outputs of the training workflows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.events import EpochFinished


class TrainingOutputs(NamedTuple):
    """The outputs of a training run.

    Load the model on any machine with `recipe.model().load_state_dict(torch.load(path,
    weights_only=True))`.
    """

    # share of held-out targets predicted correctly, in [0, 1]; none without an accuracy
    epoch_accuracies: list[float]
    # the held-out loss and every metric of the recipe after each epoch, by name
    epoch_metrics: dict[str, list[float]]
    # the state dict after the best epoch, or the last (config.model_state); on the CPU
    model_state: PythonPickledFile
    report: FlyteFile  # the HTML page that the Deck shows too
    history: FlyteFile  # every event of the run, as JSON lines
    export: FlyteDirectory  # the weights as safetensors, and the run card: docs/outputs.md


def list_accuracies(epochs: Sequence[EpochFinished]) -> list[float]:
    return [epoch.metrics["accuracy"] for epoch in epochs if "accuracy" in epoch.metrics]


def list_metrics(epochs: Sequence[EpochFinished]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for epoch in epochs for name in epoch.metrics)
    lists = {name: [epoch.metrics.get(name, math.nan) for epoch in epochs] for name in names}
    return {"test_loss": [epoch.test_loss for epoch in epochs], **lists}


class RetrainingOutputs(NamedTuple):
    """The outputs of a retraining, whether it promoted a model, kept the champion, or had nothing
    to train.
    """

    outcome: str  # one of flyte_ddp.promotion.policy.Outcome
    reason: str  # for the outcome, one line for people
    champion: str  # the version in use now; "" for none
    # test_loss and the recipe's metrics, of challenger and champion, as far as measured
    metrics: dict[str, float]
    report: FlyteFile  # the HTML page that the Deck shows too
    # of the challenger, as of `TrainingOutputs`; none where nothing was trained
    export: FlyteDirectory | None
