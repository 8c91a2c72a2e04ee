"""The training loss of each source of a mixture, summed by the samples that were read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyte_ddp.rank.data import LoadedSamples, Samples, count_samples
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.watch import sum_by_sample


@dataclass(eq=False)
class SourceLosses:
    """Sums up the losses of each source."""

    samples: LoadedSamples
    parallelism: Parallelism

    @classmethod
    def open(cls, samples: Samples, parallelism: Parallelism) -> SourceLosses | None:
        """Return the sums of the training samples; None if they are not a mixture."""
        if isinstance(samples, LoadedSamples) and samples.source_names:
            return cls(samples, parallelism)
        return None

    def sum(self, losses: Tensor, inputs: object, targets: Tensor) -> Tensor:
        """Return sums of losses and targets of the samples' last batch, (sources, 2). They are NaN
        if it is not known which loss belongs to which sample.

        Args:
            losses: the recipe's losses of the batch.
        """
        recipe, read = self.parallelism.recipe, self.samples.last_read
        sums = self._zeros()
        if count_samples(recipe, inputs, targets) != len(read):  # `collate` has left some out
            return sums.fill_(math.nan)
        own_losses, counts = sum_by_sample(losses, len(read)), recipe.num_targets(targets)
        if counts is None:
            counts = torch.ones_like(own_losses)
        values = torch.stack([own_losses, counts.to(own_losses)], dim=1)
        return sums.index_add_(0, self.samples.find_sources().to(sums.device), values)

    def average(self, sums: Tensor | float) -> dict[str, float]:
        """Return the mean loss of each source with targets, over all ranks. Every rank calls it.

        Args:
            sums: this rank's sums of the results of `sum`.
        """
        totals = self.parallelism.world.all_reduce(*(self._zeros() + sums).flatten())
        found = {}
        for name, loss, count in zip(
            self.samples.source_names, totals[::2], totals[1::2], strict=True
        ):
            if count > 0 and math.isfinite(loss):
                found[f"loss/{name}"] = loss / count
        return found

    def _zeros(self) -> Tensor:
        size, device = len(self.samples.source_names), self.parallelism.world.device
        return torch.zeros(size, 2, dtype=torch.float64, device=device)
