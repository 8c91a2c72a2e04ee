"""The verdict on a rehearsal's runs: what each fault cost, whether the result is right, and the
causes, each with the user's line that it is about.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flyte_ddp.rehearsal.seen import Attempt, Run

# Of what the training has changed: sums on another number of ranks differ by less, and a batch that
# is left out makes a larger difference.
TOLERANCE = 1e-3
MAX_ERROR = 160  # characters
REMEDIES = {
    "set_epoch": "the sampler draws the same order in every epoch: call set_epoch(epoch) before "
    "this loop",
    "random state": "the random state is not restored: save the generators' states here and set "
    "them after loading",
    "checkpoint in place": "the checkpoint is written in place, and half of one is loaded: write "
    "to another name and use os.replace",
    "rank 0 alone loads": "rank 0 alone reads the checkpoint: let every rank load it, or broadcast "
    "all of it",
    "learning rate": "the learning rate starts again: save and load the state of this schedule",
    "loader": "the loader begins its epoch again: leave out the batches that were done, or save at "
    "the end of epochs",
    "optimizer": "the optimizer's state is not restored: save and load its state_dict",
    "batch size": "the global batch changes with the number of ranks: let them share one size",
    "not loaded": "what is saved here is not what a restart begins with: load it at the start",
    "no checkpoint": "nothing is saved, so that each restart begins at step 0",
    "seed": "two runs differ without a fault: seed all generators before the model is made",
    "trained again": "the same command trains on after the end: save the number of steps that are "
    "done here",
}


@dataclass(frozen=True)
class Cause:
    """A change to make, and the user's line, "file:line", that it is about."""

    name: str  # one of `REMEDIES`
    where: str

    @property
    def text(self) -> str:
        return f"{self.where or 'the program'}: {REMEDIES[self.name]}"


@dataclass
class Row:
    """The comparison of one run with the undisturbed one."""

    run: Run
    problems: list[str]  # what is wrong; none where the run is right
    lost: int = 0
    doubled: int = 0
    difference: float = 0.0  # of the weights, as a share of what the training changed
    left: int = 0  # files that the undisturbed run has not

    @property
    def verdict(self) -> str:
        if self.run.not_tried:
            return "not tried"
        return ("failed" if self.run.exit_code else "wrong") if self.problems else "right"


@dataclass
class Verdict:
    """The rows, the undisturbed run's first, and the causes."""

    rows: list[Row]
    causes: list[Cause]

    @property
    def is_right(self) -> bool:
        """True if no result is wrong. What a fault costs does not count."""
        is_harmless = all(each.name == "no checkpoint" for each in self.causes)
        return is_harmless and not any(row.problems for row in self.rows)


