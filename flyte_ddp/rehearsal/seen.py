"""Read the ranks' records of a run: its steps as they count in the end, and the cost of its
faults. Knows nothing of how a run is started.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Entries = dict[int, list[dict[str, Any]]]  # each rank's entries, in their order

CHECKPOINTS = "checkpoints"  # directory of the checkpoints that the session writes
OF_FIRST_RANK = ("at", "weights", "loss", "gradient", "scales", "buffers", "unsaved")


@dataclass(frozen=True)
class Step:
    """An optimizer step of all ranks."""

    at: float  # seconds since the epoch
    samples: list[str]  # their keys, as JSON
    weights: list[float]  # sums and single values, of the optimizer that steps first
    momentum: tuple[float, ...]  # sum of the optimizer's state, by rank, after the step
    draws: tuple[int, ...]  # checksum of the generators before the step, by rank
    loss: float  # loss on rank 0
    content: float  # sum of all values of its batches
    gradient: list[float]  # sums and single values
    # Before the step:
    others: list[float]  # weights of the other optimizers that step, in the order of first steps
    other_states: tuple[tuple[float, ...], ...]  # sums of their state, by rank
    rates: tuple[float, ...]  # learning rates, of the first optimizer and of these
    scales: list[float]  # factors of the loss
    buffers: list[float]  # buffers of modules that state dicts contain
    unsaved: list[float]  # other buffers of modules


@dataclass(frozen=True)
class Attempt:
    """The processes of one gang."""

    base: int  # step of the state that it began with
    entries: Entries
    steps: list[Step]
    optimizers: list[int]  # numbers of the optimizers that step, in the order of their first steps

    def calls(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of this kind, of all ranks."""
        return [
            {**each, "rank": rank}
            for rank, entries in self.entries.items()
            for each in entries
            if each["kind"] == kind
        ]

    def first(self, kind: str) -> str:
        """Return the user's line of the first record of this kind; "" without one."""
        return next((each["where"] for each in self.calls(kind) if each["where"]), "")


@dataclass
class Run:
    """A run as far as it was seen.

    Attributes:
        steps: the steps that count, without the steps that a restart has undone.
        files: names of the files that it has left, with a # in place of each number.
        tensors: in the files that it has left, by file and place in it: some values of each.
    """

    name: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    initial: list[float] = field(default_factory=list)  # weights
    num_redone: int = 0
    pause: float = 0.0  # the longest time between two steps, in seconds
    start_seconds: float = 0.0  # from the launch to the first step
    waited_seconds: float = 0.0  # the gang waited for nodes after its first start
    files: Counter[str] = field(default_factory=Counter)
    tensors: dict[str, list[float]] = field(default_factory=dict)
    is_stored: bool = False
    seconds: float = 0.0
    error: str = ""
    exit_code: int = 0
    is_cut: bool = False
    is_resized: bool = False  # the run ended on another number of ranks
    not_tried: str = ""  # reason if the run was not tried

    def find(self, weights: Sequence[float]) -> int:
        """Return the step after which the weights were these, or the nearest ones."""
        known = [self.initial, *(step.weights for step in self.steps)]
        distances = [find_distance(weights, each) for each in known]
        return distances.index(min(distances))


def read_run(directory: Path, before: tuple[float, float] = (math.inf, 0)) -> Run:
    """Return what the records below `directory` tell.

    Args:
        before: leave out this attempt, by its start and restart, and all later attempts.
    """
    found: dict[tuple[int, int], Entries] = defaultdict(dict)
    for file in (directory / "records").glob("*.jsonl"):
        start, restart, rank = map(int, file.stem.split("-"))
        lines = file.read_text().split("\n")[:-1]  # the last line of a killed rank may be a part
        found[start, restart][rank] = [json.loads(line) for line in lines]
    run = Run()
    times: list[float] = []
    for _, entries in sorted(item for item in found.items() if item[0] < before):
        begins = [each for each in entries.get(0, []) if each["kind"] == "begin"]
        base = len(run.steps)
        if begins:
            run.initial = run.initial or begins[0]["weights"]
            base = run.find(begins[0]["weights"])
        optimizers = [
            each["optimizer"] for each in entries.get(0, []) if each["kind"] == "stepping"
        ]
        steps = _combine(entries, optimizers)
        run.num_redone += len(run.steps) - base if steps else 0
        run.steps = [*run.steps[:base], *steps] if steps else run.steps
        times += [step.at for step in steps]
        run.attempts.append(Attempt(base, entries, steps, optimizers))
    run.pause = max((later - at for at, later in itertools.pairwise(times)), default=0.0)
    run.is_stored = any((directory / CHECKPOINTS).glob("*.pt"))
    names = [str(file.relative_to(directory)) for file in list_left(directory)]
    run.files = Counter(re.sub(r"[0-9a-f]{8,}|\d+", "#", name) for name in names)
    return run


def list_left(directory: Path) -> Iterator[Path]:
    """Yield the files that a run has left."""
    for part in ("work", "outputs", CHECKPOINTS):
        for file in (directory / part).rglob("*"):
            if file.is_file() and not file.is_symlink() and "__pycache__" not in file.parts:
                yield file


def _combine(entries: Entries, optimizers: Sequence[int]) -> list[Step]:
    """Return the steps that all ranks have done."""

    def choose(values: Sequence[Any]) -> list[Any]:
        """Return the values of the optimizers that step and were there."""
        return [values[number] for number in optimizers if number < len(values)]

    ranks = []
    for _, records in sorted(entries.items()):
        ranks.append([each for each in records if each["kind"] == "step"])
    steps = []
    for rows in zip(*ranks, strict=False):
        first = rows[0]
        keys = itertools.chain(*(row["samples"] for row in rows))
        step = Step(
            **{name: first[name] for name in OF_FIRST_RANK},
            samples=list(map(json.dumps, keys)),
            momentum=tuple(row["momentum"] for row in rows),
            draws=tuple(row["draws"] for row in rows),
            content=sum(row["content"] for row in rows),
            others=list(itertools.chain(*choose(first["all_weights"])[1:])),
            other_states=tuple(tuple(choose(row["states"])[1:]) for row in rows),
            rates=tuple(choose(first["rates"])),
        )
        steps.append(step)
    return steps


def find_distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the distance of two lists; infinite where one is longer."""
    if len(ours) != len(theirs):
        return math.inf
    return math.dist(ours, theirs)
