"""A regression: the progress of a disease after a year, from ten measurements of 442 patients that
scikit-learn has.

cp examples/recipes/diabetes.py recipes/
pyflyte run workflows/single_node.py single_node_training_wf --recipe recipes.diabetes.Diabetes
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flyte_ddp import Regression


class Diabetes(Regression):
    defaults = {
        "epochs": 40,
        "global_batch_size": 16,
        "learning_rate": 0.02,
        "monitor": {"metric": "mae", "mode": "min"},
    }

    def prepare(self, source, directory):
        from sklearn.datasets import load_diabetes

        inputs, targets = load_diabetes(return_X_y=True, scaled=False)
        inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
        # near 1, as the weights that a layer starts with
        targets = (targets - targets.mean()) / targets.std()
        torch.save(
            (torch.tensor(inputs).float(), torch.tensor(targets).float()), directory / "patients.pt"
        )
        return "442 patients, every fifth held out"

    def datasets(self, directory):
        inputs, targets = torch.load(directory / "patients.pt", weights_only=True)
        held_out = torch.arange(len(inputs)) % 5 == 0
        return (
            TensorDataset(inputs[~held_out], targets[~held_out]),
            TensorDataset(inputs[held_out], targets[held_out]),
        )

    def model(self):
        return nn.Sequential(nn.Linear(10, 1), nn.Flatten(0))  # outputs (B,), as the targets
