"""The verdict on a rehearsal's runs: what each fault cost, whether the result is right, and the
causes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flyte_ddp.rehearsal.causes import (
    Case,
    Cause,
    find_causes,
    find_general_causes,
    is_placed_later,
)
from flyte_ddp.rehearsal.differences import TOLERANCE, difference, find_dependence
from flyte_ddp.rehearsal.forecast import Forecast
from flyte_ddp.rehearsal.seen import Run

FILE_TOLERANCE = 1e-4  # difference of a tensor in a file, on the same number of ranks
MAX_ERROR = 160  # characters
# By their causes: another position makes a step too many, and optimizers have the learning rate.
CONSEQUENCES = {"step number": "trained again", "optimizer": "learning rate"}


@dataclass
class Row:
    """The comparison of one run with the undisturbed one."""

    run: Run
    problems: list[str]  # lines; a run without problems is right
    lost: int = 0
    doubled: int = 0
    difference: float = 0.0  # distance of the weights as a share of what the training changed
    left: int = 0  # files that the undisturbed run has not
    # why weights are not judged on another number of ranks; "" where they are
    unjudged: str = ""

    @property
    def notes(self) -> list[str]:
        """What is wrong, and what was not judged."""
        if self.unjudged:
            return [*self.problems, f"weights are not judged: {self.unjudged}"]
        return self.problems

    @property
    def verdict(self) -> str:
        if self.run.not_tried:
            return "not tried"
        if not self.problems:
            return "right"
        if self.run.exit_code:
            return "failed"
        return "wrong"


@dataclass
class Verdict:
    """The rows, the undisturbed run's first, and the causes."""

    rows: list[Row]
    causes: list[Cause]
    forecast: Forecast | None = None  # None where nobody has asked for it

    @property
    def is_right(self) -> bool:
        """True if no result is wrong. What a fault costs does not count."""
        is_harmless = all(each.name == "no checkpoint" for each in self.causes)
        return is_harmless and not any(row.problems for row in self.rows)


def judge(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on the runs. The first run is undisturbed."""
    clean = runs[0]
    is_seeded = all(_repeats(run, clean) for run in runs)
    rows = [_compare(run, clean, is_seeded) for run in runs]
    later = [(row, attempt) for row in rows[1:] for attempt in row.run.attempts[1:]]
    is_placed = any(is_placed_later(attempt, clean) for _, attempt in later)
    causes = dict.fromkeys(find_general_causes(clean, is_seeded))
    for row, attempt in later:
        is_wrong = bool(row.problems)
        case = Case(row.run, attempt, clean, is_wrong, is_seeded, is_placed)
        causes.update(dict.fromkeys(find_causes(case)))
    names = {each.name for each in causes}
    consequences = {name for cause, name in CONSEQUENCES.items() if cause in names}
    causes = {each: None for each in causes if each.name not in consequences}
    # on a node of the cluster the same line is in a copy of the file
    lines = {(each.name, os.path.basename(each.where)): each for each in reversed(causes)}
    return Verdict(rows, list(reversed(lines.values())))


def _repeats(run: Run, clean: Run) -> bool:
    """Return whether a run was the same as the undisturbed one up to its fault."""
    steps = run.attempts[0].steps if run.attempts else []
    return all(
        difference(one.weights, other.weights, clean.initial) < TOLERANCE
        for one, other in zip(steps, clean.steps, strict=False)
    )


def _compare(run: Run, clean: Run, is_seeded: bool) -> Row:
    row = Row(run, [])
    if run.not_tried:
        return row
    if run.exit_code or not run.steps:
        row.problems.append(f"it failed: {run.error[:MAX_ERROR]}")
        return row
    ours, theirs = _count_samples(run), _count_samples(clean)
    # On another number of ranks a sampler repeats other samples.
    spare = max(theirs.values(), default=0) * 4 * run.is_resized
    row.lost = _count_above(spare, theirs - ours)
    row.doubled = _count_above(spare, ours - theirs)
    row.left = len(run.files.keys() - clean.files.keys())
    final, wanted = run.steps[-1], clean.steps[-1]
    num_steps, num_wanted = len(run.steps), len(clean.steps)
    if num_steps == num_wanted or not run.is_resized:
        row.difference = max(
            difference(final.weights, wanted.weights, clean.initial),
            difference(final.others, wanted.others, clean.steps[0].others),
        )
    if num_steps != num_wanted:
        row.problems.append(f"it ended at step {num_steps}, not {num_wanted}")
    if row.lost or row.doubled:
        row.problems.append(f"{row.lost} samples lost, {row.doubled} doubled")
    if is_seeded:
        _compare_weights(row, clean)
    return row


def _compare_weights(row: Row, clean: Run) -> None:
    """Add what is wrong with the weights, and with what depends on them."""
    run = row.run
    if run.is_resized:
        row.unjudged = find_dependence(run, clean)
    if row.difference > TOLERANCE and not row.unjudged:
        row.problems.append(f"weights differ by {row.difference:.1%} of what training changed")
    if row.difference <= TOLERANCE and not run.is_resized:
        row.problems += _compare_rest(run, clean)


def _count_samples(run: Run) -> Counter[Any]:
    return Counter(key for step in run.steps for key in step.samples)


def _count_above(spare: int, samples: Counter[Any]) -> int:
    """Return the number of samples, or 0 if there are at most `spare`."""
    count = samples.total()
    return count * (count > spare)


def _compare_rest(run: Run, clean: Run) -> Iterator[str]:
    """Yield what differs though the weights do not: buffers, and tensors in files."""
    buffers = difference(run.steps[-1].buffers, clean.steps[-1].buffers, clean.steps[0].buffers)
    if buffers > TOLERANCE:
        yield f"buffers of modules differ by {buffers:.1%} of what training changed"
    names = [
        name
        for name in sorted(run.tensors.keys() & clean.tensors.keys())
        if difference(run.tensors[name], clean.tensors[name], ()) > FILE_TOLERANCE
    ]
    if names:
        more = f", and {len(names) - 1} more" if names[1:] else ""
        yield f"a tensor in a file differs: {names[0]}{more}"