def judge(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on the runs, of which the first is undisturbed."""
    clean = runs[0]
    is_seeded = all(_repeats(run, clean) for run in runs)
    rows = [_compare(run, clean, is_seeded) for run in runs]
    causes: dict[Cause, None] = {}
    last = clean.attempts[0]
    if not is_seeded:
        causes[Cause("seed", last.first("optimizer"))] = None
    passes = [each for each in last.calls("pass") if each["rank"] == 0]
    for where in {each["where"]: None for each in passes if each["epoch"] is not None}:
        epochs = [each["epoch"] for each in passes if each["where"] == where]
        if len(epochs) > 1 and len(set(epochs)) == 1:
            causes[Cause("set_epoch", where)] = None
    for row in rows[1:]:
        for attempt in row.run.attempts[1:]:
            causes.update(dict.fromkeys(_find_causes(row, attempt, clean, is_seeded)))
    # on a node of the cluster the same line is in a copy of the file
    lines = {(each.name, os.path.basename(each.where)): each for each in reversed(causes)}
    return Verdict(rows, list(reversed(lines.values())))


def _repeats(run: Run, clean: Run) -> bool:
    """Return whether a run was the same as the undisturbed one up to its fault."""
    steps = run.attempts[0].steps if run.attempts else []
    return all(
        _difference(one.weights, other.weights, clean.initial) < TOLERANCE
        for one, other in zip(steps, clean.steps, strict=False)
    )


def _compare(run: Run, clean: Run, is_seeded: bool) -> Row:
    row = Row(run, [])
    if run.not_tried:
        return row
    if run.exit_code or not run.steps:
        row.problems.append(f"it failed: {run.error[:MAX_ERROR]}")
        return row
    ours, theirs = (Counter(key for s in each.steps for key in s.samples) for each in (run, clean))
    # A sampler repeats some samples so that ranks have as many, other ones on another number.
    spare = max(theirs.values(), default=0) * 4 if run.is_resized else 0
    row.lost, row.doubled = (
        0 if (count := (one - other).total()) <= spare else count
        for one, other in ((theirs, ours), (ours, theirs))
    )
    row.left = len(run.files.keys() - clean.files.keys())
    final, wanted = run.steps[-1], clean.steps[-1]
    if len(run.steps) == len(clean.steps) or not run.is_resized:
        row.difference = max(
            _difference(final.weights, wanted.weights, clean.initial),
            _difference(final.others, wanted.others, clean.steps[0].others),
        )
    if len(run.steps) != len(clean.steps):
        row.problems.append(f"it ended at step {len(run.steps)}, not {len(clean.steps)}")
    if row.lost or row.doubled:
        row.problems.append(f"{row.lost} samples lost, {row.doubled} doubled")
    # on another number of ranks each draws other random numbers
    is_comparable = is_seeded and not (run.is_resized and _draws_in_steps(clean))
    if row.difference > TOLERANCE and is_comparable:
        row.problems.append(f"weights differ by {row.difference:.1%} of what training changed")
    return row


def _difference(ours: Sequence[float], theirs: Sequence[float], initial: Sequence[float]) -> float:
    if len(ours) != len(theirs):
        return math.inf
    changed = math.dist(theirs, initial) if len(theirs) == len(initial) else 0.0
    distance = math.dist(ours, theirs)
    return distance / (changed or math.hypot(*theirs) or 1.0) if distance else 0.0


def _starts(run: Run) -> list[int]:
    """Return the steps after which a pass over the training data began."""
    passes = run.attempts[0].calls("pass")
    return sorted({each["step"] for each in passes if each["rank"] == 0} | {0})


def _draws_in_steps(run: Run) -> bool:
    """Return whether a step draws random numbers, and not only the beginning of an epoch."""
    pairs = zip(run.steps, run.steps[1:], strict=False)
    starts = _starts(run)
    return any(
        one.draws != other.draws
        for number, (one, other) in enumerate(pairs, 1)
        if number not in starts
    )


def _find_causes(row: Row, attempt: Attempt, clean: Run, is_seeded: bool) -> Iterator[Cause]:
    """Yield what an attempt that follows a fault, or the end, shows."""
    run, base = row.run, attempt.base
    saves = clean.attempts[0].calls("save")
    save = saves[-1]["where"] if saves else ""
    loads = attempt.calls("load")
    refused = {each["path"]: each["where"] for one in run.attempts for each in one.calls("refused")}
    for path in refused.keys() & {each["path"] for each in loads}:
        if row.problems or (attempt.steps and not base):
            yield Cause("checkpoint in place", refused[path])
            return
    is_whole = len(attempt.entries) > 1
    if is_whole and {each["rank"] for each in loads} == {0} and _ranks_differ(row, attempt):
        yield Cause("rank 0 alone loads", loads[0]["where"])
        return
    if run.name == "again" and run.num_redone == 0 and attempt.steps:
        yield Cause("trained again", save)
    if not attempt.steps or base >= len(clean.steps):
        return
    is_saved = run.attempts[0].calls("save")
    # what was saved was not in the store yet
    is_pending = is_saved and not loads and attempt.calls("look")
    # after the end what is saved may be for others
    if not base and run.name != "again" and not is_pending:
        yield Cause("not loaded", save) if is_saved else Cause("no checkpoint", "")
    if row.run.is_resized and len(attempt.steps[0].samples) != len(clean.steps[base].samples):
        yield Cause("batch size", attempt.first("pass"))
    elif base:
        yield from _compare_steps(row, attempt, clean, save, is_seeded)


def _ranks_differ(row: Row, attempt: Attempt) -> bool:
    begins = attempt.calls("begin")
    steps = {each["rank"]: each for each in reversed(attempt.calls("step"))}
    rates = {each["learning_rate"] for each in steps.values()}
    epochs = {each["epoch"] for each in attempt.calls("pass") if each["step"] == 0}
    states = {(tuple(each["weights"]), each["momentum"]) for each in begins}
    return bool(row.run.exit_code) or max(len(states), len(rates), len(epochs)) > 1


def _compare_steps(
    row: Row, attempt: Attempt, clean: Run, save: str, is_seeded: bool
) -> Iterator[Cause]:
    """Yield what the steps after a restart show beside those of the undisturbed run."""
    base, first, wanted = attempt.base, attempt.steps[0], clean.steps[attempt.base]
    passes = attempt.first("pass")
    pairs = zip(attempt.steps, clean.steps[base:], strict=False)
    if any(not math.isclose(one.learning_rate, two.learning_rate) for one, two in pairs):
        yield Cause("learning rate", attempt.first("schedule") or save)
    if row.run.is_resized:
        return
    is_same = Counter(first.samples) == Counter(wanted.samples)
    if not is_same:
        yield Cause(
            *(("loader", passes) if _is_restart(attempt, clean) else ("random state", save))
        )
    before = clean.steps[base - 1].momentum
    begun = tuple(each["momentum"] for each in attempt.calls("begin"))
    if is_seeded and not all(map(functools.partial(math.isclose, rel_tol=1e-6), begun, before)):
        yield Cause("optimizer", save)
    has_other_draws = first.draws != wanted.draws and _draws_in_steps(clean)
    if is_same and has_other_draws and row.problems:
        yield Cause("random state", save)


def _is_restart(attempt: Attempt, clean: Run) -> bool:
    """Return whether an attempt began with the batch of an epoch's beginning, in mid-epoch, or with
    a sampler's order of another epoch.
    """
    starts = _starts(clean)
    begin = max(each for each in starts if each <= attempt.base)
    is_mid_epoch = attempt.base > begin
    has_sampler = any(each["epoch"] is not None for each in attempt.calls("pass"))
    firsts = [Counter(clean.steps[each].samples) for each in starts if each < len(clean.steps)]
    is_first = Counter(attempt.steps[0].samples) in firsts
    return is_first and (is_mid_epoch or has_sampler)
