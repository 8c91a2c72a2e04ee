"""Find out if a gang stands still, and report it: the rank that the others wait for, and the stacks
that differ.

Pure functions of the reports that the agents send about their ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flyte_ddp.errors import FailureKind, RankFailure
from flyte_ddp.launch.protocol.failures import find_place, program_failure
from flyte_ddp.launch.protocol.messages import Beat, Collective, Group, InspectedRank

STACK_LINES = 36  # lines for the main threads of all ranks; the log contains all threads
MAX_FRAMES = 12  # lines for one main thread
MAX_NAMED = 8  # ranks that a line names one by one
WAITING = "/torch/distributed/"  # part of a frame in a thread that waits for other ranks
SAME_COLLECTIVES = (
    "All ranks have to enter the same collectives, with tensors of the same size: give each the "
    "same number of batches"
)
# Texts in torch's messages about ranks that call different collectives, each with a remedy.
MISTAKES = {
    "Expected to have finished reduction in the prior iteration": (
        "A layer or an output was not used in a step: use all in each, or give "
        "DistributedDataParallel find_unused_parameters=True"
    ),
    "Detected mismatch between collectives on ranks": SAME_COLLECTIVES,
}
# Starts of stack lines that do not locate the thread. The garbage may be collected by another
# thread.
NO_FRAMES = ("Thread ", "Current thread ", "  Garbage-collecting")


@dataclass(frozen=True)
class Suspicion:
    """The ranks may wait for one another in vain, so the agents are asked where each is."""

    seconds: float  # time without progress
    left: tuple[int, ...] = ()  # ranks that have ended; (): all ranks may stand still


@dataclass(frozen=True)
class Culprits:
    """The ranks that the others wait for, and a sentence about the wait; empty if unknown."""

    numbers: tuple[int, ...] = ()
    why: str = ""
    is_mistake: bool = False  # the program would stand still there again


def suspect(
    beats: Sequence[Beat], world_size: int, stall_timeout: float, left_timeout: float
) -> Suspicion | None:
    """Return why the ranks may stand still, by their nodes' latest beats; None if they do not.

    There are three reasons. No rank of a node has made progress. Or a function never reports, and
    all ranks but at most one wait for others. Or some ranks have ended and all others wait in
    collectives.
    """
    silence = max(beat.silent_for for beat in beats)
    waits = [each for beat in beats for each in beat.waits]
    ended = tuple(number for beat in beats for number in beat.ended)
    wait, num_others = min(waits, default=0.0), world_size - len(waits)
    if silence < stall_timeout and num_others <= 1 and not any(each.has_reported for each in beats):
        silence = wait
    if silence >= stall_timeout:
        return Suspicion(silence)
    if ended and num_others == len(ended) and wait >= left_timeout:
        return Suspicion(wait, ended)
    return None


def judge(
    suspicion: Suspicion, ranks: Sequence[InspectedRank], stall_timeout: float
) -> RankFailure | None:
    """Return the failure of the ranks, by what the agents have answered; None if there is none."""
    if suspicion.left:
        waiting = [rank for rank in ranks if rank.number not in suspicion.left]
        return left_failure(waiting, suspicion.left)
    what = f"no rank made progress for {suspicion.seconds:.0f} s (stall_timeout: {stall_timeout:g})"
    return stall_failure(ranks, what)


def go_on(answers: Collection[Sequence[InspectedRank]], stall_timeout: float) -> bool:
    """Return whether a rank of each node has made progress since the gang was suspected.

    Args:
        answers: the ranks of each node.
    """
    for ranks in answers:
        silences = [rank.silent_for for rank in ranks if rank.silent_for is not None]
        if min(silences, default=stall_timeout) >= stall_timeout:
            return False
    return True


def stall_failure(ranks: Sequence[InspectedRank], what: str) -> RankFailure:
    """Return the failure of a gang that stands still. `what` begins the message."""
    culprits, silent = find_culprits(ranks), [rank.number for rank in ranks if rank.groups is None]
    if silent and not culprits.why:
        culprits = Culprits(tuple(silent), f"{_name_ranks(silent)} did not answer")
    if culprits.why:
        what = f"{what}: {culprits.why}"
    if culprits.is_mistake:
        first = next(rank for rank in ranks if rank.number == culprits.numbers[0])
        place = find_place(first.stack)
        if place:
            what = f"{what}, at {place}"
        if first.node:
            what = f"{what} on {first.node}"
        return program_failure(f"{what}. {SAME_COLLECTIVES}", first.number)
    lines = [what, *_stacks(ranks, set(culprits.numbers))]
    number = -1
    if len(culprits.numbers) == 1:
        number = culprits.numbers[0]
    return RankFailure("\n".join(lines), number, FailureKind.STALL, "stall")


def find_culprits(ranks: Sequence[InspectedRank]) -> Culprits:
    """Return the ranks that the others wait for, by the number of collectives that each rank has
    entered.
    """
    found = [_find_culprits(*name, ranks) for name in _list_groups(ranks)]
    # A culprit that waits in another group's collective is waiting for a rank itself.
    waiting = {rank.number for rank in ranks if rank.pending}
    return min(
        [culprits for culprits in found if culprits.why],
        key=lambda each: not waiting.isdisjoint(each.numbers),
        default=Culprits(),
    )


def _find_culprits(name: str, numbers: tuple[int, ...], ranks: Sequence[InspectedRank]) -> Culprits:
    """Return the ranks of a process group that its other ranks wait for."""
    members = {rank.number: rank for rank in ranks if rank.number in numbers}
    states = _find_states(name, numbers, members.values())
    pending = {number: each for number, group in states.items() for each in group.pending[:1]}
    if not pending:
        return Culprits()
    first = min(each.number for each in pending.values())
    waiting = {number: each for number, each in pending.items() if each.number == first}
    where = f"collective {first} of {name}"
    what = next(iter(waiting.values())).what
    arrived = [number for number, group in states.items() if group.entered >= first]
    # A rank that did not answer counts as absent, such as a stopped one.
    absent = [number for number in members if number not in arrived]
    if absent:
        who = _name_ranks(absent)
        node = members[absent[0]].node
        if len(absent) == 1 and node:
            who += f" on {node}"
        they = f"where {_name_ranks(waiting, 'wait')} ({where})"
        return Culprits(tuple(absent), f"{who} did not arrive at {what}, {they}")
    kinds = _group_by_kind(waiting)
    if len(kinds) > 1:
        rarest = min(kinds.values(), key=len)
        each_kind = ", ".join(f"{_name_ranks(those)} in {kind}" for kind, those in kinds.items())
        why = f"the ranks are in different collectives: {each_kind} ({where})"
        return Culprits(tuple(rarest), why, is_mistake=True)
    if len(waiting) == len(members):
        return Culprits(why=f"all ranks wait in {what} ({where})")
    return Culprits()


def _list_groups(ranks: Iterable[InspectedRank]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Return the name and the ranks of each process group."""
    return dict.fromkeys((group.name, group.ranks) for rank in ranks for group in rank.groups or ())


