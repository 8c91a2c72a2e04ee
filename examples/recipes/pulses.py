"""A recipe with methods of its own for all that a config chooses: optimizer, schedule, batches,
sampling, averaged weights, evaluations and hooks. It finds the few series of numbers that have two
pulses rather than one; the series have different lengths, and are drawn.

cp examples/recipes/pulses.py recipes/
pyflyte run workflows/single_node.py single_node_training_wf --recipe recipes.pulses.Pulses
"""

import logging

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from flyte_ddp import Recipe

NUM_TRAIN, NUM_TEST = 325, 110
SHORTEST, LONGEST, WIDTH = 20, 60, 3

logger = logging.getLogger(__name__)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(1, 16, WIDTH, padding=1, bias=False)
        self.head = nn.Linear(2 * 16, 2)

    def forward(self, inputs):
        values, mask = inputs.unbind(1)  # (B, T) each
        found = torch.relu(self.filters(values[:, None])) * mask[:, None]
        return self.head(torch.cat([found.sum(2), found.amax(2)], dim=1))


class Pulses(Recipe):
    defaults = {
        "epochs": 6,
        "global_batch_size": 30,
        "learning_rate": 0.05,
        "ema_decay": 0.9,  # the averaged weights are evaluated and returned
        "evaluation_interval": 6,
        "monitor": {"metric": "accuracy", "mode": "max"},
    }
    class_names = ("one pulse", "two pulses")

    def prepare(self, source, directory):
        return f"{NUM_TRAIN + NUM_TEST} drawn series, one in eight with two pulses"

    def datasets(self, directory):
        generator = torch.Generator().manual_seed(0)

        def draw(number):
            length = int(torch.randint(SHORTEST, LONGEST, (), generator=generator))
            series = 0.02 * torch.randn(length, generator=generator)
            label = int(number % 8 == 0)
            for part in torch.arange(length).tensor_split(1 + label):
                start = int(torch.randint(len(part) - WIDTH, (), generator=generator))
                series[part[start : start + WIDTH]] += 1
            return series, label

        return [draw(number) for number in range(NUM_TRAIN)], [
            draw(number) for number in range(NUM_TEST)
        ]

    def collate(self, samples, training):
        """Pad the series to the longest; return them with a mask, (B, 2, T), and the labels."""
        series, labels = zip(*samples, strict=True)
        mask = pad_sequence([torch.ones_like(each) for each in series], batch_first=True)
        values = pad_sequence(list(series), batch_first=True)
        return torch.stack([values, mask], dim=1), torch.tensor(labels)

    def sampling_weights(self, dataset):
        """Draw series with two pulses as often as others."""
        labels = torch.tensor([label for _, label in dataset])
        return 1 / labels.bincount()[labels]

    def model(self):
        return Net()

    def optimizer(self, model, config):
        return torch.optim.Adagrad(
            [
                {"params": model.filters.parameters()},
                {"params": model.head.parameters(), "lr": config.learning_rate / 2},
            ],
            lr=config.learning_rate,
        )

    def schedule(self, optimizer, config, num_steps):
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, num_steps // 3)

    def on_epoch(self, epoch):
        """Called on rank 0 after each evaluation: here one could call one's own service."""
        logger.info("%.1f epochs: accuracy %.3f", epoch.position, epoch.metrics["accuracy"])
