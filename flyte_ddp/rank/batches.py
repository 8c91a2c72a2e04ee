"""The samples of a loop of a user's own, shared as a recipe's: the same batches at any number of
ranks.

`session.batches` and `flyte_ddp.data.loader` are the ways in. Knows neither the session nor
checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from flyte_ddp.config.fields import whole_number
from flyte_ddp.data.schedule import drop_ahead, find_step
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.rank.agreement import NUM_SAMPLES, choose_samples, compare
from flyte_ddp.rank.data import (
    SeededDataset,
    check_count,
    collate_by,
    isolate_draws,
    keep,
    message_of,
    seed_generators,
)
from flyte_ddp.rank.fast_start import find_root_mesh
from flyte_ddp.rank.nested import collate
from flyte_ddp.rank.plan import (
    EpochPlan,
    Share,
    as_counted,
    as_stream,
    derived_seed,
    list_samples,
)
from flyte_ddp.rank.snapshot import unchanged

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flyte_ddp.data.mixture import Stream

UNREADABLE = "cannot be read"  # stands for an unreadable sample in a comparison

Check = Callable[[dict[int, Any], Callable[[], dict[int, Any]]], None]


@dataclass(frozen=True)
class EpochBatches:
    """The global batches of one epoch. Each rank gets its part of every batch.

    Raises:
        ConfigError: `global_batch_size` is below the number of ranks, or an iterable is to be
            shuffled or has several loader processes.
    """

    # has a length and items, or is an iterable of samples that every rank reads whole
    dataset: Any
    global_batch_size: int
    epoch: int | None  # seeds the order and what samples draw; None for the data set's own order
    seed: int
    num_workers: int
    # makes a batch of samples; None for the default of recipes
    collate_fn: Callable[[Sequence[Any]], Any] | None
    shuffle: bool = True
    first: int = 0  # samples of the epoch that are done
    # the ranks that share the samples, or this rank's share among them; None for all ranks
    shared_by: DeviceMesh | Share | None = None
    # counts the samples of a batch, if `collate_fn` leaves samples out; None if it keeps all
    num_samples: Callable[[Any], int] | None = None
    # is called before the first batch, with some samples by their numbers and a function that
    # reads them once more
    check: Check | None = None
    caller: str = "session.batches"  # the function that errors name

    def __post_init__(self) -> None:
        for name, minimum in (
            ("global_batch_size", 1),
            ("epoch", 0),
            ("seed", 0),
            ("num_workers", 0),
        ):
            value = getattr(self, name)
            if value is not None or name != "epoch":
                value = whole_number(f"{self.caller}: {name}", value, minimum)
                object.__setattr__(self, name, value)
        object.__setattr__(self, "shuffle", self.shuffle and self.epoch is not None)
        num_shares = self.share.num_shares
        if self.global_batch_size < num_shares:
            raise ConfigError(
                f"{self.caller}: global_batch_size: expected at least {num_shares}, a sample for "
                f"each rank, got {self.global_batch_size}"
            )
        if self.length is None and self.num_workers > 1:
            raise ConfigError(
                f"{self.caller}: num_workers: expected at most 1 for an iterable data set, which "
                f"each of them would read whole, got {self.num_workers}"
            )

    @property
    def length(self) -> int | None:
        """The number of samples in an epoch; None for an iterable."""
        is_stream = isinstance(self.dataset, IterableDataset) or not hasattr(
            self.dataset, "__getitem__"
        )
        if is_stream:
            return None
        return len(self.dataset)

    @property
    def num_batches(self) -> int:
        """The number of batches in a whole epoch, even if some are done."""
        if self.length is None:
            raise TypeError(f"{self.caller}: an iterable data set has no length")
        return -(-self.length // self.global_batch_size)

    @property
    def readers(self) -> list[int] | None:
        """The ranks that read the same data set; None for all ranks.

        If a part of a mesh shares the samples, the ranks of the whole mesh count: the ranks of a
        tensor-parallel group read the same samples.
        """
        root = find_root_mesh(self.shared_by)
        if root is None:
            return None
        return sorted(root.mesh.flatten().tolist())

    @property
    def share(self) -> Share:
        """The share of this rank in each global batch."""
        if isinstance(self.shared_by, Share):
            return self.shared_by
        if self.shared_by is None:
            return Share(*rank_and_world_size())
        index = 0
        mesh = self.shared_by
        for size, place in zip(mesh.shape, mesh.get_coordinate() or (), strict=True):
            index = index * size + place
        return Share(index, mesh.size())

    def __iter__(self) -> Iterator[tuple[Any, float, int]]:
        """Yield this rank's batch, its weight, and the number of samples of the epoch that are done
        after the batch. See `session.batches`.
        """
        length = self.length
        if length is None:
            return self._from_stream()
        return self._from_items(length)

    @property
    def stream(self) -> Stream | None:
        """The data set, if its samples are read in an order of its own."""
        if not self.shuffle:
            return None
        return as_stream(self.dataset)

    def describe_order(self) -> dict[str, Any]:
        """Return the plain values on which a place in an epoch of `stream` depends."""
        stream = self.stream
        if not stream:
            return {}
        return stream.describe_order(self.global_batch_size, self.seed)

    @property
    def call(self) -> dict[str, Any]:
        """The plain values that every state of these batches has in common."""
        length = self.length
        if self.stream:  # shards may be added to a stream between two epochs
            length = None
        return {
            "shuffle": self.shuffle,
            "seed": self.seed,
            "dataset: number of samples": length,
        }

    def continue_order(self, known: Mapping[str, Any], where: str) -> EpochBatches:
        """Return these batches in the `known` order of a stream.

        Args:
            where: where the known order comes from, for the error.

        Raises:
            ConfigError: the data have another order.
        """
        if not (self.stream and known):
            return self
        continued = dataclasses.replace(self, dataset=self.stream.continue_order(known))
        order, found = continued.describe_order(), continued
        num_steps = (self.epoch or 0) * self.num_batches + -(-self.first // self.global_batch_size)
        is_scheduled = any(find_step(name) is not None for name in order)
        known, order = drop_ahead(known, num_steps), drop_ahead(order, num_steps)
        # A new epoch may have another order and additional shards.
        if not self.first and not is_scheduled:
            found = self
            names = [name for name in known if name in order and name.endswith("shards")]
            known = {name: known[name] for name in names}
            order = {name: order[name] for name in names}
        remedy = ": other data need another place for the checkpoints"
        compare(f"{self.caller}: ", dict(known), order, where, remedy=remedy)
        return found

    def _plan(self, length: int) -> EpochPlan:
        data_order = None
        if not self.shuffle:
            data_order = list_samples(self.dataset, length)
        return EpochPlan(
            length,
            self.global_batch_size,
            self.seed,
            self.epoch or 0,
            self.share,
            self.first,
            data_order,
            self.stream,
            self.epoch or 0,
        )

    def _from_items(self, length: int) -> Iterator[tuple[Any, float, int]]:
        plan, share = self._plan(length), self.share
        if self.check and self.stream:
            self.check({}, dict)  # the stream's order stands for the samples
        elif self.check:
            self.check_items(self.check)

        def locate(batch: torch.Tensor) -> list[tuple[int, int]]:
            return [(plan.epoch, index) for index in share.cut(batch).tolist()]

        places = map(locate, plan.batches())
        done = self.first
        try:
            loaded = self._load(places, self._make, self.num_workers)
            for number, (batch, numbers) in enumerate(loaded):
                size, num_read = plan.size(number), len(numbers)
                done += size
                weight = self._weigh(plan, number)
                if weight and num_read < share.count(size):
                    weight *= num_read / share.count(size)
                if num_read:
                    weight *= self._share_kept(batch, num_read)
                yield batch, weight, done
        except DataError as error:
            raise DataError(message_of(error)) from error

    def _weigh(self, plan: EpochPlan, number: int) -> float:
        """Return the weight of this rank's mean in the mean over a batch, times the number of
        shares. It counts targets if the data set has stored their numbers, else samples.
        """
        share, size, counted = plan.share, plan.size(number), as_counted(self.dataset)
        if counted is None:
            return share.weigh(size)
        batch = plan.batch(number)
        own = share.cut(batch)[: share.count(size)]
        own_targets, num_targets = (counted.count_targets(each.tolist()) for each in (own, batch))
        return float(own_targets * share.num_shares / num_targets)

    def list_samples(self, begin: int, end: int) -> list[int]:
        """Return the samples at places of the epoch's order; for an iterable, the places."""
        if self.length is None:
            return list(range(begin, end))
        return self._plan(self.length).samples(begin, end).tolist()

    def check_items(self, check: Check) -> None:
        """Read some samples for `check`. A loader process reads them if the run has some: its open
        files are its own.
        """
        chosen = choose_samples(len(self.dataset), self.seed)
        # Each sample is a batch of its own, because unreadable samples are left out of a batch.
        plan, num_workers = [[(0, index)] for index in chosen], min(1, self.num_workers)

        def read(times: int) -> Iterator[dict[int, Any]]:
            loaded = iter(self._load(times * plan, list, num_workers))
            for _ in range(times):
                pairs = zip(chosen, itertools.islice(loaded, len(chosen)), strict=True)
                found: dict[int, Any] = {}
                for index, (samples, numbers) in pairs:
                    found[index] = UNREADABLE
                    if numbers:
                        found[index] = samples[0]
                yield found

        # A single process reads twice, so that a generator without a seed draws other numbers.
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
            generator=torch.Generator(),  # leaves the loop's generator alone
        )

    def _from_stream(self) -> Iterator[tuple[Any, float, int]]:
        stream, draws = self._open_stream(), list[Any]()
        with isolate_draws(draws):
            done = sum(1 for _ in itertools.islice(stream, self.first))
        if done < self.first:
            raise ConfigError(
                f"{self.caller}: dataset: expected at least the {self.first} samples that the "
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
                    f"{self.caller}: collate_fn: expected a batch of {len(mine)} samples of an "
                    "iterable data set, where no other sample can stand in for them, got None"
                )
            yield made, weight * self._share_kept(made, len(mine)), done
        if not done:
            raise ConfigError(
                f"{self.caller}: dataset: expected an iterable that begins anew in each epoch, "
                "as a generator does not, got an empty one"
            )

    @property
    def _make(self) -> Callable[[Sequence[Any]], Any]:
        return self.collate_fn or collate

    def _share_kept(self, batch: Any, num_samples: int) -> float:
        """Return the share of a batch's samples that `collate_fn` has kept."""
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
            samples = itertools.islice(self._open_stream(), numbers.start, None)
            return dict(zip(numbers, samples, strict=False))


