"""The report of a function's run, folded from its events, with the last lines that its ranks printed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from flyte_ddp.events import CheckpointLoaded, Event, Reported, RunStarted, RunState
from flyte_ddp.observers.figures import number
from flyte_ddp.observers.page import Page, counted, draw, duration, row, section, shortened, tile
from flyte_ddp.observers.plots import report_panels

MAX_LINES = 60  # of the log
MAX_LINE = 400  # characters of each
MAX_TILES = 6  # of values

TEMPLATE = """
{%- block body %}
{%- if drawn %}{{ panels(drawn) }}{% endif %}
{%- if lines %}
<div class="grid"><section class="card"><h2>Log <small>the last lines</small></h2><pre>{{ lines }}</pre></section></div>
{%- endif %}
{%- if sections %}{{ facts(sections) }}{% endif %}
{%- endblock %}
"""


class FunctionReport(Page):
    """The report of one run of a function or a script. A listener: give it each event in order.

    Attributes:
        outputs: where they are, by name. To be set at the end.
    """

    template = TEMPLATE
    progress_label = "steps done"

    def __init__(self, name: str, links: Mapping[str, str] | None = None) -> None:
        super().__init__(links)
        self.outputs: dict[str, str] = {}
        self._name = name
        self._state = RunState()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._panels: list[Markup] | None = None

    def add_line(self, line: str) -> None:
        """Add a line of the log. Any thread may call this."""
        self._lines.append(shortened(line, MAX_LINE))

    def handle(self, event: Event) -> None:
        """Take in the next event of the run."""
        self._state.handle(event)
        if isinstance(event, (RunStarted, CheckpointLoaded, Reported)):
            self._panels = None

    @property
    def title(self) -> str:
        return self._name

    def content(self) -> dict[str, Any]:
        """Return the values of the template."""
        if self._panels is None:
            self._panels = draw(report_panels(self._state))
        started = self._state.started
        lead = "Waiting for the ranks to start."
        if started:
            lead = f"{counted(started.world_size, 'rank')} on {counted(started.num_nodes, 'node')}"
        return {
            "lead": lead,
            "percent_done": 100 if self._state.finished else 0,
            "tiles": self._tiles() if started else [],
            "drawn": self._panels,
            "lines": "\n".join(self._lines),
            "sections": self._sections(),
        }

    def _tiles(self) -> list[dict[str, str]]:
        reports = self._state.reports
        latest = {name: value for report in reports for name, value in report.values.items()}
        tiles = [tile("Wall time", duration(self.seconds()), "this attempt")]
        if reports:
            epoch = reports[-1].epoch
            tiles.append(tile("Step", f"{reports[-1].step:,}", "" if epoch is None else f"epoch {epoch:g}"))
        names = list(latest)[:MAX_TILES]
        return tiles + [tile(name.replace("_", " "), number(latest[name], ".4g"), "last reported") for name in names]

    def _sections(self) -> list[dict[str, Any]]:
        state = self._state
        restarts = [row("Restarts of all ranks", f"{max(0, state.num_starts - 1)}", "in this attempt")]
        if state.loaded and state.loaded.url:
            restarts.append(row("Resumed at step", f"{state.loaded.step:,}", state.loaded.url))
        saved = [row(f"Step {each.step:,}", each.url) for each in reversed(state.checkpoints)]
        sections = [
            section("Outputs", [row(name, url) for name, url in self.outputs.items()], has_long_values=True),
            section("Restarts", restarts if state.started else [], has_long_values=True),
            section("Checkpoints", saved, f"{state.num_checkpoints:,} written", has_long_values=True),
        ]
        return [each for each in sections if each["rows"]]
