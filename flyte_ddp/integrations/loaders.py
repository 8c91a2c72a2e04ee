"""A framework's own DataLoader, with another batch size, or from the middle of an epoch on. This
module knows no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from flyte_ddp.errors import ConfigError

KEPT = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def share_batch(
    dataset: Any,
    found: Mapping[str, Any] | None,
    global_batch_size: int | None,
    size: int,
    num_shares: int,
) -> tuple[dict[str, Any], int]:
    """Return the facts about data and global batch for a checkpoint, and the samples of a share.

    Args:
        dataset: the training data; an iterable may have no length.
        found: the values of the checkpoint from which the training resumes; None without a
            checkpoint.
        global_batch_size: the user's value for a new training; None for `num_shares` of `size`
            samples.

    Raises:
        ConfigError: the checkpoint was written with another number of samples, or the shares are
            uneven.
    """
    found = found or {}
    expected, got = found.get("num_samples"), None
    if hasattr(dataset, "__len__"):
        got = len(dataset)
    if expected not in (None, got):
        raise ConfigError(
            f"dataset: number of samples: expected {expected}, with which the checkpoint was "
            f"written, got {got}"
        )
    total = found.get("global_batch_size") or global_batch_size or size * num_shares
    if total % num_shares:
        expected = f"expected a global batch that {num_shares} ranks share evenly"
        raise ConfigError(f"global_batch_size: {expected}, got {total} samples")
    return {"num_samples": got, "global_batch_size": total}, total // num_shares


def with_batches(loader: DataLoader[Any], batch_size: int, num_skipped: int = 0) -> DataLoader[Any]:
    """Return the loader with batches of another size. Its next pass begins after `num_skipped`
    batches, without reading them.

    Raises:
        ConfigError: the loader has no batch size, or its data are an iterable and batches have to
            be skipped.
    """
    if loader.batch_size == batch_size and not num_skipped:
        return loader
    kept = {name: getattr(loader, name) for name in KEPT}
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if loader.batch_size is None or (is_iterable and num_skipped):
        raise ConfigError(
            "DataLoader: expected a batch_size, and to resume in an epoch a data set with a length "
            f"and items, got {loader.batch_size} and a {type(loader.dataset).__name__}"
        )
    if num_skipped:
        return DataLoader(batch_sampler=_Batches(loader, batch_size, num_skipped), **kept)
    if not is_iterable:
        kept["sampler"] = loader.sampler
    return DataLoader(batch_size=batch_size, drop_last=loader.drop_last, **kept)


class _Batches(BatchSampler):
    """The batches of a loader. The first pass skips the batches that are done."""

    def __init__(self, loader: DataLoader[Any], batch_size: int, num_skipped: int) -> None:
        super().__init__(loader.sampler, batch_size, loader.drop_last)
        self.num_skipped = num_skipped

    def __iter__(self) -> Iterator[list[int]]:
        first, self.num_skipped = self.num_skipped, 0
        return islice(super().__iter__(), first, None)
