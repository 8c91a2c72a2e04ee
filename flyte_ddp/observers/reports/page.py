"""The base of all reports: status, error, tiles, and the HTML document around what each report shows.

A report is one HTML document without references to anything outside it. Every text is escaped by Jinja.
`flyte_ddp.flytekit_plugin.deck` shows a report in Flyte's console while the task still runs.
"""

from __future__ import annotations

import datetime
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import DictLoader, Environment, Template
from markupsafe import Markup

from flyte_ddp.config.extras import how_to_install, is_installed
from flyte_ddp.errors import TrainingStopped
from flyte_ddp.observers.reports import drawing
from flyte_ddp.observers.reports.template import BASE, MACROS, PAGE, STYLE
from flyte_ddp.storage import redact_url

MAX_ERROR = 60_000  # characters
NOTHING = "-"  # in place of a value that is not known


class Page(ABC):
    """A report that can be rendered at any time."""

    template = ""  # what the report adds to the base template, in Jinja
    style = ""  # its own CSS rules
    progress_label = ""  # what the progress bar counts

    def __init__(self, links: Mapping[str, str] | None = None) -> None:
        self.links = dict(links or {})  # URLs of other pages by name; may be added at any time, as notes
        self.tracker: Any = None  # the run's W&B or MLflow, whose URL is a link as soon as its server has answered
        self.notes: list[str] = []  # lines below the title
        self.error: BaseException | None = None
        self.opened_at = time.time()
        self.closed_at = 0.0  # 0 while it is open

    def close(self, error: BaseException | None) -> None:
        """Record the end of the task. The first error that it is closed with is shown."""
        self.closed_at = self.closed_at or time.time()
        self.error = self.error or error

    @property
    def status(self) -> str:
        """One of running, finished, failed and interrupted."""
        if isinstance(self.error, (TrainingStopped, KeyboardInterrupt, SystemExit)):
            return "interrupted"
        if self.error is not None:
            return "failed"
        return "finished" if self.closed_at else "running"

    @property
    @abstractmethod
    def title(self) -> str: ...

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Return the values of the template: lead, percent_done, tiles, and those of the report's own part."""

    def render(self) -> str:
        """Return the report as a complete HTML document."""
        return _template(PAGE).render(title=self.title, fragment=Markup(self.render_fragment()))

    def render_fragment(self) -> str:
        """Return the report as a piece of HTML with its own style, for another page."""
        text = '{% extends "base" %}{% from "macros" import pairs, numbers, panels, facts %}' + self.template
        tracked = {self.tracker.label: self.tracker.url} if self.tracker and self.tracker.url else {}
        links = [
            {"name": name, "url": url, "is_safe": url.startswith(("https://", "http://"))}
            for name, url in {**self.links, **tracked}.items()
        ]
        ended = datetime.datetime.fromtimestamp(self.closed_at or time.time(), datetime.timezone.utc)
        return _template(text).render(
            style=Markup(STYLE + self.style),
            title=self.title,
            status=self.status,
            progress_label=self.progress_label,
            links=links,
            notes=self.notes,
            error=self.error and {"title": type(self.error).__name__, "text": shorten(str(self.error), MAX_ERROR)},
            footer=f"{'Ended' if self.closed_at else 'As of'} {ended:%Y-%m-%d %H:%M:%S} UTC",
            **self.content(),
        )

    def seconds(self) -> float:
        """Return the wall-clock seconds from the report's start to its end, or to now."""
        return (self.closed_at or time.time()) - self.opened_at


@functools.cache
def _template(text: str) -> Template:
    loader = DictLoader({"base": BASE, "macros": MACROS})
    return Environment(autoescape=True, loader=loader, finalize=_redact).from_string(text)


def _redact(value: Any) -> Any:
    """Remove passwords and signatures from the URLs in every text of a report. Our own HTML is `Markup`."""
    return redact_url(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def draw(panels: Sequence[drawing.Panel]) -> list[Markup]:
    """Return the panels as SVG elements, or a line in their place if nothing is installed that draws them."""
    if panels and not is_installed("matplotlib"):
        return [Markup("<p>{}</p>").format(f"plots: {how_to_install('matplotlib')}")]
    return [Markup(drawing.to_svg(panel)) for panel in panels]


def tile(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def row(name: str, value: str, note: str = "", marked: bool = False) -> dict[str, Any]:
    return {"name": name, "value": value, "note": note, "marked": marked}


def section(title: str, rows: list[dict[str, Any]], note: str = "", has_long_values: bool = False) -> dict[str, Any]:
    return {"title": title, "note": note, "rows": rows, "has_long_values": has_long_values}


def duration(seconds: float) -> str:
    """Format seconds with the two largest units that matter."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def shorten(text: str, max_length: int = 200) -> str:
    """Cut the middle out of a `text` that is too long. The end of a traceback matters as much as its start."""
    if len(text) <= max_length:
        return text
    return f"{text[: max_length // 2]} […] {text[-max_length // 2 :]}"
