"""The base of all reports: status, error, tiles, and the HTML document around what each report
shows.

A report is one HTML document without references to anything outside it. Every text is escaped by
Jinja. `flyte_ddp.flyte.deck` shows a report in Flyte's console while the task still runs.
"""

from __future__ import annotations

import datetime
import functools
import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jinja2 import Environment, Template
from markupsafe import Markup

from flyte_ddp.config.extras import how_to_install, is_installed
from flyte_ddp.errors import TrainingStopped, in_one_line, log_failures
from flyte_ddp.events import to_utf8
from flyte_ddp.observers.reports import drawing
from flyte_ddp.observers.reports.template import FRAGMENT, PAGE, STYLE
from flyte_ddp.storage import redact_url

MAX_ERROR = 60_000  # characters
NOTHING = "-"  # text in place of a value that is not known

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Page(ABC):
    """A report that can be rendered at any time."""

    progress_label: ClassVar[str] = ""  # unit of the progress bar

    _: KW_ONLY
    # URLs of other pages by name; may be added at any time
    links: dict[str, str] = field(default_factory=dict)
    # the run's W&B or MLflow; its URL becomes a link when its server has answered
    tracker: Any = None
    error: BaseException | None = None
    opened_at: float = field(default_factory=time.time)
    closed_at: float = 0.0  # 0 while it is open
    file: Path | None = None  # to which it is written when it is closed
    _failures: set[str] = field(default_factory=set)  # lines that were logged

    def close(self, error: BaseException | None) -> None:
        """Record the end of the task. The first error that it is closed with is shown."""
        self.closed_at = self.closed_at or time.time()
        self.error = self.error or error
        if self.file:
            self.write(self.file)

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
        """Return the values of the template: lead, percent_done, tiles, and the other parts that
        the report has.
        """

    def write(self, path: Path) -> None:
        """Write the report as a complete HTML document. An error is logged, and leaves what there
        is of the file.
        """
        with log_failures("report"):
            path.touch()  # also on a full disk, so that there is a file to return
            path.write_text(self.render(), encoding="utf-8", errors="backslashreplace")

    def render(self) -> str:
        """Return the report as a complete HTML document."""
        return _compile(PAGE).render(title=self.title, fragment=Markup(self.render_fragment()))

    def render_fragment(self) -> str:
        """Return the report as a piece of HTML with its own style, for another page.

        Where a part of it cannot be made, the reason is logged, and is the report's only text: see
        `log_failures`.
        """
        try:
            return self._render(self.content())
        except Exception as error:
            return self._render({"lead": self._note(error)})

    def draw(self, panels: Iterable[drawing.Panel]) -> list[Markup]:
        """Return panels as SVG elements, with a line in place of a panel that cannot be drawn."""
        drawn: dict[Markup, None] = {}
        for panel in panels:
            if not is_installed("matplotlib"):
                return [Markup("<p>{}</p>").format(f"plots: {how_to_install('matplotlib')}")]
            try:
                drawn[Markup(drawing.to_svg(panel))] = None
            except Exception as error:
                drawn[Markup("<p>{}</p>").format(self._note(error))] = None
        return list(drawn)

    def _note(self, error: Exception) -> str:
        """Return why something cannot be shown, and log it once: a report is made often."""
        line = f"cannot be shown: {to_utf8(in_one_line(error))}"
        if line not in self._failures:
            self._failures.add(line)
            logger.warning("a part of the report %s", line)
        return line

    def _render(self, content: Mapping[str, Any]) -> str:
        tracked = {self.tracker.label: self.tracker.url} if self.tracker else {}
        links = [
            {"name": name, "url": url, "is_safe": url.startswith(("https://", "http://"))}
            for name, url in {**self.links, **tracked}.items()
            if url
        ]
        ended = datetime.datetime.fromtimestamp(
            self.closed_at or time.time(), datetime.timezone.utc
        )
        return _compile(FRAGMENT).render(
            style=Markup(STYLE),
            title=self.title,
            status=self.status,
            progress_label=self.progress_label,
            links=links,
            error=self.error
            and {"title": type(self.error).__name__, "text": shorten(str(self.error), MAX_ERROR)},
            footer=f"{'Ended' if self.closed_at else 'As of'} {ended:%Y-%m-%d %H:%M:%S} UTC",
            **content,
        )

    def seconds(self) -> float:
        """Return the wall-clock seconds from the report's start to its end, or to now."""
        return (self.closed_at or time.time()) - self.opened_at


@functools.cache
def _compile(text: str) -> Template:
    environment = Environment(autoescape=True, finalize=_redact)
    environment.filters |= {"fill_rows": _fill_rows, "keep_units": _keep_units}
    return environment.from_string(text)


def _fill_rows(tiles: Sequence[Tile], most: int) -> int:
    """Return the number of columns, at most `most`, that leaves no tile alone in its row."""
    num_rows = math.ceil(len(tiles) / most)
    return math.ceil(len(tiles) / num_rows)


def _keep_units(note: str) -> str:
    """Join each number with the word after it, so that no line ends between "12" and "%"."""
    return re.sub(r"(?<=\d) (?=\S)", "\N{NO-BREAK SPACE}", note)


def _redact(value: Any) -> Any:
    """Remove passwords and signatures from the URLs in every text of a report. Our own HTML is
    `Markup`.
    """
    return (
        to_utf8(redact_url(value))
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


class Tile(NamedTuple):
    """A figure at the top of a report."""

    name: str
    value: str
    note: str


class Row(NamedTuple):
    """A named value of a section."""

    name: str
    value: object
    note: str = ""
    marked: bool = False


class Section(NamedTuple):
    """Rows under a title."""

    title: str
    rows: list[Row]
    note: str = ""
    has_long_values: bool = False


class Card(NamedTuple):
    """A part of plain text."""

    title: str
    note: str
    text: str
    more: Sequence[tuple[str, str]] = ()  # texts by their names, which a click opens


class Table(NamedTuple):
    """A table that a click on a head sorts."""

    title: str
    note: str
    # True for a marked one, and its cells by their columns' heads
    rows: Sequence[tuple[bool, Mapping[str, dict[str, Any]]]]


def cell(value: Any, form: Callable[[Any], str] = str, kind: str = "") -> dict[str, Any]:
    """Return the cell of a table: its text, what it is sorted by, and its class."""
    is_number = value is not None and not (isinstance(value, float) and not math.isfinite(value))
    text = form(value) if is_number else "" if value is None else str(value)
    return {"text": text, "key": value if is_number else "", "class": kind}


def shorten(text: str, max_length: int = 200) -> str:
    """Cut the middle out of a `text` that is too long. The end of a traceback matters as much as
    its start.
    """
    if len(text) <= max_length:
        return text
    return f"{text[: max_length // 2]} […] {text[-max_length // 2 :]}"
