"""Facts that all ranks must have in common: the samples and the names of the classes.

A split that each rank draws for itself, or class numbers in the order of a set, train the wrong
thing without an error. So the facts are compared before the first step of every attempt, and with
those of the checkpoint that it resumes from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from flyte_ddp.checkpoints.files import compute_checksum
from flyte_ddp.checkpoints.state import find_tensors, in_mesh, is_split, own_box
from flyte_ddp.config import TrainingConfig
from flyte_ddp.data.contents import is_comparable
from flyte_ddp.data.order import ORDER
from flyte_ddp.data.schedule import drop_ahead, find_step
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.data import Samples, isolate_draws
from flyte_ddp.rank.fast_start import group_timeout
from flyte_ddp.rank.nested import parts_in
from flyte_ddp.rank.plan import as_stream
from flyte_ddp.recipes import Recipe, list_class_names, locate
from flyte_ddp.world import RankNotes, World

NUM_SAMPLES = 8  # samples that stand for a whole data set
MAX_NUMBERS = 2**20  # numbers of a tensor that are compared
# The tolerance of means: decoding and resizing differ in the last digits between processors.
# Integers are compared to the bit.
TOLERANCE = 1e-4
REMEDY = "seed what draws the samples, and sort what lists them"

# plain values by their names in an error; a sample's value is a list with an entry for each part
Facts = dict[str, Any]
# reads the samples once more if facts differ; returns none where a second reading is impossible
Read = Callable[[], Facts]


def choose_samples(num_samples: int, seed: int) -> list[int]:
    """Return the numbers of the samples to compare: the first, the last, and some between."""
    if num_samples <= NUM_SAMPLES:
        return list(range(num_samples))
    return sorted(
        {0, num_samples - 1, *random.Random(seed).sample(range(num_samples), NUM_SAMPLES - 2)}
    )


def name_samples(samples: Mapping[int, Any]) -> Facts:
    """Return the facts of samples of `session.batches` by their numbers."""
    return {f"dataset: sample {number}": summarize(sample) for number, sample in samples.items()}


def describe_samples(
    recipe: Recipe, config: TrainingConfig, train: Samples, test: Samples
) -> Facts:
    """Return the facts of a recipe's data. Checkpoints store them, too."""
    facts: Facts = {"class_names": str(list_class_names(recipe))}
    for name, samples in (("training", train), ("held-out", test)):
        facts[f"number of {name} samples"] = len(samples)
        stream = as_stream(samples.dataset)
        if stream:  # a stream's samples lie in files far apart, so its order is compared
            order = stream.describe_order(config.global_batch_size, config.seed)
            facts |= {f"{name} {what}": value for what, value in order.items()}
            continue
        chosen = choose_samples(len(samples), config.seed)
        indices = [torch.tensor([index], device=samples.index_device) for index in chosen]
        with isolate_draws([]):
            for index, sample in zip(chosen, samples.batches(indices, epoch=0), strict=True):
                facts[f"{name} sample {index}"] = summarize(sample)
    return facts


def check_ranks(recipe: Recipe, facts: Facts, read: Read, world: World) -> None:
    """Check that this rank has the data of rank 0. Every rank calls it.

    Args:
        facts: the facts of the recipe's data on this rank.

    Raises:
        ConfigError: the data differ; names the field and the rank.
    """
    ranks = " on all ranks, as on rank 0", f" on rank {world.rank}"
    place = f"{locate(recipe, 'datasets')}: "
    compare(place, world.broadcast_object(facts), facts, *ranks, read=read)


def check_in_store(facts: Facts, read: Read, notes: RankNotes, ranks: Sequence[int]) -> None:
    """Check the facts of a data set of `session.batches`. No rank waits, because another rank may
    never call this.

    Each rank writes its own facts before it reads the others' facts. So at least one of two ranks
    reads both.

    Args:
        notes: the ranks' notes for this comparison.
        ranks: the ranks that must have the same facts. Each is compared with the first.

    Raises:
        ConfigError: the facts differ; names the field and the rank.
    """
    notes.write(facts)
    rank = notes.world.rank
    is_first = rank == ranks[0]
    others = ranks[:1]
    if is_first:
        others = ranks
    for other in others:
        theirs = notes.read(other)
        if other == rank or theirs is None:
            continue
        first, second, differing = theirs, facts, rank
        if is_first:
            first, second, differing = facts, theirs, other
        where = f" on all ranks, as on rank {ranks[0]}"
        there = f" on rank {differing}"
        remedy = (
            ": every rank reads the whole data set and keeps its own part, so do not split it by "
            f"rank, {REMEDY}"
        )
        compare("session.batches: ", first, second, where, there, remedy, read)


