"""The command that makes the page of a run from its history."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.observers.reports.plots import read_state
from flyte_ddp.observers.reports.run import Report


def main(arguments: Sequence[str]) -> str:
    """Write the page of a run, and return a line for people."""
    options = make_parser(
        "report",
        "make the page of a run from its history; predictions and pictures are not in it",
        (
            ("history", "history.jsonl of a run", None),
            ("page", "file to write (default: report.html beside the history)", ""),
        ),
    ).parse_args(arguments)
    state = read_state(options.history)
    if not state.started:
        raise ConfigError(
            f"history: expected the history of a run that has started, got {options.history!r}"
        )
    page = Path(options.page or Path(options.history).with_name("report.html"))
    report = Report.of(state)
    if not state.finished:
        report.close(TrainingStopped("the history has no end of the run"))
    try:
        page.write_text(report.render(), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"page: expected a file that can be written, got {str(page)!r}: {error.strerror}"
        ) from error
    return f"report: {page}"
