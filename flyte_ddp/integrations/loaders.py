"""A framework's own DataLoader, with another batch size, or from the middle of an epoch on. Knows
no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.batches import rank_and_world_size

KEPT = (
    *(
        "dataset",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
    ),
    *("generator", "prefetch_factor", "persistent_workers"),
)


def split_batch(global_batch_size: int, num_shares: int | None = None) -> int:
    """Return the samples of one of `num_shares`, or else ranks, of a global batch. Raises
    ConfigError if uneven.
    """
    shares = num_shares or rank_and_world_size()[1]
    if global_batch_size % shares:
        expected = f"expected a global batch that {shares} ranks share evenly"
        raise ConfigError(f"global_batch_size: {expected}, got {global_batch_size} samples")
    return global_batch_size // shares


def count_samples(dataset: Any) -> int | None:
    """Return the length of a data set; None for an iterable without one."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def check_length(found: Mapping[str, Any] | None, dataset: Any) -> None:
    """Check that the training data are as long as those that a checkpoint was written with.

    Args:
        found: the values of the checkpoint, of which `num_samples` is one; None without a
            checkpoint.

    Raises:
        ConfigError: they are not.
    """
    expected, got = (found or {}).get("num_samples"), count_samples(dataset)
    if expected is not None and got != expected:
        raise ConfigError(
            f"dataset: expected {expected} samples, with which the checkpoint was "
            f"written, got {got}"
        )


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """Return the loader with batches of another size. Raises ConfigError if it makes its batches
    itself.
    """
    if loader.batch_size == batch_size:
        return loader
    if loader.batch_size is None:
        raise ConfigError(
            f"DataLoader: expected a batch_size, to change it to {batch_size}, got a batch sampler"
        )
    kept = {name: getattr(loader, name) for name in KEPT}
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    return DataLoader(batch_size=batch_size, sampler=sampler, drop_last=loader.drop_last, **kept)


def skip_batches(loader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    """Return the loader, whose next pass begins behind `num_batches`, which are not read.

    Raises:
        ConfigError: its data set is an iterable.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        what = type(loader.dataset).__name__
        raise ConfigError(
            "DataLoader: expected a data set with a length and items, to resume in "
            f"an epoch, got {what}"
        )
    kept = {name: getattr(loader, name) for name in KEPT}
    return DataLoader(batch_sampler=_Remaining(loader.batch_sampler, num_batches), **kept)


class _Remaining(BatchSampler):
    """The batches of a sampler, at the first pass without those that are done."""

    def __init__(self, batches: Any, num_skipped: int) -> None:
        self.batches = batches
        self.num_skipped = num_skipped
        self.sampler, self.batch_size, self.drop_last = (
            batches.sampler,
            batches.batch_size,
            batches.drop_last,
        )

    def __iter__(self) -> Iterator[list[int]]:
        first, self.num_skipped = self.num_skipped, 0
        for number, batch in enumerate(self.batches):
            if number >= first:
                yield batch

    def __len__(self) -> int:
        return len(self.batches)
