"""The report of a function. test_observers.py tests its history and progress bar."""

from __future__ import annotations

import dataclasses
import re

import pytest

from flyte_ddp.events import (
    AttemptStarted,
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointWritten,
    Event,
    RankReported,
    Reported,
    RunFinished,
    RunStarted,
    RunState,
)
from flyte_ddp.observers.reports.plots import run_panels
from flyte_ddp.observers.reports.run import MAX_LINES, Report
from tests.support.short_run import feed

STARTED = RunStarted("train", 4, 2, 0, named_arguments={"width": 3, "schedule": "cosine"})


def restarted_run() -> list[Event]:
    """A run that reported steps 1 to 8, and went on from step 5."""
    before = [Reported(step, step / 4, {"loss": 1 / step}) for step in range(1, 9)]
    written = CheckpointWritten(5, "s3://bucket/step-5", False)
    loaded = CheckpointLoaded(5, "s3://key:secret@bucket/step-5")
    after = [
        Reported(step, step / 4, {"loss": 1 / step, "val_accuracy": 0.875}) for step in range(6, 11)
    ]
    return [STARTED, *before, written, STARTED, loaded, *after]


def report_of(events: list[Event]) -> Report:
    report = Report("train")
    for event in events:
        feed(report, event)
    return report


def test_a_report_shows_values_restarts_checkpoints_and_the_last_lines():
    assert "Waiting for the ranks" in Report("train").render()
    report = report_of(restarted_run())
    for number in range(2 * MAX_LINES):
        report.add_line(f"<line {number}>")
    shown = report.render()

    assert report.status == "running"
    assert "4 ranks on 2 nodes" in shown
    assert re.search(r"<h2>Arguments .*>width</th>\s*<td>3</td>.*>cosine<", shown, re.S)
    for text in ("Val accuracy", "0.875", "epoch 2.5", "s3://bucket/step-5", "Resumed at step"):
        assert text in shown
    assert shown.count("<svg") == 2
    assert f"&lt;line {2 * MAX_LINES - 1}&gt;" in shown
    assert f"&lt;line {MAX_LINES - 1}&gt;" not in shown
    assert "secret" not in shown
    assert "<td>1 <small>in this attempt" in shown
    assert "other ranks" not in shown
    for rank, loss in ((1, 0.25), (2, 0.5), (3, 0.75), (3, 1.5)):
        feed(report, RankReported(rank, [Reported(10, None, {"loss": loss, "own": 2 * rank})]))
    for text in ("other ranks: 0.75, 0.25 to 1.5", "other ranks: 4, 2 to 6"):
        assert text in report.render().replace("\N{NO-BREAK SPACE}", " ")
    feed(report, STARTED)
    assert "other ranks" not in report.render()
    feed(report, RunFinished(10, 1.0))
    assert report.status == "finished"


LOOP = [(4 * epoch + batch, epoch, batch) for epoch in range(3) for batch in range(4)]


@pytest.mark.parametrize(
    ("reports", "axis", "expected"),
    [
        # a loop's whole epochs
        ([(step, epoch, {"loss": 1.0}) for step, epoch, _ in LOOP], "step", range(12)),
        # The results of one epoch come in parts.
        (
            [(step, step / 4, {"loss": 1.0}) for step, *_ in LOOP],
            "epoch",
            [n / 4 for n in range(12)],
        ),
        # steps of each epoch
        ([(batch, epoch, {"loss": 1.0}) for _, epoch, batch in LOOP], "report", range(1, 13)),
        ([(batch, None, {"loss": 1.0}) for *_, batch in LOOP], "report", range(1, 13)),
        # two reports of each epoch, of other values
        (
            [(step, step // 2, {"loss" if step % 2 else "accuracy": 1.0}) for step in range(12)],
            "epoch",
            range(6),
        ),
        # Only some of these reports have an epoch.
        ([(step, 0.1 if step else None, {"loss": 1.0}) for step in range(3)], "step", range(3)),
    ],
    ids=["whole", "parts", "begin-anew", "no-epoch", "two-reports", "some"],
)
def test_no_curve_of_a_function_goes_up_or_back(reports, axis, expected):
    state = RunState.of([STARTED, *(Reported(*each) for each in reports)])
    panel = next(each for each in run_panels(state) if each.name == "loss")
    assert panel.x_label == axis
    assert [x for x, _ in panel.lines[0].points] == list(expected)
    assert panel.summary == f"Loss over {axis}s"


def timed(*events: tuple[float, Event]) -> list[Event]:
    return [dataclasses.replace(event, at=at) for at, event in events]


def test_the_time_of_an_unchanged_script_is_the_programs():
    """Nothing is seen of it but its start and its end."""
    begun = (1003.0, AttemptStarted(1, 1000.0, 0.0)), (1004.0, STARTED)
    report = report_of(timed(*begun, (1100.0, RunFinished(0, 100.0))))
    spent = report._state.time_spent()
    assert {name: each for name, each in spent.parts().items() if each} == {
        "starting": 4.0,
        "program": 96.0,
    }
    shown = report.render()
    assert "Goodput" not in shown
    assert "The program" in shown
    assert "Checkpoint stalls" not in shown


def test_the_time_of_a_function_is_what_it_has_reported():
    """Its last minute may have been anything."""
    told = timed(
        (1003.0, AttemptStarted(1, 1000.0, 0.0)),
        (1004.0, STARTED),
        (1014.0, Reported(1, None, {"loss": 1.0})),
        (1016.0, CheckpointSaved(1, "s3://bucket/1", False, seconds=0.5)),
        (1020.0, Reported(2, None, {"loss": 1.0})),
        (1080.0, RunFinished(2, 80.0)),
    )
    report = report_of(told)
    spent = report._state.time_spent()
    assert {name: each for name, each in spent.parts().items() if each} == {
        "starting": 4.0,
        "stepping": 10.0 + 4.0,
        "checkpoint_stalls": 0.5,
        "program": 1.5 + 60.0,
    }
    assert spent.goodput == pytest.approx(14 / 80)
    assert "Goodput" in report.render()
