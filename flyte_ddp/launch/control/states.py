"""The states of an attempt. The next one is a pure function of the state and of facts.

```
Starting --> Running --> Stopping --> Ended
                |           |           ^
                +-----------+--> Killing
```

Starting: the agents are asked to start their ranks. Running: the ranks train. Stopping: the ranks
save their state and end, because the run ends, nodes leave or the gang grows. Another reason may
follow the first one. Killing: a rank has failed, or the ranks did not end in time. Ended: on each
node that can be reached all processes are gone.

tests/launch/test_states.py has the table of cases.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from flyte_ddp.config.waits import BEAT_INTERVAL
from flyte_ddp.launch.protocol.messages import KILL_GRACE, Outcome

# share of a leaving node's time in which it trains until its replacement is there; the rest is for
# the save
TRAINING_SHARE = 0.5
# seconds for the nodes to confirm that their ranks are gone: what an agent takes, and the network
KILL_TIMEOUT = KILL_GRACE + 2.0
# seconds after the time to stop for the nodes to report that their ranks have ended
REPORT_TIMEOUT = 7.0


class Why(enum.Enum):
    """Why ranks that have not failed have to end."""

    RUN_ENDS = "run ends"
    NODES_LEAVE = "nodes leave"
    GANG_GROWS = "gang grows"


@dataclass(frozen=True)
class Departure:
    """The announcement of a node that it goes away. Moments are of the monotonic clock."""

    node: str
    gone_at: float
    # end of the time in which it trains on while the gang waits for its replacement
    trains_until: float

    @classmethod
    def announce(cls, node: str, seconds: float, now: float) -> Departure:
        """Return the departure of a node that leaves in `seconds`."""
        return cls(node, now + seconds, now + TRAINING_SHARE * seconds)


@dataclass(frozen=True)
class Starting:
    """The agents are asked to start the ranks."""


@dataclass(frozen=True)
class Running:
    """The ranks train."""


@dataclass(frozen=True)
class Stopping:
    """The ranks were asked to save their state and end."""

    why: Why
    reason: str  # text for people
    deadline: float  # monotonic time at which the driver kills the remaining ranks
    num_leaving: int = 0  # number of leaving nodes for which the ranks end


@dataclass(frozen=True)
class Killing:
    """The ranks were ordered to end at once."""

    deadline: float  # monotonic time after which a node without a confirmation counts as lost
    after: Stopping | None = None  # the request to stop before it
    is_late: bool = False  # the ranks did not stop in time


@dataclass(frozen=True)
class Ended:
    """The ranks are gone."""

    outcomes: tuple[Outcome | None, ...]  # outcome of each node; None without a report of its end
    after: Stopping | None = None
    is_late: bool = False


State = Starting | Running | Stopping | Killing | Ended


@dataclass(frozen=True)
class Facts:
    """The facts that decide the next state of an attempt."""

    now: float  # monotonic
    outcomes: tuple[Outcome | None, ...] = (None,)  # outcome of each node; None while ranks may run
    is_cause_known: bool = False  # a failure has a known cause, or the wait for the cause is over
    stop_reason: str = ""  # why the run has to end; "" if it does not
    stop_grace: float = 0.0  # seconds until the run has to end
    is_urgent: bool = False  # the run has to end at once
    departures: Sequence[Departure] = ()  # departures of the nodes that leave
    can_do_without_leaving: bool = False  # the next attempt could start at once
    larger: int = 0  # nodes of a larger gang that is possible now
    is_stoppable: bool = False  # the ranks save their state when they are asked to stop
    save_timeout: float = 0.0  # seconds to save where nothing presses


def next_state(state: State, facts: Facts) -> State:
    """Return the state that follows `state`, or `state` itself."""
    if isinstance(state, Ended):
        return state
    if isinstance(state, Killing):
        if None not in facts.outcomes or facts.now > state.deadline:
            return Ended(facts.outcomes, state.after, state.is_late)
        return state
    after = None
    if isinstance(state, Stopping):
        after = state
    if None not in facts.outcomes:
        return Ended(facts.outcomes, after)
    is_late = after is not None and facts.now > after.deadline
    if facts.is_cause_known or facts.is_urgent or is_late:
        return Killing(facts.now + KILL_TIMEOUT, after, is_late)
    return _ask_to_stop(after, facts) or after or Running()


def _ask_to_stop(after: Stopping | None, facts: Facts) -> Stopping | None:
    """Return the request to stop that the ranks get now; None if they get none.

    Args:
        after: the latest request to stop before it.
    """
    if after and after.why is Why.RUN_ENDS:
        return None
    if facts.stop_reason:
        deadline = facts.now + facts.stop_grace + REPORT_TIMEOUT
        return Stopping(Why.RUN_ENDS, facts.stop_reason, deadline)
    if _must_leave(after, facts):
        return _leave(after, facts)
    if not after and not facts.departures and facts.is_stoppable and facts.larger:
        reason = f"the gang grows from {len(facts.outcomes)} to {facts.larger} nodes"
        return Stopping(Why.GANG_GROWS, reason, facts.now + facts.save_timeout + REPORT_TIMEOUT)
    return None


def _must_leave(after: Stopping | None, facts: Facts) -> bool:
    """Return whether leaving nodes make the ranks end now, or sooner than they were asked to."""
    num_leaving = 0
    if after:
        num_leaving = after.num_leaving
    if len(facts.departures) <= num_leaving:
        return False
    is_time = facts.now > min(each.trains_until for each in facts.departures)
    return after is not None or is_time or facts.can_do_without_leaving


def _leave(after: Stopping | None, facts: Facts) -> Stopping:
    leaving = facts.departures
    reason = f"{len(leaving)} nodes leave"
    if len(leaving) == 1:
        reason = f"{leaving[0].node} leaves"
    # Ranks that have not ended are killed a beat before the first node is gone.
    ends_at = max(facts.now, min(each.gone_at for each in leaving) - BEAT_INTERVAL)
    deadline = ends_at + REPORT_TIMEOUT
    if after:
        deadline = min(deadline, after.deadline)
    return Stopping(Why.NODES_LEAVE, reason, deadline, len(leaving))


def has_moved(ended: Ended, has_failed: bool) -> bool:
    """Return whether the ranks ended to start again on other nodes, with their state saved."""
    moves = ended.after is not None and ended.after.why is not Why.RUN_ENDS
    return moves and not ended.is_late and not has_failed and None not in ended.outcomes
