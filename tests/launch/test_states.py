"""The states of an attempt, case by case, and over sequences of kills, drains and growths."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from flyte_ddp.checkpoints import WRITE_GRACE
from flyte_ddp.config.waits import BEAT_INTERVAL
from flyte_ddp.errors import NodeLost, RankFailure
from flyte_ddp.launch.control.gang_failures import (
    CAUSE_GRACE,
    ECHO_GRACE,
    cause_grace,
    find_cause,
)
from flyte_ddp.launch.control.states import (
    KILL_TIMEOUT,
    REPORT_TIMEOUT,
    Departure,
    Ended,
    Facts,
    Killing,
    Running,
    Starting,
    Stopping,
    Why,
    has_moved,
    next_state,
)
from flyte_ddp.launch.protocol import messages
from flyte_ddp.launch.protocol.messages import Outcome

NOW = 1000.0
DONE, STOPPED, FAILED, KILLED = Outcome
TWO = (None, None)
LEAVES = Departure("node 1", NOW + 31, NOW + 15)  # The node still trains for now.
AT_ONCE = Departure("node 0", NOW + 11, NOW - 5)
ENDS = Stopping(Why.RUN_ENDS, "SIGTERM", NOW + 20)
GROWS = Stopping(Why.GANG_GROWS, "the gang grows from 2 to 3 nodes", NOW + 607)
DRAINS = Stopping(Why.NODES_LEAVE, "node 1 leaves", NOW + 37, num_leaving=1)
CAN_GROW = {"larger": 3, "is_stoppable": True, "save_timeout": 600.0}
ASKED = {"stop_reason": "SIGTERM", "stop_grace": 13.0}


def killing(after=None, is_late=False, deadline=NOW + KILL_TIMEOUT):
    return Killing(deadline, after, is_late)


def leaving(deadline, reason="node 1 leaves", num_leaving=1):
    return Stopping(Why.NODES_LEAVE, reason, deadline, num_leaving)


@pytest.mark.parametrize(
    ("state", "facts", "expected"),
    [
        (Starting(), {}, Running()),
        (Starting(), ASKED, ENDS),
        (Starting(), {"outcomes": (DONE, DONE)}, Ended((DONE, DONE))),
        (Running(), {}, Running()),
        (Running(), {"outcomes": (DONE, None)}, Running()),
        (Running(), {"outcomes": (DONE, FAILED)}, Ended((DONE, FAILED))),
        # a failure
        (Running(), {"is_cause_known": True}, killing()),
        (DRAINS, {"is_cause_known": True}, killing(DRAINS)),
        (Running(), {"is_cause_known": True, **ASKED}, killing()),
        # the end of the run, also of a gang that ends already
        (Running(), ASKED, ENDS),
        (GROWS, ASKED, ENDS),
        (DRAINS, ASKED, ENDS),
        (ENDS, {**ASKED, "departures": [AT_ONCE]}, ENDS),
        (ENDS, {**ASKED, "is_urgent": True}, killing(ENDS)),
        # nodes that leave: at once if there are enough others, or as soon as they have to
        (Running(), {"departures": [LEAVES]}, Running()),
        (Running(), {"departures": [LEAVES], "can_do_without_leaving": True}, DRAINS),
        (Running(), {"departures": [AT_ONCE]}, leaving(NOW + 17, "node 0 leaves")),
        (DRAINS, {"departures": [LEAVES]}, DRAINS),
        (DRAINS, {"departures": [LEAVES, AT_ONCE]}, leaving(NOW + 17, "2 nodes leave", 2)),
        (GROWS, {"departures": [LEAVES]}, DRAINS),
        (leaving(NOW + 9), {"departures": [LEAVES] * 2}, leaving(NOW + 9, "2 nodes leave", 2)),
        # growth, when nothing else is going on and the state can be saved
        (Running(), CAN_GROW, GROWS),
        (Running(), {**CAN_GROW, "is_stoppable": False}, Running()),
        (Running(), {**CAN_GROW, "departures": [LEAVES]}, Running()),
        (GROWS, CAN_GROW, GROWS),
        (DRAINS, {**CAN_GROW, "departures": [LEAVES]}, DRAINS),
        # the end
        (dataclasses.replace(DRAINS, deadline=NOW - 1), {}, None),
        (DRAINS, {"outcomes": (STOPPED, STOPPED)}, Ended((STOPPED, STOPPED), DRAINS)),
        (killing(GROWS, True), {"outcomes": (KILLED, DONE)}, Ended((KILLED, DONE), GROWS, True)),
        (killing(), ASKED, killing()),
        (killing(deadline=NOW - 1), {"outcomes": (FAILED, None)}, Ended((FAILED, None))),
        (Ended((DONE, DONE)), {**ASKED, "is_cause_known": True}, Ended((DONE, DONE))),
    ],
)
def test_the_state_that_follows(state, facts, expected):
    found = next_state(state, Facts(NOW, **{"outcomes": TWO, **facts}))
    assert found == (expected or killing(state, is_late=True))


@pytest.mark.parametrize(
    ("ended", "has_failed", "expected"),
    [
        (Ended((STOPPED, STOPPED), DRAINS), False, True),
        (Ended((STOPPED, DONE), GROWS), False, True),
        # The agent killed the ranks, because its machine is leaving.
        (Ended((STOPPED, KILLED), DRAINS), False, True),
        (Ended((STOPPED, STOPPED), ENDS), False, False),
        (Ended((STOPPED, STOPPED)), False, False),
        (Ended((STOPPED, None), DRAINS), False, False),
        (Ended((STOPPED, KILLED), GROWS, True), False, False),
        (Ended((STOPPED, FAILED), DRAINS), True, False),
    ],
)
def test_a_gang_that_ends_in_order_starts_again_elsewhere(ended, has_failed, expected):
    assert has_moved(ended, has_failed) is expected


RAISED = RankFailure("rank 1 failed", 1, "exception", "ValueError: bad")
MINE = RankFailure("rank 1 failed", 1, "exception", "ConfigError: bad")
ECHO = RankFailure("rank 0 failed", 0, "exception", "RuntimeError: gloo", is_consequence=True)
MISFIT = RankFailure("misfit", 1, cause="ProgramError: misfit", details={"sizes": "8 vs 4"})
STALL = RankFailure("no rank made progress", -1, "stall", "stall")
SIGNAL = RankFailure("rank 1 was killed", 1, "signal", "SIGABRT")
SIGKILL = RankFailure("rank 1 was killed", 1, "signal", "SIGKILL")
LOST = NodeLost("node 1 was lost")
WRITING, ENDING = {"is_writing": True}, {"is_ending": True}


@pytest.mark.parametrize(
    ("failures", "facts", "cause", "seconds"),
    [
        ([RAISED], {}, RAISED, CAUSE_GRACE),
        ([RAISED], ENDING, RAISED, ECHO_GRACE),
        ([RAISED], WRITING, RAISED, WRITE_GRACE),  # the checkpoint is worth more than the time
        ([MINE], WRITING, MINE, WRITE_GRACE),
        ([MINE], ENDING, MINE, 0.0),
        ([MISFIT], ENDING, MISFIT, 0.0),
        ([MISFIT], {"lacks_ranks": True}, MISFIT, ECHO_GRACE),
        ([SIGNAL], WRITING, SIGNAL, CAUSE_GRACE),  # The writing rank may wait for the killed one.
        ([ECHO], {}, ECHO, ECHO_GRACE),
        ([ECHO], {"num_nodes": 1}, ECHO, CAUSE_GRACE),
        ([ECHO, STALL], {}, STALL, ECHO_GRACE),
        ([ECHO, RAISED, SIGNAL], {}, RAISED, CAUSE_GRACE),  # The first of similar causes counts.
        ([ECHO, RAISED, SIGKILL], WRITING, SIGKILL, 0.0),
        ([ECHO, RAISED, LOST], ENDING, LOST, 0.0),
    ],
)
def test_the_failure_that_explains_the_others_and_how_long_it_is_waited_for(
    failures, facts, cause, seconds
):
    assert find_cause(failures) is cause
    facts = {"num_nodes": 2, "is_writing": False, "is_ending": False, **facts}
    assert cause_grace(failures, **facts) == seconds


def test_the_table_of_messages_has_each_of_them():
    kinds = {
        name: each
        for name, each in vars(messages).items()
        if dataclasses.is_dataclass(each) and each.__module__ == messages.__name__
    }
    kinds["PartSaved"] = messages.PartSaved  # This message is defined elsewhere.
    types = " ".join(str(part.type) for each in kinds.values() for part in dataclasses.fields(each))
    rows = re.findall(r"^\| `(\w+)`", messages.__doc__, re.MULTILINE)
    assert sorted(rows) == sorted(name for name in kinds if not re.search(rf"\b{name}\b", types))
    assert len(rows) <= 23


# Events that may happen at any moment, and the seconds until the next one.
HAPPENS = ("tick", "stop", "urgent", "leave", "grow", "fail", "end", "end all")
STEPS = some.lists(
    some.tuples(some.sampled_from(HAPPENS), some.floats(0, 40)), min_size=1, max_size=30
)
ORDER = (Starting, Running, Stopping, Killing, Ended)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_whatever_happens_a_gang_only_goes_towards_its_end_and_gets_there(steps):
    state, facts, num_leaving = Starting(), Facts(NOW, (None,) * 3), 0
    for what, seconds in [*steps, *[("stop", 100.0)] * 4]:
        changes = {
            "stop": ASKED,
            "urgent": {**ASKED, "is_urgent": True},
            "grow": CAN_GROW,
            "fail": {"is_cause_known": True},
            "end all": {"outcomes": (STOPPED,) * 3},
        }.get(what, {})
        if what == "leave" and num_leaving < 3:
            num_leaving += 1
            departure = Departure.announce(f"node {num_leaving}", 30.0, facts.now)
            changes = {"departures": [*facts.departures, departure]}
        elif what == "end":
            number = facts.outcomes.index(None) if None in facts.outcomes else 0
            outcomes = list(facts.outcomes)
            outcomes[number] = STOPPED
            changes = {"outcomes": tuple(outcomes)}
        facts = dataclasses.replace(facts, **changes)
        before, state = state, next_state(state, facts)
        assert ORDER.index(type(state)) >= ORDER.index(type(before))
        assert next_state(state, facts) == state  # A state does not change by itself.
        if isinstance(before, Stopping) and isinstance(state, Stopping):
            is_same = before.why is Why.RUN_ENDS and state != before
            assert not is_same  # a run that ends does nothing else
            if state.why is Why.NODES_LEAVE:
                assert state.deadline <= before.deadline  # never later
        if isinstance(state, Stopping) and state.why is Why.NODES_LEAVE and state != before:
            gone_at = min(each.gone_at for each in facts.departures)
            assert state.deadline - REPORT_TIMEOUT <= max(facts.now, gone_at - BEAT_INTERVAL)
        if None not in facts.outcomes:
            assert isinstance(state, Ended)
        facts = dataclasses.replace(facts, now=facts.now + seconds)
    assert isinstance(state, Ended)
