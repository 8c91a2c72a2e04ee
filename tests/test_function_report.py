"""The report of a function. test_observers.py tests its history and progress bar."""

from __future__ import annotations

from flyte_ddp.events import (
    CheckpointLoaded,
    CheckpointWritten,
    Event,
    RankReported,
    Reported,
    RunFinished,
    RunStarted,
)
from flyte_ddp.observers.reports.run import MAX_LINES, Report

STARTED = RunStarted("train", 4, 2, 0)


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
        report.handle(event)
    return report


def test_a_report_shows_values_restarts_checkpoints_and_the_last_lines():
    assert "Waiting for the ranks" in Report("train").render()
    report = report_of(restarted_run())
    for number in range(2 * MAX_LINES):
        report.add_line(f"<line {number}>")
    shown = report.render()

    assert report.status == "running"
    assert "4 ranks on 2 nodes" in shown
    for text in ("val accuracy", "0.875", "epoch 2.5", "s3://bucket/step-5", "Resumed at step"):
        assert text in shown
    assert shown.count("<svg") == 2
    assert f"&lt;line {2 * MAX_LINES - 1}&gt;" in shown
    assert f"&lt;line {MAX_LINES - 1}&gt;" not in shown
    assert "secret" not in shown
    assert "<td>1 <small>in this attempt" in shown
    assert "other ranks" not in shown
    for rank, loss in ((1, 0.25), (2, 0.5), (3, 0.75), (3, 1.5)):
        report.handle(RankReported(rank, [Reported(10, None, {"loss": loss, "own": 2 * rank})]))
    for text in ("other ranks: 0.75, 0.25 to 1.5", "other ranks: 4, 2 to 6"):
        assert text in report.render()
    report.handle(STARTED)
    assert "other ranks" not in report.render()
    report.handle(RunFinished(10, 1.0))
    assert report.status == "finished"
