"""The causes of wrong results, each with the user's line that it is about."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Cause:
    """A change to make, and the user's line, "file:line", that it is about."""

    name: str  # one of `REMEDIES`
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


def find_causes(
    run: Run, is_wrong: bool, attempt: Attempt, clean: Run, is_seeded: bool, is_placed: bool
) -> Iterator[Cause]:
    """Yield what an attempt that follows a fault, or the end, shows.

    Args:
        is_placed: some attempt went on in the data behind the beginning.
    """
    base = attempt.base
    saves = clean.attempts[0].calls("save")
    save = saves[-1]["where"] if saves else ""
    loads = attempt.calls("load")
    refused = {each["path"]: each["where"] for one in run.attempts for each in one.calls("refused")}
    for path in refused.keys() & {each["path"] for each in loads}:
        if is_wrong or (attempt.steps and not base):
            yield Cause("checkpoint in place", refused[path])
            return
    loading = {each["rank"] for each in loads}
    if loading and loading < attempt.entries.keys() and _ranks_differ(run, attempt):
        name = "rank 0 alone loads" if loading == {0} else "some ranks load"
        yield Cause(name, loads[0]["where"])
        return
    if attempt.steps and is_seeded and not has_known_weights(attempt, run, clean):
        yield Cause("weights", save)
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
    pairs = zip(attempt.steps, clean.steps[base:], strict=False)
    if run.is_resized and all(len(one.samples) != len(other.samples) for one, other in pairs):
        yield Cause("batch size", attempt.first("pass"))
        return
    if run.is_resized and is_wrong:
        found = find_first_difference(attempt, clean)
        if found and gradient_ratio(*found):
            yield Cause("gradient scale", attempt.first("loss"))
    if base:
        position = _judge_position(run, attempt, clean, is_placed)
        if position == "loader":
            yield Cause("loader", attempt.first("pass"))
        elif position:
            yield Cause(position, save)
        if position in ("step number", "accumulation"):
            return
        yield from _compare_schedules(attempt, clean, save)
        if is_seeded and not run.is_resized:
            yield from _compare_states(is_wrong, attempt, clean, save)


def is_placed_later(attempt: Attempt, clean: Run) -> bool:
    """Return whether an attempt went on in the data, and not at its beginning."""
    return bool(attempt.steps) and min(find_places(attempt.steps[0], clean), default=0) > 0


def find_places(step: Step, clean: Run) -> list[int]:
    """Return the numbers of the undisturbed run's steps with the same samples."""
    samples = Counter(step.samples)
    return [
        number
        for number, each in enumerate(clean.steps)
        if step.samples and samples == Counter(each.samples)
    ]


def _judge_position(run: Run, attempt: Attempt, clean: Run, is_placed: bool) -> str:
    """Return the cause if an attempt went on in the data elsewhere than its weights are; "" if it
    did not.
    """
    base, first, wanted = attempt.base, attempt.steps[0], clean.steps[attempt.base]
    if run.is_resized:
        return ""
    if not first.samples:  # that are not seen
        is_elsewhere = difference(first.gradient, wanted.gradient, ()) > TOLERANCE
        makes_more = len(run.steps) != len(clean.steps)
        return "step number" if is_elsewhere and makes_more else ""
    if has_same_samples(first, wanted):
        return ""
    if set(first.samples) < set(wanted.samples):
        return "accumulation"
    places, starts = find_places(first, clean), list_starts(clean)
    if not places:
        return "random state"
    begin = max(each for each in starts if each <= base)
    if begin in places:
        return "loader"
    if 0 not in places or is_placed:
        return "step number"
    # Without an epoch's number the first order comes from the first random state.
    has_epoch = any(each["epoch"] is not None for each in attempt.calls("pass"))
    return "loader" if has_epoch or base > begin else "random state"


def _compare_schedules(attempt: Attempt, clean: Run, save: str) -> Iterator[Cause]:
    """Yield the schedule of the first optimizer whose learning rate differs."""
    for step, wanted in zip(attempt.steps, clean.steps[attempt.base :], strict=False):
        rates = zip(attempt.optimizers, step.rates, wanted.rates, strict=False)
        for number, *pair in rates:
            if not math.isclose(*pair):
                schedules = attempt.calls("schedule")
                lines = [each["where"] for each in schedules if each["optimizer"] == number]
                yield Cause("learning rate", lines[0] if lines else save)
                return


def _compare_states(is_wrong: bool, attempt: Attempt, clean: Run, save: str) -> Iterator[Cause]:
    """Yield what of the state with which an attempt began is not the undisturbed run's."""
    base, first, wanted = attempt.base, attempt.steps[0], clean.steps[attempt.base]
    found: list[str] = []
    begun = [each["momentum"] for each in attempt.calls("begin")]
    is_close = functools.partial(math.isclose, rel_tol=1e-6)
    has_state = all(map(is_close, begun, clean.steps[base - 1].momentum))
    if not has_same_samples(first, wanted):
        if not has_state:
            yield Cause("optimizer", save)
        return
    others = zip(first.other_states, wanted.other_states, strict=False)
    if not has_state or not all(are_close(*each) for each in others):
        found.append("optimizer")
    if difference(first.others, wanted.others, clean.steps[0].others) > TOLERANCE:
        found.append("weights")
    if _has_other(first.buffers, wanted.buffers, clean.steps[0].buffers):
        found.append("buffers")
    if first.scales != wanted.scales:
        found.append("loss scale")
    pairs = list(zip(attempt.steps, clean.steps[base:], strict=False))
    has_other_draws = first.draws != wanted.draws and draws_in_steps(clean)
    has_other_noise = any(has_other_content(*each) for each in pairs)
    if is_wrong and (has_other_draws or has_other_noise):
        found.append("random state")
    has_same_rates = all(are_close(one.rates, other.rates) for one, other in pairs)
    if is_wrong and not found and has_same_rates:
        has_own_buffers = _has_other(first.unsaved, wanted.unsaved, clean.steps[0].unsaved)
        found.append("buffers" if has_own_buffers else "other state")
    for name in found:
        yield Cause(name, save)


def _has_other(ours: Sequence[float], theirs: Sequence[float], initial: Sequence[float]) -> bool:
    return difference(ours, theirs, initial) > TOLERANCE


def _ranks_differ(run: Run, attempt: Attempt) -> bool:
    begins = attempt.calls("begin")
    steps = {each["rank"]: each for each in reversed(attempt.calls("step"))}
    rates = {tuple(each["rates"]) for each in steps.values()}
    epochs = {each["epoch"] for each in attempt.calls("pass") if each["step"] == 0}
    states = {(tuple(each["weights"]), each["momentum"]) for each in begins}
    return bool(run.exit_code) or max(len(states), len(rates), len(epochs)) > 1
