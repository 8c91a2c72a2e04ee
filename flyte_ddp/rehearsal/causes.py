"""The causes of wrong results, each with the user's line that it is about."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from flyte_ddp.rehearsal.differences import (
    TOLERANCE,
    are_close,
    difference,
    draws_in_steps,
    find_first_difference,
    gradient_ratio,
    has_known_weights,
    has_other_content,
    has_same_samples,
    list_starts,
)
from flyte_ddp.rehearsal.seen import Attempt, Run, Step

REMEDIES = {
    "set_epoch": "the sampler draws the same order in every epoch: call set_epoch(epoch) before "
    "this loop",
    "random state": "the random state is not restored: save the generators' states here and set "
    "them after loading",
    "checkpoint in place": "the checkpoint is written in place, and half of one is loaded: write "
    "to another name and use os.replace",
    "all ranks write": "several ranks write the same file: let rank 0 alone write it",
    "rank 0 alone loads": "rank 0 alone reads the checkpoint: let every rank load it, or broadcast "
    "all of it",
    "some ranks load": "not every rank finds a checkpoint: let all ranks load one whose name does "
    "not depend on the rank",
    "learning rate": "the learning rate starts again: save and load the state of this schedule",
    "loader": "the loader begins its epoch again: leave out the batches that were done, or save at "
    "the end of epochs",
    "step number": "the saved weights and the saved position in the data are of different steps: "
    "save both after the optimizer's step",
    "accumulation": "a checkpoint between two steps has no gradients: save after the optimizer's "
    "step",
    "weights": "not all weights are restored: save and load the whole state_dict of each model",
    "optimizer": "the optimizer's state is not restored: save and load its state_dict",
    "buffers": "the modules' buffers, such as BatchNorm's running means, are not restored: save "
    "and load the model's whole state_dict, which leaves out buffers with persistent=False",
    "loss scale": "the GradScaler's state is not restored: save and load its state_dict",
    "other state": "not all that the program changes is restored, such as averaged weights: save "
    "it here, and load it",
    "batch size": "the global batch changes with the number of ranks: let them share one size",
    "gradient scale": "the gradient is larger or smaller on another number of ranks: let the loss "
    "be a mean over the global batch",
    "not loaded": "what is saved here is not what a restart begins with: load it at the start",
    "no checkpoint": "nothing is saved, so that each restart begins at step 0",
    "seed": "two runs differ without a fault: seed all generators before the model is made",
    "trained again": "the same command trains on after the end: save the number of steps that are "
    "done here",
}

# causes from which the other differences follow
LAST = {
    "checkpoint in place",
    "rank 0 alone loads",
    "some ranks load",
    "weights",
    "batch size",
    "step number",
    "accumulation",
}


@dataclass(frozen=True)
class Cause:
    """A change to make, and the user's line, "file:line", that it is about."""

    name: str  # a key of `REMEDIES`
    where: str

    @property
    def text(self) -> str:
        return f"{self.where or 'the program'}: {REMEDIES[self.name]}"


def find_general_causes(clean: Run, is_seeded: bool) -> Iterator[Cause]:
    """Yield what the undisturbed run shows by itself."""
    attempt = clean.attempts[0]
    if not is_seeded:
        yield Cause("seed", attempt.first("optimizer"))
    passes = [each for each in attempt.calls("pass") if each["rank"] == 0]
    for where in {each["where"]: None for each in passes if each["epoch"] is not None}:
        epochs = [each["epoch"] for each in passes if each["where"] == where]
        if len(epochs) > 1 and len(set(epochs)) == 1:
            yield Cause("set_epoch", where)
    writers: dict[str, int] = {}
    for save in attempt.calls("save"):
        if save["path"] and writers.setdefault(save["path"], save["rank"]) != save["rank"]:
            yield Cause("all ranks write", save["where"])


