"""A loader for any training loop. Its position in the data is a small state, which is valid at any
number of ranks.

`flyte_ddp.data.loader` is the way in. Knows no session, no launcher and no framework:
torch.distributed is enough.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from flyte_ddp.config.fields import whole_number
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.agreement import (
    Facts,
    check_together,
    compare,
    function_world,
    name_samples,
)
from flyte_ddp.rank.batches import EpochBatches, refuse_loader_process
from flyte_ddp.rank.fast_start import open_group_store
from flyte_ddp.rank.plan import Share
from flyte_ddp.world import RankNotes, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CALLER = "loader"
PLACE = f"{CALLER}: "  # the beginning of each error
SAVED = ", with which the state was saved"
REMEDY = ": a state belongs to one data set, seed and order"
# the keys of a state: numbers, and descriptions of the data
NUMBERS, DESCRIPTIONS = ("epoch", "num_samples"), ("call", "order", "samples")
MAX_WAIT = 3600.0  # most seconds to wait for another rank

CPU = torch.device("cpu")

_numbers = itertools.count()  # the numbers of this process's loaders


def loader(
    data: Any,
    global_batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    weights: bool = False,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    num_workers: int = 0,
    mesh: DeviceMesh | None = None,
    rank: int | None = None,
    num_ranks: int | None = None,
) -> Loader:
    """Return a loader of this rank's part of each global batch, for any training loop.

    Every sample of an epoch is in one batch of one rank. The number of ranks does not change which
    samples share a batch. `iter` yields the batches that are left of the current epoch, and the
    next `iter` begins the next epoch. A loop that is left early goes on where it was left.

    `state_dict` is a small JSON value, the same on every rank. It counts the batches that the loop
    was given, and no batch that a loader process has prepared. After an epoch's last batch it is
    the beginning of the next epoch. `load_state_dict` continues at any number of ranks and loader
    processes. The caller saves the state: a session of this package does not know it.

    All ranks of the default process group loop together. Before each epoch they compare data, seed
    and position through the group's store.

    Args:
        data: a data set with a length and items, such as `Shards` and `Mixture`, or an iterable.
            Every rank reads all samples of an iterable and keeps its own, in the iterable's order.
        global_batch_size: samples of a batch of all ranks together.
        seed: seed of the order and of augmentation, which is drawn by seed, epoch and sample.
        shuffle: draws a new order for each epoch. Without it, the order is the order of the data.
        epochs: number of epochs after which `iter` yields nothing; None for no end.
        weights: yield pairs of a batch and the weight of its mean loss. With DDP or FSDP the
            average is then the gradient of the mean loss of the whole global batch, however many
            samples each rank has. Without weights, batches have to divide evenly.
        collate_fn: makes a batch of samples, as in a DataLoader; by default tensors, nested as the
            samples are.
        num_workers: loader processes of this rank; at most 1 for an iterable.
        mesh: the data-parallel dimensions of the device mesh. Ranks that differ in other
            dimensions get the same samples.
        rank, num_ranks: this rank's number among the ranks that share the samples, in place of
            `mesh`. They are compared if the process group has `num_ranks` ranks.

    Raises:
        ConfigError: an argument has a wrong value; a batch does not divide, and `weights` is False;
            a state belongs to other data or another seed; ranks differ, or not all of them loop.

    Example:
        data = TensorDataset(torch.arange(8.0).view(8, 1))
        batches = loader(data, 4)
        for epoch in range(batches.epoch, 2):
            for (inputs,) in batches:
                state = batches.state_dict()  # for the checkpoint after this batch
    """
    is_sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not (is_sized or hasattr(data, "__iter__")):
        raise ConfigError(
            f"{PLACE}data: expected a data set with a length and items, or an iterable, got a "
            f"{type(data).__name__}"
        )
    if epochs is not None:
        epochs = whole_number(f"{PLACE}epochs", epochs, minimum=1)
    shared_by: DeviceMesh | Share | None = mesh
    if rank is not None or num_ranks is not None:
        shared_by = _make_share(mesh, rank, num_ranks)
    batches = EpochBatches(
        data,
        global_batch_size,
        0,
        seed,
        num_workers,
        collate_fn,
        shuffle,
        shared_by=shared_by,
        caller=CALLER,
    )
    if batches.length == 0:
        raise ConfigError(f"{PLACE}data: expected at least one sample, got none")
    return Loader(batches, weights, epochs)


def _make_share(mesh: object, rank: int | None, num_ranks: int | None) -> Share:
    """Return the share that the caller names."""
    if rank is None or num_ranks is None or mesh is not None:
        raise ConfigError(
            f"{PLACE}rank: expected rank and num_ranks together and without a mesh, got rank="
            f"{rank!r}, num_ranks={num_ranks!r}, mesh={mesh!r}"
        )
    num_ranks = whole_number(f"{PLACE}num_ranks", num_ranks, minimum=1)
    return Share(whole_number(f"{PLACE}rank", rank, maximum=num_ranks - 1), num_ranks)


@dataclass(eq=False, repr=False)
class Loader(IterableDataset[Any]):
    """The batches of this rank, epoch by epoch, and the position among them. See `loader`."""

    batches: EpochBatches  # an epoch as the caller has asked for it
    weights: bool
    epochs: int | None  # None for no end
    epoch: int = 0  # the epoch of the next batch
    num_samples: int = 0  # samples of this epoch that are done, of all ranks

    def __post_init__(self) -> None:
        self._number, self._num_passes = next(_numbers), 0
        # The current epoch may go on with the shards and lanes of a state.
        self._current = self.batches
        self._check_division(self.batches)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, even if some are done."""
        return self._current.num_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of the current epoch. The position moves with the batches
        that are taken, and not before the first one.
        """
        refuse_loader_process(CALLER)
        if self.epochs is not None and self.epoch >= self.epochs:
            return
        batches = dataclasses.replace(self._current, epoch=self.epoch, first=self.num_samples)
        self._check_division(batches)
        self._compare_ranks(batches)
        length, place = batches.length, self._place
        for batch, weight, num_samples in batches:
            if self._place != place:
                raise ConfigError(
                    f"{PLACE}expected one loop at a time, got one at sample {place[1]} of epoch "
                    f"{place[0]} behind another one or load_state_dict"
                )
            self._check_weight(weight, num_samples)
            self.num_samples = num_samples
            if num_samples == length:
                self._begin_epoch()
            place = self._place
            yield (batch, weight) if self.weights else batch
        if length is None and self._place == place:
            self._begin_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was taken, and what the order of the data
        follows from, as a JSON value.
        """
        return {
            "epoch": self.epoch,
            "num_samples": self.num_samples,
            "call": self._current.call,
            "order": self._current.describe_order(),
            "samples": dict(self._samples),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the position of a state, at any number of ranks and loader processes. As in
        torchdata, an empty state changes nothing.

        Raises:
            ConfigError: the state has another form, or belongs to other data or another seed.
        """
        if isinstance(state, Mapping) and not state:
            return
        _check_form(state)
        epoch = whole_number(f"{PLACE}state['epoch']", state["epoch"])
        first = whole_number(f"{PLACE}state['num_samples']", state["num_samples"])
        batches = dataclasses.replace(self.batches, epoch=epoch, first=first)
        order = state["order"]
        compare(PLACE, state["call"], batches.call, SAVED, remedy=REMEDY)
        if batches.stream and order:
            batches = batches.continue_order(order, SAVED)
        else:
            compare(PLACE, order, batches.describe_order(), SAVED, remedy=REMEDY)
        read = self._make_reader()
        compare(PLACE, state["samples"], self._samples, SAVED, remedy=REMEDY, read=read)
        if batches.length is not None:
            whole_number(f"{PLACE}state['num_samples']", first, maximum=batches.length - 1)
        self._current, self.epoch, self.num_samples = batches, epoch, first

    @property
    def _place(self) -> tuple[int, int]:
        return self.epoch, self.num_samples

    def _begin_epoch(self) -> None:
        self._current, self.epoch, self.num_samples = self.batches, self.epoch + 1, 0

    def _check_division(self, batches: EpochBatches) -> None:
        """Raise ConfigError if ranks without weights would have unequal parts of a batch."""
        num_ranks, total = batches.share.num_shares, batches.global_batch_size
        last = (batches.length or 0) % total
        if not self.weights and (total % num_ranks or last % num_ranks):
            raise ConfigError(
                f"{PLACE}global_batch_size: expected batches that {num_ranks} ranks share evenly, "
                f"or weights=True, got {total} samples, and {last or total} in an epoch's last "
                "batch"
            )

    def _check_weight(self, weight: float, num_samples: int) -> None:
        """Raise ConfigError if a batch needs a weight that the loop does not get."""
        if not self.weights and weight != 1:
            raise ConfigError(
                f"{PLACE}weights: expected True for unequal parts and samples that are left out, "
                f"got False and weight {weight:g} for the batch up to sample {num_samples} of "
                f"epoch {self.epoch}"
            )

    @functools.cached_property
    def _samples(self) -> Facts:
        """The facts of some samples; none of a stream, whose order stands for them, and none of an
        iterable, whose samples belong to one epoch.
        """
        found: Facts = {}
        if self.batches.length is not None and not self.batches.stream:
            self.batches.check_items(lambda samples, _: found.update(name_samples(samples)))
        return found

    def _make_reader(self) -> Callable[[], Facts]:
        """Return a function that reads these samples again, twice at most."""
        readings: list[Facts] = []

        def check(_: object, read_again: Callable[[], dict[int, Any]]) -> None:
            readings.extend(name_samples(read_again()) for _ in range(2))

        def read() -> Facts:
            if not readings:
                self.batches.check_items(check)
            return readings.pop()

        return read

    def _compare_ranks(self, batches: EpochBatches) -> None:
        """Compare data, seed and position with the other ranks of the process group.

        Raises:
            ConfigError: they differ, or a rank does not begin its loop; the same on all ranks.
        """
        self._num_passes += 1
        world, ranks = _find_peers(batches)
        if len(ranks) < 2:
            return
        store = open_group_store()
        if store is None:
            return
        facts: Facts = {
            "global_batch_size": batches.global_batch_size,
            "epochs": self.epochs,
            "epoch": self.epoch,
            "num_samples": self.num_samples,
            "number of ranks": batches.share.num_shares,
        }
        facts |= batches.call | batches.describe_order() | self._samples
        notes = RankNotes(store, f"flyte_ddp/loader-{self._number}-{self._num_passes}", world)
        seconds = min(MAX_WAIT, function_world()[1])
        check_together(PLACE, facts, self._make_reader(), notes, ranks, seconds)


def _check_form(state: Any) -> None:
    """Raise ConfigError if this is no state of a loader."""
    if not isinstance(state, Mapping):
        got = f"a {type(state).__name__}"
    elif set(state) != {*NUMBERS, *DESCRIPTIONS}:
        got = f"the keys {', '.join(sorted(map(str, state)))}"
    elif not all(isinstance(state[name], Mapping) for name in DESCRIPTIONS):
        got = "other values in it"
    else:
        return
    raise ConfigError(f"{PLACE}state: expected what state_dict() has returned, got {got}")


def _find_peers(batches: EpochBatches) -> tuple[World, Sequence[int]]:
    """Return this rank among the ranks that loop together, and their numbers; no numbers if they
    are not known.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return World(0, 1, CPU), ()
    rank, size = dist.get_rank(), dist.get_world_size()
    share = batches.shared_by
    if not isinstance(share, Share):
        return World(rank, size, CPU), batches.readers or range(size)
    if share.num_shares != size:  # several groups share the samples, or other ranks need none
        return World(rank, size, CPU), ()
    return World(share.index, size, CPU), range(size)
