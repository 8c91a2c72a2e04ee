"""A recipe on a mixture by a schedule. The loss of a sample is its number, whatever the model does,
and some samples cannot be read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from flyte_ddp.data import Mixture, Shards
from flyte_ddp.recipes import Recipe

SIZES = {"a": 30, "b": 20}


@dataclass
class Mixed(Recipe):
    """Samples with 1 to 3 targets."""

    defaults = {
        "epochs": 1,
        "global_batch_size": 12,
        "evaluation_batch_size": 8,
        "gradient_accumulation": 2,
        "optimizer": "sgd",
        "schedule": "constant",
        "log_interval": 1,
    }
    changeable_options = ("weights",)
    weights: str = "[]"  # the schedule of the mixture, as JSON

    def prepare(self, source, directory):
        for name, size in SIZES.items():
            (directory / name).mkdir()
            for first in range(0, size, 10):
                lines = [f'{{"number": {number}}}\n' for number in range(first, first + 10)]
                (directory / name / f"{first}.jsonl").write_text("".join(lines))
            Shards(str(directory / name)).prepare()
        return "numbers"

    def datasets(self, directory):
        sources = {
            name: Shards(str(directory / name), transform=to_sample, unreadable="ignore")
            for name in SIZES
        }
        return Mixture(sources, schedule=json.loads(self.weights), num_samples=26), sources["a"]

    def model(self):
        from torch import nn

        return nn.Linear(1, 2)

    def losses(self, outputs, targets):
        return 0 * outputs.sum(1) + targets[:, 0]

    def num_targets(self, targets):
        return targets[:, 1]

    def num_correct(self, outputs, targets):
        return 0 * targets[:, 1]


def to_sample(fields):
    import torch

    number = fields["number"]
    if number % 5 == 4:
        raise ValueError("it cannot be read")
    return torch.ones(1), torch.tensor([number, 1 + number % 3])


def find_losses(data, config, num_epochs):
    """The losses of each source in each step, by the order alone."""
    steps = []
    for epoch in range(num_epochs):
        order = data.order(config.global_batch_size, config.seed, epoch + 1, epoch)
        for first in range(0, len(data), config.global_batch_size):
            rows = {name: [] for name in SIZES}
            for sample in order.batch(first, config.global_batch_size).tolist():
                url, _, row = data.key(sample).rpartition(" row ")
                name, file = url.split("/")[-2:]
                number = int(file.partition(".")[0]) + int(row)
                if number % 5 != 4:
                    rows[name].append((number, 1 + number % 3))
            steps.append({})
            for name, own in rows.items():
                if own:
                    losses, counts = zip(*own, strict=True)
                    steps[-1][f"loss/{name}"] = sum(losses) / sum(counts)
    return steps
