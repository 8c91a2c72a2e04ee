"""A recipe of your own: a small classifier of wines by their chemistry, on 178 samples that
scikit-learn has: --recipe recipes.wine.Wine, from a copy in recipes/.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flyte_ddp import DataError, Recipe


@dataclass(frozen=True)
class Wine(Recipe):
    hidden: int = 32  # an option: --config '{"recipe_options": {"hidden": 64}}'
    defaults = {"epochs": 30, "global_batch_size": 24, "learning_rate": 0.02}
    class_names = ("Barolo", "Grignolino", "Barbera")

    def prepare(self, source, directory):
        """Write to `directory` all that every rank needs. Called once, in one process."""
        from sklearn.datasets import load_wine

        if source:  # the value of --data: a path or any URL
            raise DataError(
                f"data: expected none, because recipe Wine uses scikit-learn's data, got {source!r}"
            )
        inputs, targets = load_wine(return_X_y=True)
        inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
        torch.save((torch.tensor(inputs).float(), torch.tensor(targets)), directory / "wine.pt")
        return "178 wines of three kinds, every fifth held out"

    def datasets(self, directory):
        """Return training and held-out samples. Called in every rank; the samples are divided for
        you.
        """
        inputs, targets = torch.load(directory / "wine.pt", weights_only=True)
        held_out = torch.arange(len(inputs)) % 5 == 0
        return (
            TensorDataset(inputs[~held_out], targets[~held_out]),
            TensorDataset(inputs[held_out], targets[held_out]),
        )

    def model(self):
        """Return a model with fresh weights. Called in every rank with the same seed."""
        return nn.Sequential(nn.Linear(13, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 3))