@dataclass(frozen=True)
class Case:
    """An attempt that follows a fault, or the end, and the undisturbed run."""

    run: Run
    attempt: Attempt
    clean: Run
    is_wrong: bool  # the result of the run
    is_seeded: bool
    is_placed: bool  # some attempt continued in the data behind the beginning

    @property
    def save(self) -> str:
        """The last line that saves in the undisturbed run; "" without one."""
        lines = [each["where"] for each in self.clean.attempts[0].calls("save")]
        return "".join(lines[-1:])

    @property
    def pairs(self) -> list[tuple[Step, Step]]:
        """The steps of the attempt, each with the undisturbed run's."""
        return list(zip(self.attempt.steps, self.clean.steps[self.attempt.base :], strict=False))


def find_causes(case: Case) -> Iterator[Cause]:
    """Yield the causes that an attempt shows, up to one of `LAST`."""
    stages = [_judge_loads, _judge_end]
    if case.pairs:
        stages += [_judge_beginning, _judge_size]
        if case.attempt.base:
            stages += [_judge_position, _judge_schedules, _judge_states]
    for judge in stages:
        for cause in judge(case):
            yield cause
            if cause.name in LAST and judge is not _judge_states:
                return


def is_placed_later(attempt: Attempt, clean: Run) -> bool:
    """Return whether an attempt went on in the data, and not at its beginning."""
    return bool(attempt.steps) and min(find_places(attempt.steps[0], clean), default=0) > 0


def find_places(step: Step, clean: Run) -> list[int]:
    """Return the numbers of the undisturbed run's steps with the same samples."""
    if not step.samples:
        return []
    return [number for number, each in enumerate(clean.steps) if has_same_samples(step, each)]


def _judge_loads(case: Case) -> Iterator[Cause]:
    """Yield what the attempt has loaded wrongly, or not at all."""
    run, attempt = case.run, case.attempt
    loads = attempt.calls("load")
    refused = {each["path"]: each["where"] for one in run.attempts for each in one.calls("refused")}
    for each in loads:
        path = each["path"]
        if path in refused and (case.is_wrong or (attempt.steps and not attempt.base)):
            yield Cause("checkpoint in place", refused[path])
    loading = {each["rank"] for each in loads}
    if loading and loading < attempt.entries.keys() and _ranks_differ(run, attempt):
        name = "some ranks load"
        if loading == {0}:
            name = "rank 0 alone loads"
        yield Cause(name, loads[0]["where"])
    is_known = not case.is_seeded or has_known_weights(attempt, run, case.clean)
    if attempt.steps and not is_known:
        yield Cause("weights", case.save)


def _judge_end(case: Case) -> Iterator[Cause]:
    """Yield what made the same command train on after its end."""
    if case.run.name == "again" and case.run.num_redone == 0 and case.attempt.steps:
        yield Cause("trained again", case.save)


def _judge_beginning(case: Case) -> Iterator[Cause]:
    """Yield why the attempt began at step 0."""
    run, attempt = case.run, case.attempt
    # after the end the saved states may be for other programs
    if attempt.base or run.name == "again":
        return
    if not run.attempts[0].calls("save"):
        yield Cause("no checkpoint", "")
    elif attempt.calls("load") or not attempt.calls("look"):  # else the store had no state yet
        yield Cause("not loaded", case.save)


def _judge_size(case: Case) -> Iterator[Cause]:
    """Yield what another number of ranks changes and should not."""
    attempt = case.attempt
    if not case.run.is_resized:
        return
    # An epoch's last batch is smaller, and may be as large as any batch of the other run.
    size = max(len(one.samples) for one, _ in case.pairs)
    size_before = max(len(other.samples) for _, other in case.pairs)
    if size != size_before:
        yield Cause("batch size", attempt.first("pass"))
    if case.is_wrong:
        found = find_first_difference(attempt, case.clean)
        if found and gradient_ratio(*found):
            yield Cause("gradient scale", attempt.first("loss"))


def _judge_position(case: Case) -> Iterator[Cause]:
    """Yield why the attempt continued at another place in the data than its weights."""
    name = _name_position(case)
    if name == "loader":
        yield Cause(name, case.attempt.first("pass"))
    elif name:
        yield Cause(name, case.save)


