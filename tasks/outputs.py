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
