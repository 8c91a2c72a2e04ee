"""The differences between a run and the undisturbed one, step by step. Knows no causes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from flyte_ddp.rehearsal.seen import Attempt, Run, Step, find_distance

# Share of what the training has changed. Sums on another number of ranks differ by less. If a batch
# is left out, the difference is larger.
TOLERANCE = 1e-3


def difference(ours: Sequence[float], theirs: Sequence[float], initial: Sequence[float]) -> float:
    """Return the distance of two states as a share of how far `theirs` is from `initial`."""
    distance = find_distance(ours, theirs)
    if not distance:
        return 0.0
    changed = math.dist(theirs, initial) if len(theirs) == len(initial) else 0.0
    return distance / (changed or math.hypot(*theirs) or 1.0)


def are_close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether two lists have the same values."""
    return len(ours) == len(theirs) and all(
        math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
        for one, other in zip(ours, theirs, strict=True)
    )


def list_starts(run: Run) -> list[int]:
    """Return the steps after which a pass over the training data began."""
    passes = run.attempts[0].calls("pass")
    return sorted({each["step"] for each in passes if each["rank"] == 0} | {0})


def draws_in_steps(run: Run) -> bool:
    """Return whether a step draws random numbers, and not only the beginning of an epoch."""
    starts = list_starts(run)
    pairs = zip(run.steps, run.steps[1:], strict=False)
    return any(
        one.draws != other.draws
        for number, (one, other) in enumerate(pairs, 1)
        if number not in starts
    )


def has_same_samples(step: Step, wanted: Step) -> bool:
    return Counter(step.samples) == Counter(wanted.samples)


def has_other_content(step: Step, wanted: Step) -> bool:
    """Return whether the same samples have other values, such as another augmentation."""
    if not step.samples or not has_same_samples(step, wanted):
        return False
    # Another number of ranks adds the values in another order.
    return not math.isclose(step.content, wanted.content, rel_tol=1e-6, abs_tol=1e-6)


def has_known_weights(attempt: Attempt, run: Run, clean: Run) -> bool:
    """Return whether all ranks began with the weights after some step, or with the initial ones."""
    begins = attempt.calls("begin")
    if any(each["weights"] != clean.initial for each in clean.attempts[0].calls("begin")):
        if run.is_resized:  # each rank has weights of its own
            return True
        begins = [each for each in begins if each["rank"] == 0]
    known = [clean.initial, *(step.weights for step in (*clean.steps, *run.steps))]
    final = clean.steps[-1].weights
    changed = math.dist(final, clean.initial) or math.hypot(*final) or 1.0

    def is_known(weights: Sequence[float]) -> bool:
        return any(find_distance(weights, each) <= TOLERANCE * changed for each in known)

    return all(is_known(begin["weights"]) for begin in begins)


def find_dependence(run: Run, clean: Run) -> str:
    """Return why a step's result depends on the number of ranks; "" where each sample's result is
    its own, as far as was seen.
    """
    if draws_in_steps(clean):
        return "a step draws random numbers"
    statistics = clean.attempts[0].calls("statistics")
    if statistics:
        return f"{statistics[0]['module']} uses statistics of a rank's batch"
    pairs = zip(clean.steps, clean.steps[1:], strict=False)
    if any(difference(one.buffers, other.buffers, ()) > TOLERANCE for one, other in pairs):
        return "buffers of modules change with a rank's batch"
    for attempt in run.attempts[1:]:
        both = zip(attempt.steps, clean.steps[attempt.base :], strict=False)
        if any(has_other_content(step, wanted) for step, wanted in both):
            return "samples are drawn anew for each rank"
        reason = _explain_first_difference(attempt, clean)
        if reason:
            return reason
    return ""


def _explain_first_difference(attempt: Attempt, clean: Run) -> str:
    """Return why an attempt that began with the whole state differs from the undisturbed run; ""
    where it does not, or where another reason is a mistake.
    """
    found = find_first_difference(attempt, clean)
    if found is None:
        return ""
    step, wanted = found
    if len(step.samples) != len(wanted.samples):
        return ""
    if not has_same_samples(step, wanted):
        return "a batch has other samples"
    if gradient_ratio(step, wanted):
        return ""
    return "a sample's result depends on how a batch is divided"


def find_first_difference(attempt: Attempt, clean: Run) -> tuple[Step, Step] | None:
    """Return the first step with other weights than the undisturbed run's, and that run's step.
    None without one, or for an attempt that did not begin with the whole state.
    """
    base = attempt.base
    if base >= len(clean.steps) or not _has_whole_state(attempt, clean):
        return None
    before = clean.steps[base - 1].weights if base else clean.initial
    for step, wanted in zip(attempt.steps, clean.steps[base:], strict=False):
        if difference(step.weights, wanted.weights, before) > TOLERANCE:
            return step, wanted
        before = wanted.weights
    return None


def gradient_ratio(step: Step, wanted: Step) -> float:
    """Return the factor by which a step's gradient is another's; 0.0 if it is another gradient, or
    the same.
    """
    ours, theirs = step.gradient, wanted.gradient
    square = sum(each * each for each in theirs)
    if len(ours) != len(theirs) or not square:
        return 0.0
    ratio = sum(one * other for one, other in zip(ours, theirs, strict=True)) / square
    is_multiple = difference(ours, [ratio * each for each in theirs], ()) < TOLERANCE
    return ratio if is_multiple and abs(ratio - 1) > TOLERANCE else 0.0


def _has_whole_state(attempt: Attempt, clean: Run) -> bool:
    """Return whether all ranks began with weights, optimizers and learning rates of the undisturbed
    run.
    """
    base, begins = attempt.base, attempt.calls("begin")
    if not attempt.steps or not begins:
        return False
    step, wanted = attempt.steps[0], clean.steps[base]
    before = clean.steps[base - 1].weights if base else clean.initial
    known = clean.steps[base - 1].momentum if base else (0.0,)
    found = [each["momentum"] for each in begins]
    is_same = all(math.isclose(each, known[0], rel_tol=TOLERANCE) for each in found)
    is_split = math.isclose(sum(found), sum(known), rel_tol=TOLERANCE)
    return (
        all(difference(each["weights"], before, ()) < TOLERANCE for each in begins)
        and (is_same or is_split)
        and are_close(step.rates, wanted.rates)
        and are_close(step.others, wanted.others)
        and all(are_close(each, wanted.other_states[0]) for each in step.other_states)
    )