def _name_position(case: Case) -> str:
    """Return the cause of another place in the data; "" if it is the place of the weights."""
    attempt, clean = case.attempt, case.clean
    base, (first, wanted) = attempt.base, case.pairs[0]
    if case.run.is_resized:
        return ""
    if not first.samples:  # the samples were not seen
        is_elsewhere = difference(first.gradient, wanted.gradient, ()) > TOLERANCE
        makes_more = len(case.run.steps) != len(clean.steps)
        return "step number" * (is_elsewhere and makes_more)
    if has_same_samples(first, wanted):
        return ""
    if set(first.samples) < set(wanted.samples):
        return "accumulation"
    places = find_places(first, clean)
    if not places:
        return "random state"
    begin = max(each for each in list_starts(clean) if each <= base)
    if begin in places:
        return "loader"
    if 0 not in places or case.is_placed:
        return "step number"
    # Without an epoch's number the first order comes from the first random state.
    if base > begin or any(each["epoch"] is not None for each in attempt.calls("pass")):
        return "loader"
    return "random state"


def _judge_schedules(case: Case) -> Iterator[Cause]:
    """Yield the schedule of the first optimizer with another learning rate."""
    attempt = case.attempt
    for step, wanted in case.pairs:
        rates = zip(attempt.optimizers, step.rates, wanted.rates, strict=False)
        for number, *pair in rates:
            if not math.isclose(*pair):
                schedules = attempt.calls("schedule")
                lines = [each["where"] for each in schedules if each["optimizer"] == number]
                yield Cause("learning rate", [*lines, case.save][0])
                return


def _judge_states(case: Case) -> Iterator[Cause]:
    """Yield what differs in the state with which the attempt began."""
    if case.is_seeded and not case.run.is_resized:
        for name in _name_states(case):
            yield Cause(name, case.save)


def _name_states(case: Case) -> list[str]:
    attempt, clean, pairs = case.attempt, case.clean, case.pairs
    first, wanted = pairs[0]
    begun = [each["momentum"] for each in attempt.calls("begin")]
    is_close = functools.partial(math.isclose, rel_tol=1e-6)
    has_state = all(map(is_close, begun, clean.steps[attempt.base - 1].momentum))
    if not has_same_samples(first, wanted):
        return ["optimizer"] * (not has_state)
    has_others = all(map(are_close, first.other_states, wanted.other_states))
    has_other_draws = first.draws != wanted.draws and draws_in_steps(clean)
    has_other_noise = any(has_other_content(*each) for each in pairs)
    differs = {
        "optimizer": not has_state or not has_others,
        "weights": _has_other("others", case),
        "buffers": _has_other("buffers", case),
        "loss scale": first.scales != wanted.scales,
        "random state": case.is_wrong and (has_other_draws or has_other_noise),
    }
    found = [name for name, is_other in differs.items() if is_other]
    has_same_rates = all(are_close(one.rates, other.rates) for one, other in pairs)
    if found or not case.is_wrong or not has_same_rates:
        return found
    if _has_other("unsaved", case):
        return ["buffers"]
    return ["other state"]


def _has_other(name: str, case: Case) -> bool:
    """Return whether the attempt began with another value in this field of `Step`."""
    steps = (*case.pairs[0], case.clean.steps[0])
    return difference(*(getattr(step, name) for step in steps)) > TOLERANCE


def _ranks_differ(run: Run, attempt: Attempt) -> bool:
    begins = attempt.calls("begin")
    steps = {each["rank"]: each for each in reversed(attempt.calls("step"))}
    rates = {tuple(each["rates"]) for each in steps.values()}
    epochs = {each["epoch"] for each in attempt.calls("pass") if each["step"] == 0}
    states = {(tuple(each["weights"]), each["momentum"]) for each in begins}
    return bool(run.exit_code) or max(len(states), len(rates), len(epochs)) > 1