Track = Callable[[EpochBatches], Iterator[tuple[Any, float]]]


@dataclass(eq=False, repr=False)
class Batches(IterableDataset[tuple[Any, float]]):
    """The batches of this rank in an epoch, each with its weight. Their reader is a loop, a
    DataLoader, or a framework's data module.

    Each pass begins where `track` chooses. The session keeps the state.
    """

    batches: EpochBatches
    # notes the place of a pass, and skips the batches that were done before a restart; None for a
    # plain pass
    track: Track | None

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        refuse_loader_process(self.batches.caller)
        if self.track is not None:
            yield from self.track(self.batches)
        else:
            for batch, weight, _ in self.batches:
                yield batch, weight

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, even if some are done."""
        return self.batches.num_batches

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: torchdata's StatefulDataLoader then skips no batches itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Change nothing."""


def refuse_loader_process(caller: str) -> None:
    """Raise ConfigError in a loader process: each process would yield all batches."""
    if get_worker_info() is not None:
        raise ConfigError(
            f"{caller}: num_workers: expected 0 of a DataLoader around it: {caller} has its own "
            "num_workers"
        )


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the world size, from the process group or torchrun's
    variables. Without both it is alone.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class _IsolatedDataset(SeededDataset):
    """Leaves the loop's own random draws alone. A loader without processes shares the loop's
    generators.
    """

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> Any:
        with isolate_draws([]):
            return super().__getitems__(places)


@dataclass(eq=False, repr=False)
class _SeededStream(IterableDataset[Any]):
    """Draws the same samples on every rank, with or without a loader process. Each rank takes its
    part of the same samples.
    """

    samples: Iterable[Any]
    seed: int

    def __iter__(self) -> Iterator[Any]:
        seed_generators(self.seed)
        yield from self.samples
