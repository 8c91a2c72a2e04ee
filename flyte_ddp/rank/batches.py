"""The samples of a loop of a user's own, shared as a recipe's: the same batches at any number of
ranks.

`session.batches` is the way in. Knows neither the session nor checkpoints.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from flyte_ddp.config.fields import whole_number
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.rank.agreement import NUM_SAMPLES, choose_samples
from flyte_ddp.rank.data import (
    SeededDataset,
    as_stream,
    check_count,
    collate_by,
    isolate_draws,
    keep,
    message_of,
    seed_generators,
)
from flyte_ddp.rank.nested import collate
from flyte_ddp.rank.plan import EpochPlan, Share, derived_seed
from flyte_ddp.rank.snapshot import unchanged

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flyte_ddp.data.shards import Stream

UNREADABLE = "cannot be read"  # in place of a sample that is compared

Check = Callable[[dict[int, Any], Callable[[], dict[int, Any]]], None]


@dataclass(frozen=True)
class EpochBatches:
    """The global batches of one epoch, of which each rank gets its part.

    Raises:
        ConfigError: `global_batch_size` has not a sample for each rank, or an iterable is to be
            shuffled or has several loader processes.
    """

    dataset: Any  # with a length and items, or an iterable of samples, which every rank reads whole
    global_batch_size: int
    epoch: int | None  # seeds the order and what samples draw; None for the data set's own order
    seed: int
    num_workers: int
    # makes a batch of samples; None for that of recipes
    collate_fn: Callable[[Sequence[Any]], Any] | None
    shuffle: bool = True
    first: int = 0  # samples of the epoch that are done
    mesh: DeviceMesh | None = None  # of the ranks that share the samples; None for all ranks
    # of a batch, where `collate_fn` leaves samples out; None for all of them
    num_samples: Callable[[Any], int] | None = None
    # Takes some samples by their numbers, before the first batch, and a function that reads them
    # once more.
    check: Check | None = None

    def __post_init__(self) -> None:
        for name, minimum in (
            ("global_batch_size", 1),
            ("epoch", 0),
            ("seed", 0),
            ("num_workers", 0),
        ):
            if (value := getattr(self, name)) is not None or name != "epoch":
                object.__setattr__(
                    self, name, whole_number(f"session.batches: {name}", value, minimum)
                )
        object.__setattr__(self, "shuffle", self.shuffle and self.epoch is not None)
        num_shares = self.share.num_shares
        if self.global_batch_size < num_shares:
            raise ConfigError(
                f"session.batches: global_batch_size: expected at least {num_shares}, a sample "
                f"for each rank, got {self.global_batch_size}"
            )
        if self.length is None and self.num_workers > 1:
            raise ConfigError(
                "session.batches: num_workers: expected at most 1 for an iterable data set, which "
                f"each of them would read whole, got {self.num_workers}"
            )

    @property
    def length(self) -> int | None:
        """Samples of an epoch; None for an iterable."""
        is_stream = isinstance(self.dataset, IterableDataset) or not hasattr(
            self.dataset, "__getitem__"
        )
        return None if is_stream else len(self.dataset)

    @property
    def readers(self) -> list[int] | None:
        """The ranks that read the same samples; None for all.

        With a part of a mesh they are those of the whole mesh: the ranks of a tensor-parallel group
        see the same ones.
        """
        root = getattr(self.mesh, "_get_root_mesh", lambda: None)()
        return None if root is None else sorted(root.mesh.flatten().tolist())

    @property
    def share(self) -> Share:
        """The share of this rank in each global batch."""
        if self.mesh is None:
            return Share(*rank_and_world_size())
        index = 0
        for size, place in zip(self.mesh.shape, self.mesh.get_coordinate() or (), strict=True):
            index = index * size + place
        return Share(index, self.mesh.size())

    def __iter__(self) -> Iterator[tuple[Any, float, int]]:
        """Yield (this rank's batch, its weight, samples of the epoch that are done with it), as
        `session.batches`.
        """
        return self._from_items(self.length) if self.length is not None else self._from_stream()

    @property
    def stream(self) -> Stream | None:
        """The data set, if its samples are read in an order of its own."""
        return as_stream(self.dataset) if self.shuffle else None

    def describe_order(self) -> dict[str, Any]:
        """Return the plain values on which a place in an epoch of `stream` depends."""
        stream = self.stream
        return stream.describe_order(self.global_batch_size, self.seed) if stream else {}

    def _plan(self, length: int) -> EpochPlan:
        return EpochPlan(
            length,
            self.global_batch_size,
            self.seed,
            self.epoch or 0,
            self.share,
            self.first,
            self.shuffle,
            self.stream,
        )

    def _from_items(self, length: int) -> Iterator[tuple[Any, float, int]]:
        plan, share = self._plan(length), self.share
        if self.check and self.stream:
            self.check({}, dict)  # its order's values stand for the samples
        elif self.check:
            self._check_items(self.check, choose_samples(length, self.seed))
        places = (
            [(plan.epoch, index) for index in share.cut(batch).tolist()] for batch in plan.batches()
        )
        done = self.first
        try:
            for number, (batch, num_read) in enumerate(
                self._load(places, self._make, self.num_workers)
            ):
                size = plan.size(number)
                done += size
                weight = share.weigh(size)
                if weight and num_read < share.count(size):
                    weight *= num_read / share.count(size)
                if num_read:
                    weight *= self._share_kept(batch, num_read)
                yield batch, weight, done
        except DataError as error:
            raise DataError(message_of(error)) from error

    def list_samples(self, begin: int, end: int) -> list[int]:
        """Return the samples at places of the epoch's order; of an iterable the places."""
        if self.length is None:
            return list(range(begin, end))
        return self._plan(self.length).samples(begin, end).tolist()

    def _check_items(self, check: Check, chosen: list[int]) -> None:
        """Read these samples for `check`, by a loader process where there are some: what it opens
        is its own.
        """
        # each alone: of several, those that cannot be read are left out
        plan, num_workers = [[(0, index)] for index in chosen], min(1, self.num_workers)

        def read(times: int) -> Iterator[dict[int, Any]]:
            loaded = iter(self._load(times * plan, list, num_workers))
            for _ in range(times):
                pairs = zip(chosen, itertools.islice(loaded, len(chosen)), strict=True)
                yield {
                    index: samples[0] if num_read else UNREADABLE
                    for index, (samples, num_read) in pairs
                }

        # by one process, which goes on with what it draws by a generator without a seed
        again = read(2)
        with unchanged(torch.nn.Module(), self.dataset):
            check(next(read(1)), lambda: next(again))

    def _load(
        self, plan: Iterable[list[tuple[int, int]]], make: Any, num_workers: int
    ) -> DataLoader[Any]:
        return DataLoader(
            _IsolatedDataset(self.dataset, self.seed, functools.partial(collate_by, make)),
            batch_sampler=plan,
            collate_fn=keep,
            # Forked, as is torch's default: the data set of a script or a notebook cannot always be
            # pickled.
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else it draws from the loop's
        )

    def _from_stream(self) -> Iterator[tuple[Any, float, int]]:
        stream, draws = self._open_stream(), list[Any]()
        with isolate_draws(draws):
            done = sum(1 for _ in itertools.islice(stream, self.first))
        if done < self.first:
            raise ConfigError(
                f"session.batches: dataset: expected at least the {self.first} samples that the "
                f"checkpoint's epoch had done, got {done}"
            )
        while True:
            with isolate_draws(draws):
                batch = list(itertools.islice(stream, self.global_batch_size))
            if not batch:
                break
            if self.check and done == self.first:
                numbers = range(done, done + min(len(batch), NUM_SAMPLES))
                self.check(
                    dict(zip(numbers, batch, strict=False)),
                    functools.partial(self._read_again, numbers),
                )
            mine, weight = self.share.cut(batch), self.share.weigh(len(batch))
            done += len(batch)
            made = self._make(mine)
            if made is None:
                raise ConfigError(
                    f"session.batches: collate_fn: expected a batch of {len(mine)} samples of an "
                    "iterable data set, where no other sample can stand in for them, got None"
                )
            yield made, weight * self._share_kept(made, len(mine)), done
        if not done:
            raise ConfigError(
                "session.batches: dataset: expected an iterable that begins anew in each epoch, "
                "as a generator does not, got an empty one"
            )

    @property
    def _make(self) -> Callable[[Sequence[Any]], Any]:
        return self.collate_fn or collate

    def _share_kept(self, batch: Any, num_samples: int) -> float:
        """Return the share of its samples that `collate_fn` has kept in a batch."""
        if self.num_samples is None:
            return 1.0
        place = "session.batches: num_samples"
        return check_count(place, self.num_samples(batch), num_samples) / num_samples

    def _open_stream(self) -> Iterator[Any]:
        if self.epoch is not None and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        samples: IterableDataset[Any] | DataLoader[Any]
        samples = _SeededStream(self.dataset, derived_seed(self.seed, self.epoch or 0))
        if self.num_workers:
            samples = DataLoader(
                samples, batch_size=None, num_workers=1, generator=torch.Generator()
            )
        return iter(samples)

    def _read_again(self, numbers: range) -> dict[int, Any]:
        if isinstance(self.dataset, Iterator):
            return {}
        with isolate_draws([]):
            return dict(
                zip(
                    numbers,
                    itertools.islice(self._open_stream(), numbers.start, None),
                    strict=False,
                )
            )


Track = Callable[[EpochBatches], Iterator[tuple[Any, float]]]


@dataclass(eq=False, repr=False)
class Batches(IterableDataset[tuple[Any, float]]):
    """An epoch's (batch of this rank, weight): for a loop, or as what a DataLoader or a framework's
    data module has.

    Each pass over it begins where `track` says. It has no state, because that is the session's.
    """

    batches: EpochBatches
    # notes how far a pass is, and leaves out what was done before a restart; None where nobody asks
    track: Track | None

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        if get_worker_info() is not None:
            raise ConfigError(
                "session.batches: num_workers: expected 0 of a DataLoader around it: "
                "session.batches has its own num_workers"
            )
        if self.track is not None:
            yield from self.track(self.batches)
        else:
            for batch, weight, _ in self.batches:
                yield batch, weight

    def __len__(self) -> int:
        """Return the batches of a whole epoch, also where some are done."""
        if self.batches.length is None:
            raise TypeError("session.batches: an iterable data set has no length")
        return -(-self.batches.length // self.batches.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: with a state, even an empty one, torchdata's StatefulDataLoader skips no
        batches itself.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Change nothing."""


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's place among the ranks, by the process group or torchrun's variables;
    else it is alone.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class _IsolatedDataset(SeededDataset):
    """Leaves the loop's own random draws alone: in a loader without processes they share their
    generators.
    """

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> Any:
        with isolate_draws([]):
            return super().__getitems__(places)


@dataclass(eq=False, repr=False)
class _SeededStream(IterableDataset[Any]):
    """Draws the same on every rank, in a loader process or not: each rank takes its part of the
    same samples.
    """

    samples: Iterable[Any]
    seed: int

    def __iter__(self) -> Iterator[Any]:
        seed_generators(self.seed)
        yield from self.samples
