"""The typed outputs of the training workflows."""

from __future__ import annotations

from typing import NamedTuple

from flytekit.types.file import FlyteFile, PythonPickledFile


class TrainingOutputs(NamedTuple):
    """The outputs of a training run.

    Load the model on any machine with `recipe.model().load_state_dict(torch.load(path, weights_only=True))`.
    """

    epoch_accuracies: list[float]  # share of held-out targets predicted correctly, in [0, 1], after each epoch
    model_state: PythonPickledFile  # the state dict after the last epoch, on the CPU
    report: FlyteFile  # the HTML page that the Deck shows too
    history: FlyteFile  # every event of the run, as JSON lines


class RetrainingOutputs(NamedTuple):
    """The outputs of a retraining, whether it promoted a model, kept the champion, or had nothing to train."""

    outcome: str  # one of flyte_ddp.promotion.policy.Outcome
    reason: str  # for the outcome, one line for people
    champion: str  # the version in use now; "" for none
    metrics: dict[str, float]  # test_loss and accuracy of the challenger and of the champion before it, if measured
    report: FlyteFile  # the HTML page that the Deck shows too
