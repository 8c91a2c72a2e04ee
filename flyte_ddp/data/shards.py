"""`Shards`: samples in a store's files, of any total size, as one data set.

It knows the order of an epoch, for a loop that uses it, such as `session.batches` and a recipe's
loop. It knows neither ranks nor loader processes. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config.fields import finite_number, whole_number
from flyte_ddp.data.cache import ShardCache, make_directory, reading, version_of_reader
from flyte_ddp.data.contents import describe_contents
from flyte_ddp.data.index import OWN_INDEX, ShardIndex, prepare_index, read_index
from flyte_ddp.data.order import EpochOrder, Indices, Order, ShardStream, choose_window
from flyte_ddp.data.readers import Fields, Read
from flyte_ddp.data.source import READ_TIMEOUT, Entry, Source
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.storage import has_password
from flyte_ddp.storage.failures import is_of_machine

DEFAULT_CACHE_BYTES = 64 << 30  # default, or half of the disk's free space if that is less
MAX_TOLD = 10  # ignored samples that each process logs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Shards(ShardStream):
    """Samples in shards: tar files in WebDataset's layout, Parquet, MosaicML's MDS, JSON lines, or
    files for a reader of your own.

    Each sample of an epoch is in one batch of one rank, at any number of ranks. A rank fetches
    little more than its part of the shards. A run can resume in mid-epoch at another number of
    ranks. The shards need an index, which `prepare` makes once.

    Args:
        source: a path or URL with all shards below it, or a list of the shards' URLs.
        transform: function that makes a sample from a record's fields, in the loader process. The
            fields are a dict. A tar's fields are the members' contents as bytes, by extension.
            Random numbers are seeded by seed, epoch and sample.
        columns: the fields that are read; None for all.
        index: URL of the index, if it is not beside the shards.
        reader: function that yields the records of a shard at a local path as dicts, in the same
            order each time. With a reader, shards may be any kind of file.
        lanes: number of lanes. The shards of an epoch are read in lanes side by side. By default
            lanes and `window` follow from the batch size and the index.
        window: samples of a lane that are shuffled with each other.
        cache_dir: a directory of this user for fetched shards; by default a temporary directory.
        cache_gib: size of the cache, for all processes of a machine together.
        unreadable: "fail", or "ignore" for samples that cannot be decoded or transformed. An
            ignored sample keeps its place, with weight 0, and is counted and logged. A damaged
            shard is never ignored, nor is an error of this machine, such as too many open files.

    Raises:
        ConfigError: an argument has a wrong value.
        DataError: the index is missing or damaged, or a shard is missing, damaged or different
            from the index. The message names the shard and the sample.
        StorageUnavailable: a store was away for too long, or the disk is full.

    Example:
        def decode(fields):
            return torch.tensor(fields["pixels"]) / 255, fields["label"]

        data = Shards("train", transform=decode)
        data.prepare()  # once, before the ranks start
        for batch, weight in session.batches(data, 32, epoch=0):
            ...  # one optimizer step
    """

    source: str | Sequence[str]
    _: KW_ONLY
    transform: Callable[[Fields], Any] | None = None
    columns: Sequence[str] | None = None
    index: str | None = None
    reader: Read | None = None
    lanes: int | None = None
    window: int | None = None
    cache_dir: str | None = None
    cache_gib: float | None = None
    unreadable: str = "fail"
    UNREADABLE: ClassVar[object] = object()  # value of an ignored sample

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            urls = [self.source]
        else:
            urls = list(self.source)
        if not urls or not all(isinstance(each, str) and each for each in urls):
            raise ConfigError(
                f"source: expected a path or URL, or a list of URLs, got {self.source!r}"
            )
        if any(map(has_password, urls)):  # every rank would store the password
            raise ConfigError(
                "source: expected URLs without a user name or a password; give them in the "
                "environment instead"
            )
        for name in ("lanes", "window"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, minimum=1))
        if self.unreadable not in ("fail", "ignore"):
            raise ConfigError(f'unreadable: expected "fail" or "ignore", got {self.unreadable!r}')
        if self.cache_gib is not None:
            finite_number("cache_gib", self.cache_gib, above=0)

    def prepare(self) -> str:
        """Make the index if it is missing, or add new shards to it. Return a description.

        Call this once before the ranks start, in a recipe's `prepare` or on one machine. It reads
        whole tar files and JSON lines, but only the heads of Parquet and MDS files.
        """
        return prepare_index(self._files, self.index or "", self.reader, columns=self.columns)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, sample: int) -> Any:
        entry, row = self._find(sample)
        shard, path = self._cache.find(entry, row)
        with reading(self._files, entry, f"sample {row}"):
            contents = shard.load(path, row)
        try:
            with reading(self._files, entry, f"sample {row}"):
                fields = shard.get(contents)
                if self.transform:
                    return self.transform(fields)
                return fields
        except DataError as error:
            if self.unreadable == "fail" or is_of_machine(error.__cause__):
                raise
            self._cache.num_ignored += 1
            if self._cache.num_ignored <= MAX_TOLD:
                logger.warning("%s; it keeps its place, with weight 0", error)
            return self.UNREADABLE

    def key(self, sample: int) -> str:
        """Return the URL of a sample's shard, and the sample's row there."""
        entry, row = self._find(sample)
        return f"{self._files.join(entry.name)} row {row}"

    def _find(self, sample: int) -> tuple[Entry, int]:
        if not 0 <= sample < len(self):
            raise IndexError(sample)
        shard = int(np.searchsorted(self._ends, sample, side="right"))
        row = sample - int(self._ends[shard] - self._index.samples[shard])
        return self._index.entry(shard), row

    def prefetch(self, samples: Sequence[int]) -> None:
        """Fetch the parts of shards with some samples, several at once."""
        numbers, starts = np.asarray(samples), self._ends - self._index.samples
        shards = np.searchsorted(self._ends, numbers, side="right")
        self._cache.ensure(
            {
                self._index.entry(shard): numbers[shards == shard] - starts[shard]
                for shard in np.unique(shards).tolist()
            }
        )

    @property
    def num_shards(self) -> int:
        return len(self._index)

    @property
    def shard_sizes(self) -> Indices:
        """(S,) samples of each shard."""
        return self._index.samples

    def find_shard(self, shard: int) -> tuple[Source, str, Entry]:
        """Return the place of the shards, the URL of the index, and a shard's entry there."""
        index = self.index or self._files.join(OWN_INDEX)
        return self._files, index, self._index.entry(shard)

    def describe_shards(self) -> dict[str, Any]:
        return {
            "number of shards": self.num_shards,
            "checksum of the shards": self._index.checksum(),
            **self._contents,
        }

    def continue_order(self, described: Mapping[str, Any]) -> Shards:
        """Return the shards and lanes of the `described` order.

        If the shards have changed since, their `describe_order` differs from `described`. Log a
        warning if there are more shards.
        """
        lanes, window = described.get("lanes"), described.get("window")
        found = dataclasses.replace(self, lanes=lanes, window=window)
        head = self._index.head(described.get("number of shards"))
        if len(head) < self.num_shards:
            logger.warning(
                "%s has %d shards more than its checkpoint: they are read from the next epoch on",
                self._files.join(""),
                self.num_shards - len(head),
            )
        vars(found)["_index"] = head
        return found

    def make_order(
        self, lanes: int, seed: int, epoch: int, share: float = 1.0, sizes: Indices | None = None
    ) -> EpochOrder:
        """Return the order of an epoch in `lanes` lanes.

        Args:
            share: share of these shards in the samples and bytes of open windows.
            sizes: (S,) rows that each shard's samples are packed into; None to order the samples.
        """
        if sizes is None:
            sizes = self._index.samples
        fits = choose_window(lanes, int(sizes.sum()), self._index.num_bytes)
        window = self.window or max(1, int(share * fits))
        return EpochOrder(sizes, seed, epoch, lanes, window)

    def num_ahead(self, order: Order, num_ranks: int, part: float = 1.0) -> float:
        """Return how many samples may be fetched ahead without filling the cache.

        A lane needs its open window and the two shards at the window's ends. Files leave the cache
        in the order of their last use. The cache must keep as many used files as files that were
        fetched ahead, so that the used files leave first.

        Args:
            part: part of the cache for these shards.

        Raises:
            ConfigError: the shards that this machine reads at once do not fit.
        """
        assert isinstance(order, EpochOrder)
        if not self._cache.has_copies(self._index.entry(0)):
            return math.inf
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        lanes = min(order.lanes, -(-order.lanes * ranks // num_ranks) + ranks)
        sizes = self._index.sizes[self._index.sizes >= 0]
        if not len(sizes):  # an HTTP server sends no lengths, so nothing is fetched ahead
            return 0.0
        num_bytes = int(sizes.mean() * self.num_shards)
        window = order.window * num_bytes // order.num_samples
        needed = lanes * (window + 2 * int(sizes.max()))
        needed, limit = min(needed, num_bytes), self._cache.limit * part
        if needed > limit:
            expected, got = needed / part / 2**30, self._cache.limit / 2**30
            raise ConfigError(
                f"cache_gib: expected at least {expected:.3g}, for windows of "
                f"{order.window} samples in {lanes} lanes, got {got:.3g}"
            )
        return order.lanes * order.window * min(1.0, (limit / max(1, needed) - 1) / 2)

    @functools.cached_property
    def _files(self) -> Source:
        if not isinstance(self.source, str):
            return Source(tuple(self.source), READ_TIMEOUT)
        place = self.source
        if "://" not in place:
            place = os.path.abspath(place)
        return Source(place.rstrip("/"), READ_TIMEOUT)

    @functools.cached_property
    def _index(self) -> ShardIndex:
        return read_index(self._files, self.index or "")

    @functools.cached_property
    def _contents(self) -> dict[str, str]:
        return describe_contents(self._files, self._index)

    @functools.cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self._index.samples)

    @functools.cached_property
    def _cache(self) -> ShardCache:
        default = os.path.join(tempfile.gettempdir(), f"flyte-ddp-shards-{os.getuid()}")
        directory = os.path.abspath(self.cache_dir or default)
        make_directory(directory)
        limit = min(DEFAULT_CACHE_BYTES, shutil.disk_usage(directory).free // 2)
        if self.cache_gib is not None:
            limit = int(self.cache_gib * 2**30)
        index = self.index or self._files.join(OWN_INDEX)
        return ShardCache(
            *(self._files, index, self.reader, self.columns, directory, limit),
            reader=version_of_reader(self.reader),
        )
