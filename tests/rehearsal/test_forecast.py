"""Forecasts of the goodput, from costs that a rehearsal has measured."""

from __future__ import annotations

import dataclasses

import pytest

from flyte_ddp.errors import ConfigError
from flyte_ddp.rehearsal.command import format_row
from flyte_ddp.rehearsal.forecast import Plan, describe_forecast, forecast, read_plan
from flyte_ddp.rehearsal.page import RehearsalPage
from flyte_ddp.rehearsal.runs import TITLES
from flyte_ddp.rehearsal.seen import Run, Step
from flyte_ddp.rehearsal.verdict import Row, Verdict

STEP_SECONDS = 0.5
NO_OPTIONS = {"interval": 0.0, "absence": -1.0, "elastic": False, "hours": 0.0}


def run(name, **values):
    empty = {each.name: () for each in dataclasses.fields(Step)}
    steps = [Step(**{**empty, "at": STEP_SECONDS * number}) for number in range(9)]
    return Run(name, steps=steps, start_seconds=36.0, **values)


RUNS = [
    run("undisturbed", pause=0.6),
    run("kill", pause=2.5, num_redone=4),
    run("notice", pause=1.5),
    run("node", pause=11.5, waited_seconds=8.0, num_redone=4),
    run("disk", exit_code=1, error="no space"),
    Run("store", not_tried="it saves nothing"),
]


@pytest.mark.parametrize(
    ("plan", "lost_seconds"),
    [
        (Plan({"kill": 0.0}), 0.0),
        (Plan({"kill": 9.0}), 9 * (2.0 + 2.0)),  # without a step, and steps that are repeated
        (Plan({"kill": 9.0, "notice": 18.0}), 9 * (2.0 + 2.0) + 18 * 1.0),
        (Plan({"kill": 9.0}, interval=60.0), 9 * (2.0 + 30.0)),
        (Plan({"notice": 9.0}, interval=60.0), 9 * 1.0),  # The state was saved.
        (Plan({"node": 9.0}), 9 * (3.0 + 8.0 + 2.0)),
        (Plan({"node": 9.0}, absence=0.0), 9 * (3.0 + 2.0)),
        (Plan({"node": 1.0}, absence=300.0), 3.0 + 300.0 + 2.0),
        (Plan({"node": 9.0}, absence=300.0, is_elastic=True), 9 * (2 * 2.0 + 2.0)),
        (Plan({"kill": 9.0}, hours=2.0), 9 * (2.0 + 2.0) + 36.0 / 2),
        (Plan({"node": 900.0}, absence=300.0), 3600.0),  # The training gets nowhere.
    ],
)
def test_the_goodput_is_what_the_faults_leave_of_an_hour(plan, lost_seconds):
    found = forecast(RUNS, plan)
    assert found.goodput == pytest.approx(1 - lost_seconds / 3600)
    assert found.problem == ""


@pytest.mark.parametrize(
    ("kind", "why"), [("disk", "it failed: no space"), ("store", "it saves nothing")]
)
def test_a_fault_of_unknown_cost_has_no_goodput(kind, why):
    found = forecast(RUNS, Plan({"kill": 1.0, kind: 1.0}))
    line = f"goodput: not known, because the cost of {kind} is not known: {why}"
    assert describe_forecast(found, TITLES) == [line]


def test_each_fault_is_a_line_with_its_parts():
    found = forecast(RUNS, Plan({"node": 9.0, "notice": 0.5}))
    assert describe_forecast(found, TITLES) == [
        "goodput: 96.7%",
        "  a node lost, and another one, 9 an hour: 3.0 s without a step, 2.0 s of steps that are "
        "repeated, 8.0 s until another node is there",
        "  a notice (SIGTERM), and the command again, 0.5 an hour: 1.0 s without a step",
    ]


def test_the_page_shows_it():
    found = forecast(RUNS, Plan({"node": 9.0}))
    verdict = Verdict([Row(RUNS[0], [])], [], found)
    page = RehearsalPage("train.py", verdict, format_row).render()
    assert "goodput: 96.8%" in page
    assert "9 an hour: 3.0 s without a step" in page


def test_a_plan_is_read_from_options():
    options = {"interval": 60.0, "absence": 300.0, "elastic": True, "hours": 8.0}
    assert read_plan("kill=0.5, node=2", **options) == Plan(
        {"kill": 0.5, "node": 2.0}, 60.0, 300.0, True, 8.0
    )
    assert read_plan("", **NO_OPTIONS) is None


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (
            "flood=1",
            {},
            "--per-hour: expected numbers of kill, notice, store, disk, node, such as ",
        ),
        ("kill", {}, "--per-hour: expected numbers of kill"),
        ("kill=", {}, "--per-hour: kill: expected a finite number of at least 0, got ''"),
        ("kill=-1", {}, "--per-hour: kill: expected a finite number of at least 0, got -1"),
        ("kill=nan", {}, "--per-hour: kill: expected a finite number of at least 0, got nan"),
        ("kill=1", {"interval": -1.0}, "--interval: expected a finite number of at least 0"),
        ("kill=1", {"absence": -2.0}, "--absence: expected a finite number of at least -1"),
        ("kill=1", {"hours": float("inf")}, "--hours: expected a finite number of at least 0"),
        ("", {"hours": 8.0}, "--per-hour: expected faults an hour, such as kill=0.5,node=2, for "),
        ("", {"elastic": True}, "--per-hour: expected faults an hour"),
    ],
)
def test_a_wrong_plan_is_one_line(text, options, expected):
    with pytest.raises(ConfigError) as caught:
        read_plan(text, **{**NO_OPTIONS, **options})
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)
