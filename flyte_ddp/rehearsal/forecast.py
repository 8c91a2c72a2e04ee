"""Forecast the goodput of a training: the share of its time in which it gets on. The costs of the
faults are those of a rehearsal; how often they happen is given. Imports neither torch nor Dask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from flyte_ddp.config.fields import finite_number
from flyte_ddp.errors import ConfigError
from flyte_ddp.rehearsal.seen import Run

KILL, NODE = "kill", "node"
KINDS = (KILL, "notice", "store", "disk", NODE)  # faults that leave the number of ranks as it is
HOUR = 3600.0


@dataclass(frozen=True)
class Plan:
    """How often faults happen in a training, and how it goes on after them.

    Attributes:
        rates: faults an hour, by kind.
        interval: seconds between two states that a restart can begin with; 0: as in the rehearsal.
            A notice, after which the rehearsal repeated no step, repeats none at any interval.
        absence: seconds until another node takes the place of a lost one; negative: as in the
            rehearsal.
        is_elastic: the gang goes on without a lost node, and starts again with another one.
        hours: length of the training; 0 for one so long that its first start does not count.
    """

    rates: Mapping[str, float]
    interval: float = 0.0
    absence: float = -1.0
    is_elastic: bool = False
    hours: float = 0.0


@dataclass(frozen=True)
class Cost:
    """The seconds that a training loses by one fault."""

    pause: float  # without a step, but for the wait for another node
    repeated: float  # steps that are done once more
    waiting: float = 0.0  # the wait for another node

    @property
    def seconds(self) -> float:
        return self.pause + self.repeated + self.waiting


@dataclass(frozen=True)
class Forecast:
    """The expected goodput of a training, and the cost of each fault.

    Attributes:
        goodput: in [0, 1].
        costs: what each kind of fault costs once.
        start_seconds: from the launch to the first step.
        problem: why there is no goodput; "" if there is.
    """

    plan: Plan
    goodput: float = 0.0
    costs: Mapping[str, Cost] = field(default_factory=dict)
    start_seconds: float = 0.0
    problem: str = ""


def read_plan(
    text: str, *, interval: float, absence: float, elastic: bool, hours: float
) -> Plan | None:
    """Return the plan that the options of a command ask for; None if they ask for none.

    Args:
        text: faults an hour by kind, such as "kill=0.5,node=2".

    Raises:
        ConfigError: an option has a wrong value, or no effect.
    """
    plan = Plan(
        {},
        finite_number("--interval", interval, minimum=0, unit="seconds"),
        finite_number("--absence", absence, minimum=-1, unit="seconds"),
        elastic,
        finite_number("--hours", hours, minimum=0, unit="hours"),
    )
    if text:
        return dataclasses.replace(plan, rates=_read_rates(text))
    if plan != Plan({}):
        raise ConfigError(
            "--per-hour: expected faults an hour, such as kill=0.5,node=2, for --interval, "
            "--absence, --elastic or --hours, got none"
        )
    return None


def _read_rates(text: str) -> dict[str, float]:
    rates: dict[str, float] = {}
    for part in text.split(","):
        kind, is_given, number = part.strip().partition("=")
        if kind not in KINDS or not is_given:
            raise ConfigError(
                f"--per-hour: expected numbers of {', '.join(KINDS)}, such as kill=0.5,node=2, got "
                f"{text!r}"
            )
        value: float | str = number
        with contextlib.suppress(ValueError):
            value = float(number)
        rates[kind] = finite_number(f"--per-hour: {kind}", value, minimum=0)
    return rates


def forecast(runs: Sequence[Run], plan: Plan) -> Forecast:
    """Return the goodput of a training by the runs of a rehearsal, the undisturbed run first.

    The costs of the faults add up, also those of faults in the same minute.
    """
    by_name = {run.name: run for run in runs}
    costs = {}
    for kind in plan.rates:
        run, num_starts = by_name[kind], 1
        if kind == NODE and plan.is_elastic:
            # The nodes that stay start as after a killed rank, and once more with another node.
            run, num_starts = by_name[KILL], 2
        reason = run.not_tried
        if run.exit_code:
            reason = f"it failed: {run.error}"
        if reason:
            return Forecast(plan, problem=f"the cost of {kind} is not known: {reason}")
        costs[kind] = _find_cost(run, runs[0], plan, num_starts)
    lost = sum(rate * costs[kind].seconds for kind, rate in plan.rates.items()) / HOUR
    start = runs[0].start_seconds
    if plan.rates.get(NODE):  # Such a training has several nodes, which start in another way.
        start = by_name[NODE].start_seconds or start
    if plan.hours:
        lost += start / (HOUR * plan.hours)
    return Forecast(plan, max(0.0, 1.0 - lost), costs, start)


def _find_cost(run: Run, undisturbed: Run, plan: Plan, num_starts: int) -> Cost:
    times = [step.at for step in undisturbed.steps]
    step_seconds = median(later - at for at, later in itertools.pairwise(times))
    repeated = run.num_redone * step_seconds
    # A training that saves at a notice repeats nothing, and a refused write is tried again.
    if plan.interval and (run.num_redone or run.name in (KILL, NODE)):
        repeated = plan.interval / 2
    pause, waiting = max(0.0, run.pause - step_seconds), 0.0
    if run.name == NODE:
        waiting = min(run.waited_seconds, pause)
        pause -= waiting
        if plan.absence >= 0:
            waiting = plan.absence
    return Cost(num_starts * pause, repeated, waiting)


def describe_forecast(found: Forecast, titles: Mapping[str, str]) -> list[str]:
    """Return the forecast as lines."""
    if found.problem:
        return [f"goodput: not known, because {found.problem}"]
    lines = [f"goodput: {found.goodput:.1%}"]
    for kind, cost in found.costs.items():
        parts = {
            "without a step": cost.pause,
            "of steps that are repeated": cost.repeated,
            "until another node is there": cost.waiting,
        }
        texts = [f"{seconds:.1f} s {what}" for what, seconds in parts.items() if seconds]
        lines.append(f"  {titles[kind]}, {found.plan.rates[kind]:g} an hour: {', '.join(texts)}")
    return lines