def _find_states(
    name: str, numbers: tuple[int, ...], members: Iterable[InspectedRank]
) -> dict[int, Group]:
    """Return the process group as each of its members reported it, by the number of the rank."""
    states: dict[int, Group] = {}
    for rank in members:
        for group in rank.groups or ():
            if (group.name, group.ranks) == (name, numbers):
                states[rank.number] = group
    return states


def _group_by_kind(waiting: Mapping[int, Collective]) -> dict[str, list[int]]:
    """Return the ranks by the kind of collective in which they wait. The size is part of the kind
    if it has to be the same for all ranks.
    """
    kinds: dict[str, list[int]] = {}
    for number, each in waiting.items():
        kind = each.operation
        if kind in ("all_reduce", "broadcast", "reduce"):
            kind = each.what
        kinds.setdefault(kind, []).append(number)
    return kinds


def left_failure(ranks: Sequence[InspectedRank], left: Sequence[int]) -> RankFailure | None:
    """Return the failure of `ranks` that wait in collectives for ended ranks.

    Args:
        left: the ranks that have ended.

    Returns:
        None if `ranks` do not wait for `left`: no collective in which they wait includes a rank of
            `left`, or one of `ranks` has gone on.
    """
    pending = [
        (group, each) for rank in ranks for group in rank.groups or () for each in group.pending[:1]
    ]
    missing = sorted({number for group, _ in pending for number in group.ranks if number in left})
    stacks = ["\n".join(rank.stack) for rank in ranks]
    if not pending and ranks and all(WAITING in stack for stack in stacks):
        missing = sorted(left)  # the ranks wait for a connection, or to receive a message
    if not missing:
        return None
    named = (f"{each.what} (collective {each.number} of {group.name})" for group, each in pending)
    what = next(named, "a call of torch.distributed")
    waiting = f"{_name_ranks([rank.number for rank in ranks], 'wait')} in {what}"
    return program_failure(_say_left(missing, waiting, find_place(ranks[0].stack)), missing[0])