def check_together(
    place: str, facts: Facts, read: Read, notes: RankNotes, ranks: Sequence[int], seconds: float
) -> None:
    """Check that these ranks have the same facts. Each of them calls it, and all raise the same
    error.

    The first rank compares. So a store with many ranks has few questions to answer.

    Args:
        place: the beginning of the error.
        notes: the ranks' notes for this comparison alone.
        seconds: time to wait for another rank.

    Raises:
        ConfigError: the facts differ, or a rank does not call; names the field and the rank.
    """
    first = ranks[0]
    verdicts = replace(notes, name=f"{notes.name}-verdict")
    if notes.world.rank == first:
        error = _find_error(place, facts, read, notes, ranks, seconds)
        verdicts.write(error)
    else:
        notes.write(facts)
        error = verdicts.await_note(first, 2 * seconds)  # the first rank waits for others, too
        if error is None:
            error = _describe_absence(place, first, seconds)
    if error:
        raise ConfigError(error)


def _find_error(
    place: str, facts: Facts, read: Read, notes: RankNotes, ranks: Sequence[int], seconds: float
) -> str:
    """Return the first difference of another rank's facts from the first rank's; "" for none."""
    for rank in ranks[1:]:
        theirs = notes.await_note(rank, seconds)
        if theirs is None:
            return _describe_absence(place, rank, seconds)
        notes.delete(rank)
        where, there = f" on all ranks, as on rank {ranks[0]}", f" on rank {rank}"
        remedy = (
            ": every rank needs the same data, seed and state, and takes its own part of each "
            f"batch; {REMEDY}"
        )
        try:
            compare(place, facts, theirs, where, there, remedy, read)
        except ConfigError as error:
            return str(error)
    return ""


def _describe_absence(place: str, rank: int, seconds: float) -> str:
    return f"{place}expected a loop on every rank, got none on rank {rank} for {seconds:g} s"


def check_checkpoint(
    recipe: Recipe,
    facts: Facts,
    read: Read,
    checkpoint: Mapping[str, Any],
    url: str,
    weights_alone: bool = False,
) -> None:
    """Check that a checkpoint was written with the same data and the same options of the recipe. A
    mixture's weights may differ in steps that lie ahead.

    Args:
        weights_alone: compare a mixture's weights alone, because other options explain the rest.

    Raises:
        ConfigError: the data or the options differ; names the field.
    """
    if checkpoint["data_facts"] and facts:
        where = f", with which {url} was written"
        remedy = f": {REMEDY}; other data need another place for the checkpoints"
        place = f"{locate(recipe, 'datasets')}: "
        num_steps = checkpoint["progress"]["step"]
        theirs, own = (drop_ahead(each, num_steps) for each in (checkpoint["data_facts"], facts))
        if weights_alone:
            names = {name for name in {**theirs, **own} if find_step(name) is not None}
            theirs = {name: value for name, value in theirs.items() if name in names}
            own = {name: value for name, value in own.items() if name in names}
        compare(place, theirs, own, where, remedy=remedy, read=read)


def compare(
    place: str,
    expected: Facts,
    got: Facts,
    where: str,
    there: str = "",
    remedy: str = f": {REMEDY}",
    read: Read = dict,
) -> None:
    """Raise ConfigError if facts differ.

    Args:
        place: the beginning of the error.
        where, there: the words after the expected value, and after the value given.
    """
    found = find_difference(expected, got, read)
    if found:
        name, value, other = found
        if name.endswith(ORDER):
            remedy = (
                ": end this run with the flyte-ddp that began it, or give another place for the "
                "checkpoints"
            )
        raise ConfigError(f"{place}{name}: expected {value}{where}, got {other}{there}{remedy}")


def find_difference(expected: Facts, got: Facts, read: Read) -> tuple[str, str, str] | None:
    """Return the name of the first fact that differs, and its values as an error shows them; None
    if all facts are equal.

    A part of a sample is left out if it differs between two readings in this process, because its
    generator cannot be seeded.
    """
    names = []
    for name in {**expected, **got}:
        one, other = expected.get(name), got.get(name)
        if is_comparable(name, one, other) and not _is_same(one, other):
            names.append(name)
    first, second = Facts(), Facts()
    if any(isinstance(got.get(name), list) for name in names):
        first, second = read(), read()
    # By their places in a sample: two numbers of one may be alike by chance.
    readings = [(each, second.get(name)) for name, each in first.items() if isinstance(each, list)]
    unsteady = {place for one, other in readings for place in _differing(one, other)}
    for name in names:
        one, other = expected.get(name), got.get(name)
        if not (isinstance(one, list) and isinstance(other, list)):
            return name, str(one), str(other)
        if not unsteady.issuperset(_differing(one, other)):
            return name, "the same", "another one"
    return None


def _differing(one: list[Any], other: Any) -> list[int]:
    parts = itertools.zip_longest(one, other or [])
    return [place for place, part in enumerate(parts) if not _is_same(*part)]


def summarize(sample: Any) -> list[Any]:
    """Return plain values that are equal for equal samples: a value for each tensor, array or
    number in the sample.
    """
    return [_summarize_part(part) for part in parts_in(sample)]


