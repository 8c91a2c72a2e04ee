"""The typed outputs of the training workflows."""

from __future__ import annotations

from typing import NamedTuple

from flytekit.types.file import FlyteFile, PythonPickledFile


class TrainingOutputs(NamedTuple):
    """What a training run hands back.

    Load the model with `recipe.model().load_state_dict(torch.load(path, weights_only=True))`, on any machine.
    """

    epoch_accuracies: list[float]  # share of held-out targets predicted right, in [0, 1], after each epoch
    model_state: PythonPickledFile  # the state dict after the last epoch, on the CPU
    report: FlyteFile  # the HTML page that the Deck shows too
    history: FlyteFile  # every event of the run, as JSON lines


class RetrainingOutputs(NamedTuple):
    """What a retraining hands back, whether it promoted a model, kept the champion, or had nothing to train."""

    outcome: str  # one of flyte_ddp.promotion.policy.Outcome
    reason: str  # for it, in words
    champion: str  # the version that is in use now; "" where there is none
    metrics: dict[str, float]  # test_loss and accuracy of the challenger and the champion before it, where measured
    report: FlyteFile  # the HTML page that the Deck shows too