def lost_failure(rank: int, left: Sequence[int], place: str) -> RankFailure:
    """Return the failure of a rank that lost its connection to a rank that has ended well.

    Args:
        left: the ranks that have ended well.
    """
    return program_failure(
        _say_left(left, f"rank {rank} waits for that in a collective", place), left[0]
    )


def explain(failure: RankFailure) -> RankFailure:
    """Return a failure of one line if `failure` is due to ranks that call different collectives.
    Return `failure` itself if it is not.
    """
    message = failure.cause.partition(": ")[2]
    hint = next((hint for text, hint in MISTAKES.items() if text in message), "")
    sizes = failure.details.get("sizes")
    if not hint and not sizes:
        return failure
    place = failure.details.get("place") or find_place(reversed(str(failure).splitlines()))
    where = ""
    if place:
        where = f" at {place}"
    if sizes:
        how = f"was ended by gloo{where}: what a peer sent does not fit ({sizes})"
    else:
        how = f"failed{where}: {message.partition('. ')[0].partition(chr(10))[0]}"
    text = f"rank {failure.rank} {how}. {hint or SAME_COLLECTIVES}"
    explained = program_failure(text, failure.rank)
    explained.details = failure.details
    return explained


def misfit_failure(failure: RankFailure, others: Sequence[InspectedRank]) -> RankFailure:
    """Return the failure of the rank that entered another collective than the others did.

    Args:
        failure: failure of a rank that gloo has ended, because it got more than it expected. Nobody
            can ask this rank for its collective.
        others: ranks that have lost it, with their latest collectives.

    Returns:
        `failure`, with the collective of `others`, if these agree. Otherwise it is the failure of
            the rank that is alone. In doubt this is the rank with the largest tensors, because the
            ended rank got more than it expected.
    """
    where, entered = _find_misfit(failure.rank, others)
    if not entered:
        return failure
    kinds = _group_by_kind(entered)
    each_kind = ", ".join(f"{_name_ranks(those)} in {kind}" for kind, those in kinds.items())
    if len(kinds) == 1:
        text = str(failure).removesuffix(SAME_COLLECTIVES)
        text = f"{text}Its peers: {each_kind} ({where}). {SAME_COLLECTIVES}"
        return program_failure(text, failure.rank)
    rarest = min(kinds.values(), key=lambda those: (len(those), -entered[those[0]].num_elements))
    first = next(rank for rank in others if rank.number == rarest[0])
    what = f"{_name_ranks(rarest)} entered another collective than the others"
    if first.node:
        what = f"{first.node}: {what}"
    place = find_place(first.stack)
    if place:
        what = f"{what}, at {place}"
    ended = f"gloo ended rank {failure.rank}: what it got does not fit ({failure.details['sizes']})"
    return program_failure(
        f"{what}: {each_kind} ({where}). {ended}. {SAME_COLLECTIVES}", first.number
    )