def _summarize_part(part: Any) -> Any:
    if not isinstance(part, Tensor):
        try:
            part = torch.as_tensor(numpy.asarray(part))
        except (TypeError, ValueError, RuntimeError):  # text, or an object
            checksum = 0
            if isinstance(part, (str, bytes)):
                checksum = zlib.crc32(str(part).encode())
            return [type(part).__name__, checksum]
    part = part.detach().cpu()
    if part.layout is not torch.strided or part.is_quantized or not part.numel():
        return str(part)
    kind = [list(part.shape), str(part.dtype)]
    if part.is_complex():
        part = torch.view_as_real(part)
    numbers = part.flatten()
    if not numbers.is_floating_point() and numbers.dtype != torch.uint8:
        return [*kind, zlib.crc32(bytes(numbers.contiguous().view(torch.uint8).numpy()))]
    numbers = numbers[:: -(-len(numbers) // MAX_NUMBERS)].double().nan_to_num(0.0, 0.0, 0.0)
    scale = float(numbers.abs().mean()) or 1.0
    waves = torch.arange(len(numbers), dtype=torch.float64).cos()  # make the numbers' order count
    mean = float(numbers.mean()) / scale
    return [*kind, scale, mean, float((numbers * waves).mean()) / scale]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(one == other)


def function_world() -> tuple[World, float]:
    """Return this rank's place in the process group that its function has made, and the timeout of
    the group's collectives in seconds. The timeout is years if the backend has none.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    world = World(dist.get_rank(), dist.get_world_size(), device)
    return world, group_timeout(world.device).total_seconds()


def check_save(
    state: Any, step: int, in_memory: bool, number: int, notes: RankNotes, timeout: float
) -> None:
    """Check that every rank saves the same step in the same place, of a state with the same keys,
    which are one state.

    A tensor may be split over a part of the ranks, and each group of ranks then has all of it. That
    these copies are equal is known by their values alone: stages of a pipeline have other values
    under the same keys.

    By the store, because a collective would wait for a rank that does not call for as long as the
    others' do.

    Args:
        number: of the save, the same on all ranks.
        timeout: seconds for which the other ranks are waited for.

    Raises:
        ConfigError: they do not; names rank and key.
    """
    outline: dict[str, Any] = {"step": step, "in_memory": in_memory}
    outline |= {f"state: {place}": _describe(each) for place, each in find_tensors(state)}
    digest = hashlib.sha256(json.dumps(outline).encode()).hexdigest()
    calls = notes.gather([digest, _checksums(state, notes.world)], number, timeout)
    if None in calls:
        raise ConfigError(
            "session.save: expected a call on every rank, because the state is split, got "
            f"none on rank {calls.index(None)} for {timeout:g} s, at step {step}"
        )
    others = [rank for rank, call in enumerate(calls) if call[0] != calls[0][0]]
    if not others:
        _compare_copies([checksums for _, checksums in calls])
        return
    outlines = replace(notes, name=f"{notes.name}-outline").gather(outline, number, timeout)
    first, other = outlines[0], outlines[others[0]]
    missing = dict.fromkeys([*first, *other], "no tensor")
    where = " on all ranks, as on rank 0", f" on rank {others[0]}"
    compare("session.save: ", {**missing, **first}, {**missing, **other}, *where, "")
    raise ConfigError("session.save: state: expected its keys in one order on all ranks")


def _describe(tensor: Tensor) -> str:
    """Return shape and type of a tensor, and how it is split, over which kind of mesh."""
    split: Any = tensor
    what = f"tensor {tuple(tensor.shape)} of {tensor.dtype}"
    if not is_split(tensor):
        return f"a {what}"
    mesh = tuple(split.device_mesh.shape)
    return f"a split {what}, {list(split.placements)} over {mesh} ranks"


def _checksums(state: Any, world: World) -> list[tuple[str, list[tuple[int, int]], str]]:
    """Return key, box and checksum of this rank's part of each tensor that is split over a part of
    the ranks.
    """
    found = []
    for place, tensor in find_tensors(state):
        split: Any = tensor
        if is_split(tensor) and split.device_mesh.size() < world.world_size and in_mesh(tensor):
            part = split.to_local().detach().cpu().resolve_conj().resolve_neg().contiguous()
            contents: Any = b""
            if part.numel():
                contents = part.reshape(-1).view(torch.uint8).numpy().data
            box = [(each.start, each.stop) for each in own_box(tensor)]
            found.append((str(place), box, compute_checksum(contents)))
    return found


def _compare_copies(checksums: Sequence[Sequence[tuple[str, Any, str]]]) -> None:
    """Compare the `_checksums` of all ranks. Raises ConfigError, which names key and ranks."""
    known: dict[str, tuple[int, str]] = {}
    for rank, parts in enumerate(checksums):
        for place, box, checksum in parts:
            first, expected = known.setdefault(f"{place} {box}", (rank, checksum))
            if checksum != expected:
                raise ConfigError(
                    f"session.save: state: {place}: expected one tensor, got other values on rank "
                    f"{rank} than on rank {first} for the same part of it; of a pipeline's stages, "
                    "save tensors that rank 0 has gathered"
                )
