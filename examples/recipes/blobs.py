"""A segmentation: which pixels of a noisy image belong to the round blob in it. The images are
drawn.

cp examples/recipes/blobs.py recipes/
pyflyte run workflows/single_node.py single_node_training_wf --recipe recipes.blobs.Blobs
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flyte_ddp import Segmentation

SIZE, NUM_TRAIN, NUM_TEST = 24, 256, 64


class Blobs(Segmentation):
    defaults = {
        "epochs": 8,
        "global_batch_size": 16,
        "learning_rate": 0.02,
        "monitor": {"metric": "miou", "mode": "max"},
    }
    class_names = ("background", "blob")

    def prepare(self, source, directory):
        return (
            f"{NUM_TRAIN + NUM_TEST} drawn images of {SIZE} x {SIZE} pixels; those at the "
            "border do not count"
        )

    def datasets(self, directory):
        generator = torch.Generator().manual_seed(0)
        count = NUM_TRAIN + NUM_TEST
        centers = torch.rand(count, 2, 1, 1, generator=generator) * SIZE
        radii = 3 + 5 * torch.rand(count, 1, 1, generator=generator)
        rows, columns = torch.arange(SIZE).view(1, SIZE, 1), torch.arange(SIZE).view(1, 1, SIZE)
        inside = (rows - centers[:, 0]) ** 2 + (columns - centers[:, 1]) ** 2 < radii**2
        images = (inside + 0.7 * torch.randn(count, SIZE, SIZE, generator=generator)).unsqueeze(1)
        masks = torch.full((count, SIZE, SIZE), -100)  # -100: does not count
        masks[:, 1:-1, 1:-1] = inside[:, 1:-1, 1:-1].long()
        return (
            TensorDataset(images[:NUM_TRAIN], masks[:NUM_TRAIN]),
            TensorDataset(images[NUM_TRAIN:], masks[NUM_TRAIN:]),
        )

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 5, padding=2)
        )
