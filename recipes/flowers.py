"""The recipe of the README: Fisher's irises by a small network."""

import torch
from sklearn.datasets import load_iris
from torch.utils.data import TensorDataset, random_split

from flyte_ddp import Recipe


class Flowers(Recipe):
    defaults = {"epochs": 30, "global_batch_size": 16, "learning_rate": 0.05}

    def prepare(self, source, directory):  # called once per run; may write files to `directory`
        return "Fisher's irises"

    def datasets(self, directory):  # called in every rank
        inputs, targets = load_iris(return_X_y=True)
        data = TensorDataset(torch.tensor(inputs).float(), torch.tensor(targets))
        return random_split(data, [120, 30], torch.Generator().manual_seed(0))

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
