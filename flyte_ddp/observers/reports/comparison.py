"""The page that compares runs: their curves drawn over each other, what differs, and where the time
went. Of the nights of a schedule it says whether the newest is worse than their noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.config import Monitor
from flyte_ddp.config.fields import suggest
from flyte_ddp.config.options import add_options
from flyte_ddp.errors import ConfigError
from flyte_ddp.events.nights import MIN_NIGHTS, Verdict, judge_newest
from flyte_ddp.observers.formats import duration, format_count, format_figure, shown_value, title_of
from flyte_ddp.observers.reports.compared_run import (
    ComparedRun,
    find_changes,
    find_usual,
    read_runs,
)
from flyte_ddp.observers.reports.drawing import FAINT, INK, PALETTE, Line, Panel
from flyte_ddp.observers.reports.page import NOTHING, Page, Table, cell
from flyte_ddp.observers.reports.plots import color_lines

OPTIONS = (
    ("--page", "file to write (default: compare.html)", "compare.html"),
    ("--metric", "figure that tells a worse run (default: what the newest one monitors)", ""),
)
LEFT_OUT = "; it is left out"
MAX_PANELS = 12
MAX_COLORS, MAX_LABEL = 4, 22  # runs with a color each; characters of a run in a legend
MAX_COLUMNS = 8  # newest runs with a column in the tables


@dataclass(frozen=True)
class Comparison:
    """Two or more runs, the oldest first."""

    runs: Sequence[ComparedRun]
    monitor: Monitor

    @property
    def scores(self) -> list[float]:
        """The figure of each run, less for a better one."""
        return [run.find_score(self.monitor) for run in self.runs]

    def list_notices(self) -> list[str]:
        """Return the verdict, and what changed beside it, a line each."""
        lines = [f"{run.name}: {run.problem}" for run in self.runs if run.problem]
        verdict, num_newest = None, 1
        if not math.isnan(self.scores[-1]):
            verdict = judge_newest(self.scores)
        if verdict:
            lines.append(self._describe(verdict))
            if verdict.is_worse:
                num_newest = verdict.num_newest
        elif len(self.runs) > 2:
            metric = self.monitor.metric
            few = f"Too few runs to tell a worse one from noise: {MIN_NIGHTS} are needed with"
            lines.append(f"{few} {metric}, the newest among them")
        before, usual = self.runs[-1 - num_newest], find_usual(self.runs[:-num_newest])
        changes = find_changes(before, self.runs[-1])
        new = [
            f"{name} {_show(values[0])} → {_show(values[1])}"
            for name, values in changes.items()
            if name not in usual
        ]
        named = "; ".join(new) or "nothing that is known"
        lines.append(f"Changed since {before.name}: {named}")
        if len(new) < len(changes):
            lines.append(f"Changed as before most runs: {', '.join(sorted(usual & set(changes)))}")
        return lines

    def _describe(self, verdict: Verdict) -> str:
        which, how = "The newest night is", "within the noise"
        if verdict.num_newest > 1:
            which = f"The {verdict.num_newest} newest nights are"
        if verdict.is_worse:
            how = "worse than the noise"
        metric = self.monitor.metric
        ends = [format_figure(metric, abs(each)) for each in self.scores[-MIN_NIGHTS:]]
        return (
            f"{which} {how} of the {verdict.num_before} before: {metric} is worse by "
            f"{verdict.distance:.1f} standard errors, of which {verdict.limit:g} may be chance "
            f"(at the ends of the last curves: {', '.join(ends)})"
        )

    def list_panels(self) -> Iterator[Panel]:
        """Yield a panel for each figure that at least two runs have over the same axis."""
        counts = Counter(itertools.chain(*(run.curves for run in self.runs)))
        shared = [key for key, count in counts.items() if count > 1]
        for index, (figure, axis) in enumerate(shared[:MAX_PANELS]):
            name, title = f"compared-{index}", title_of(figure)
            summary = f"{title} of the runs over {axis}s"
            lines = self._draw_lines((figure, axis))
            note = f"in color: {lines[-1].name or lines[-1].label}"
            yield Panel(name, title, summary, lines, axis, note, log_ratio=20, figure=figure)

    def _draw_lines(self, key: tuple[str, str]) -> list[Line]:
        """Return a line for each run with this curve. Of many, only the newest has a color."""
        curves = {run.name[-MAX_LABEL:]: run.curves[key] for run in self.runs if key in run.curves}
        if len(curves) <= MAX_COLORS:
            return color_lines(curves)
        *others, newest = curves
        faint = [Line(curves[name], None, INK, 1, FAINT, name) for name in others]
        return [*faint, Line(curves[newest], None, PALETTE[0], name=newest)]

    def list_tables(self) -> list[Table]:
        """Return what differs, and where the time went, with a column for each run."""
        runs = self.runs[-MAX_COLUMNS:]
        facts = {run.name: run.facts for run in runs}
        seconds = {run.name: run.seconds for run in runs}
        changed = itertools.chain(*(find_changes(*pair) for pair in itertools.pairwise(runs)))
        spent = [name for each in seconds.values() for name in each if each[name]]
        hidden = sorted({each["name"] for run in runs for each in run.card["hidden"] or ()})
        note = ""
        if hidden:
            note = f"hidden, and not compared: {', '.join(hidden)}"
        tables = [
            Table("What differs", note, _make_rows(changed, facts, _show)),
            Table("Where the time went", "of a step: the mean rank", _make_rows(spent, seconds)),
        ]
        return [each for each in tables if each.rows]


def _make_rows(
    names: Iterable[str],
    columns: Mapping[str, Mapping[str, Any]],
    form: Callable[[Any], str] = duration,
) -> list[tuple[bool, dict[str, dict[str, Any]]]]:
    """Return a row for each name, with the value of each column."""
    rows = []
    for name in dict.fromkeys(names):
        row = {"name": cell(name.replace("_", " "), kind="words")}
        for column, values in columns.items():
            row[column] = cell(values.get(name), form)
        rows.append((False, row))
    return rows


def _show(value: Any) -> str:
    if value is None:
        return NOTHING
    return shown_value(value)


@dataclass(eq=False)
class ComparisonPage(Page):
    """The page of a comparison."""

    comparison: Comparison
    problems: Sequence[str] = ()  # a line for each place that could not be read

    @property
    def title(self) -> str:
        return "Comparison of runs"

    def content(self) -> dict[str, Any]:
        return {
            "lead": format_count(len(self.comparison.runs), "run"),
            "notices": [*self.problems, *self.comparison.list_notices()],
            "charts": [("", "", self.draw(self.comparison.list_panels()))],
            "tables": self.comparison.list_tables(),
        }


def compare_runs(runs: Sequence[ComparedRun], metric: str = "") -> Comparison:
    """Return the comparison of runs by a figure: `metric`, or the figure that the newest run
    monitors, or else its loss.

    Raises:
        ConfigError: there are fewer than two runs, or no run has this figure.
    """
    if len(runs) < 2:
        raise ConfigError(f"RUN: expected two runs or more, got {len(runs)}")
    known = {figure for run in runs for figure, _ in run.curves}
    monitor = Monitor(**runs[-1].card["config"].get("monitor", {}))
    if monitor.metric not in known and "loss" in known:
        monitor = Monitor("loss")
    if metric:
        monitor = Monitor(metric)
        if metric not in known:
            raise ConfigError(
                f"--metric: expected one of {', '.join(sorted(known))}, got {metric!r}"
                f"{suggest(metric, known)}"
            )
    if len({os.path.dirname(run.name) for run in runs}) == 1:
        runs = [dataclasses.replace(run, name=os.path.basename(run.name)) for run in runs]
    return Comparison(runs, monitor)


def main(arguments: Sequence[str]) -> str:
    """Write the page of a comparison, and return its lines for people."""
    parser = argparse.ArgumentParser("flyte-ddp compare", description=__doc__)
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="directory or URL with the run's history or run card, or one of these files, the "
        "oldest first; or the place of a champion, with its nights",
    )
    add_options(parser, OPTIONS)
    options = parser.parse_args(arguments)
    runs, problems = [], []
    for place in options.runs:
        try:
            runs += read_runs(place)
        except ConfigError as error:
            problems.append(f"{error}{LEFT_OUT}")
    if len(runs) < 2 and problems:
        raise ConfigError(problems[0].removesuffix(LEFT_OUT))
    comparison = compare_runs(runs, options.metric)
    page = ComparisonPage(comparison, problems)
    page.close(None)
    try:
        Path(options.page).write_text(page.render(), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"--page: expected a file that can be written, got {options.page!r}: {error.strerror}"
        ) from error
    return "\n".join([*problems, *comparison.list_notices(), f"page: {options.page}"])