def _find_misfit(ended: int, others: Sequence[InspectedRank]) -> tuple[str, dict[int, Collective]]:
    """Return the first collective in which `others` differ, or else their latest one: its name, and
    what each rank entered there, by the number of the rank. Return nothing if none is known.

    Args:
        ended: a rank that took part.
    """
    found: dict[str, dict[int, Collective]] = {}
    for name, numbers in _list_groups(others):
        if ended in numbers:
            for number, group in _find_states(name, numbers, others).items():
                for each in group.pending:
                    where = f"collective {each.number} of {name}"
                    found.setdefault(where, {})[number] = each
    for where, entered in found.items():
        if len(_group_by_kind(entered)) > 1:
            return where, entered
    return next(reversed(found.items()), ("", {}))


def _say_left(left: Sequence[int], waiting: str, place: str) -> str:
    they_have = "they have"
    if len(left) == 1:
        they_have = "it has"
    if place:
        waiting = f"{waiting}, at {place}"
    ended = f"{_name_ranks(left)} left early: {they_have} ended"
    return f"{ended}, and {waiting}. {SAME_COLLECTIVES}"


def _stacks(ranks: Sequence[InspectedRank], first: set[int]) -> list[str]:
    """Return each different stack once. The stacks of the ranks in `first` come first."""
    alike: dict[tuple[str, ...], list[InspectedRank]] = {}
    for rank in ranks:
        frames = [line for line in rank.stack if not line.startswith(NO_FRAMES)]
        alike.setdefault(tuple(frames[:MAX_FRAMES]), []).append(rank)
    # The likely culprits first: also those that are behind the others.
    sections = sorted(
        alike.items(),
        key=lambda item: min(
            (each.number not in first, each.step, each.number) for each in item[1]
        ),
    )
    num_lines = 1 + max(3, min(MAX_FRAMES, STACK_LINES // len(sections)))
    num_shown = (STACK_LINES + 4) // num_lines
    lines = []
    for stack, owners in sections[:num_shown]:
        lines += [head_line(owners), *stack[: num_lines - 1]]
    if len(sections) > num_shown:
        left = sum(len(owners) for _, owners in sections[num_shown:])
        lines.append(f"... (the log has the stacks of {left} more ranks)")
    return lines


def list_stacks(ranks: Iterable[InspectedRank]) -> list[str]:
    """Return the stacks of all threads of each rank, as lines."""
    return [
        f"[rank {rank.number}] {line}"
        for rank in ranks
        for line in (head_line([rank]), *rank.stacks.splitlines())
    ]


def head_line(owners: Sequence[InspectedRank]) -> str:
    """Return the line above a stack of these ranks."""
    steps = sorted({rank.step for rank in owners})
    at = f"at steps {steps[0]} to {steps[-1]}"
    if len(steps) == 1:
        at = f"at step {steps[0]}"
    silences = [rank.silent_for for rank in owners if rank.silent_for is not None]
    ago = "never"
    if silences:
        ago = f"{min(silences):.0f} s ago"
    nodes = list(dict.fromkeys(rank.node for rank in owners if rank.node))
    on = ""
    if len(nodes) == 1:
        on = f" on {nodes[0]}"
    elif nodes:
        on = f" on {len(nodes)} nodes"
    return f"--- {_name_ranks([rank.number for rank in owners])}{on}, {at}, last progress {ago}"


def _name_ranks(numbers: Collection[int], verb: str = "") -> str:
    """Return the names of ranks, followed by a verb if it is given."""
    first = sorted(numbers)
    names = f"ranks {', '.join(map(str, first[:-1]))} and {first[-1]}"
    if len(first) > MAX_NAMED:
        names = f"{len(first)} ranks"
    elif len(first) == 1:
        names = f"rank {first[0]}"
        if verb:
            verb += "s"
    return f"{names} {verb}".rstrip()
