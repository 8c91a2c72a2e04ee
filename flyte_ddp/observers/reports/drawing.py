"""The look of all figures: panels, colors, axes, and their output as SVG, PNG or PDF.

A `Panel` is a title with lines, or a function that draws it. `to_svg` makes an element for a page
of any color and width from it, `save_panels` a file from several. Both are transparent. Imports
matplotlib, which takes 1.4 s, when it first draws.
"""

from __future__ import annotations

import io
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from flyte_ddp.events import to_utf8
from flyte_ddp.observers.formats import format_figure, is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each color has a contrast of at least 3:1 on a white and on a near-black page (WCAG 2.1, 1.4.11).
# Neighbors differ in brightness or in the blue-yellow direction, which almost everyone can see.
PALETTE = ("#3b82f6", "#ea580c", "#0d9488", "#a855f7", "#db2777", "#65810d", "#0e8fb8", "#b7791f")

MAX_MARKERS = 30  # markers of a line; a line with more points has no markers
MAX_TITLE = 40  # characters of a title
MAX_LEGEND = 54  # characters of one line of a legend, its lines and gaps included
MAX_STRIPS = 48  # strips of a panel that show values on hover
MAX_TEXT = 200  # characters of any text: more have no room, and take long to lay out

# color of text and axes: a contrast of at least 4.5:1 on white and on black (WCAG 2.1, 1.4.3)
INK = "#767676"
PAGE_INK = "#767677"  # on a color of ours; in a page its own
# inches of a panel with text of 10 points, which is about 10 pixels on a phone
WIDTH, HEIGHT = 4.2, 2.6
FAINT = 0.55  # opacity of minor lines, such as the loss of every step

LOOK = {  # settings of matplotlib: no frame, faint horizontal rules
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    # ships with matplotlib; wider than browsers' fonts, so the text fits
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "figure.figsize": (WIDTH, HEIGHT),
    "savefig.transparent": True,
    # a long line keeps the points that can be distinguished, its extremes among them
    "path.simplify_threshold": 1.0,
    "text.color": INK,
    "text.parse_math": False,  # a name with $ is no formula
    "text.usetex": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.edgecolor": f"{INK}66",
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": INK,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.8,
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    **{f"{axis}tick.{kind}.pad": 5 for axis in "xy" for kind in ("major", "minor")},
    **{f"{axis}tick.color": INK for axis in "xy"},
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 1.1,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.1,
    "legend.borderpad": 0.2,
    "legend.labelcolor": INK,
}

# Beginning and line break of the ids that become texts on hover.
_TITLE, _BREAK = "title:", "\u2028"

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_drawing = threading.Lock()  # matplotlib's settings belong to the whole process

Points = Sequence[tuple[float, float]]  # x, y


@dataclass(frozen=True)
class Line:
    """One line of a panel, through its finite points. A page shows its values on hover, with its
    name or label.
    """

    points: Points
    label: str | None = None  # text in the legend
    color: str = INK
    width: float = 2.0
    opacity: float = 1.0
    name: str | None = ""  # None: nothing on hover
    style: Any = "-"
    max_markers: int = MAX_MARKERS  # points up to which it has markers
    marker_size: float = 3.5
    order: float = 2.0  # the largest is on top

    def draw(self, axes: Axes) -> list[tuple[float, float]]:
        """Draw it if it has points, and return these."""
        drawn = [(x, y) for x, y in self.points if math.isfinite(y)]
        if drawn:
            axes.plot(
                *zip(*drawn, strict=True),
                gid=None if self.name is None else printable(self.name or self.label or ""),
                label=self.label,
                color=self.color,
                linewidth=self.width,
                alpha=self.opacity,
                linestyle=self.style,
                marker="o" if len(self.points) <= self.max_markers else "",
                markersize=self.marker_size,
                zorder=self.order,
            )
        return drawn


@dataclass(frozen=True)
class Panel:
    """One small picture with a title of its own. Its legend, or else its `subtitle`, is below the
    title.
    """

    name: str  # letters and hyphens, unique on a page
    title: str
    summary: str  # a description for people who cannot see it
    lines: Sequence[Line] = ()
    x_label: str = ""
    subtitle: str = ""
    has_whole_x: bool = False  # the ticks of the x axis are whole numbers
    from_zero: bool = False  # where a linear y axis starts
    log_ratio: float = math.inf  # a larger range of values makes the y axis logarithmic
    # format of a linear y axis
    tick: Callable[[float, object], str] = lambda value, _: f"{value:.4g}"
    draw: Callable[[Axes], object] = lambda axes: None  # draws everything else
    figure: str = ""  # name of the figure on the y axis, by which its values are formatted

    def draw_on(self, axes: Axes) -> None:
        """Draw the panel, its title, and its legend or subtitle."""
        from matplotlib.text import Text
        from matplotlib.ticker import MaxNLocator

        values = [y for line in self.lines for _, y in line.draw(axes)]
        log_scale(axes, values, self.log_ratio)
        if is_share(self.figure, max(values, default=0.0)):
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
        elif self.lines and axes.get_yscale() == "linear":
            axes.yaxis.set_major_formatter(self.tick)
        if self.has_whole_x:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.set_xlabel(self.x_label, loc="right", fontsize=9.5, labelpad=1, color=INK)
        self.draw(axes)
        labels = axes.get_legend_handles_labels()[1]
        num_rows = 1 + (sum(len(label) + 5 for label in labels) > MAX_LEGEND)  # rows of the legend
        axes.set_title(self.title[:MAX_TITLE], pad=9 + 15 * num_rows)
        if self.from_zero and axes.get_yscale() == "linear":
            top = axes.dataLim.y1  # minus infinity if nothing is drawn
            axes.set_ylim(0, 1.08 * top if 0 < top < math.inf else 1)
        if len(labels) > 1:
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(-0.01, 1.01),
                ncols=math.ceil(len(labels) / num_rows),
            )
        else:
            axes.annotate(
                self.subtitle,
                (0, 1),
                xycoords="axes fraction",
                xytext=(0, 8),
                textcoords="offset points",
                fontsize=9.5,
                color=INK,
            )
        for text in axes.findobj(Text):  # all but those at ticks
            text.set_text(printable(text.get_text()))


def printable(text: str) -> str:
    """Return `text` in characters that XML and a font's layout take. A line break stays."""
    return "".join(each if each.isprintable() or each == "\n" else " " for each in to_utf8(text))[
        :MAX_TEXT
    ]


def to_svg(panel: Panel) -> str:
    """Draw `panel` as an `<svg>` element for an HTML page.

    It is transparent and takes its container's width. Its ids are unique among panels.
    """
    from matplotlib.figure import Figure

    with _settings(panel.name):
        figure = Figure(layout="constrained")
        axes = figure.add_subplot()
        panel.draw_on(axes)
        _add_values(axes, panel.figure)
        root = _tree(figure)
    summary = "".join(each for each in to_utf8(panel.summary) if each.isprintable())
    root.attrib |= {"class": "panel", "role": "img", "aria-label": summary}
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    svg: str = ElementTree.tostring(root, encoding="unicode")
    return svg.replace("'DejaVu Sans'", "system-ui, sans-serif").replace(PAGE_INK, "currentColor")


def save_panels(panels: Sequence[Panel], path: str | Path) -> None:
    """Draw `panels` side by side into one file: SVG, PNG or PDF, by the suffix of `path`."""
    from matplotlib.figure import Figure

    columns, rows = min(2, len(panels)), math.ceil(len(panels) / 2)
    with _settings(Path(path).stem):
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        for index, panel in enumerate(panels):
            panel.draw_on(figure.add_subplot(rows, columns, index + 1))
        figure.savefig(path, dpi=160)


def show_on_hover(text: str) -> dict[str, Any]:
    """Return what gives a patch a text that a page shows on hover, by SVG's titles."""
    return {"gid": _TITLE + _BREAK.join(map(printable, text.split("\n")))}


def _add_values(axes: Axes, figure: str) -> None:
    """Divide the x axis into strips that show on hover the last point there of each `Line`, its
    value as of `figure`.
    """
    import numpy as np

    lines = [line for line in axes.lines if line.get_gid() is not None]
    if not lines:
        return
    points: list[Any] = [line.get_xydata() for line in lines]
    every = np.unique(np.concatenate([each[:, 0] for each in points]))
    groups = np.array_split(every, min(len(every), MAX_STRIPS))
    low, high = axes.get_xlim()
    edges = [low, *((one[-1] + other[0]) / 2 for one, other in pairwise(groups)), high]
    for group, begin, end in zip(groups, edges, edges[1:], strict=False):
        texts = []
        for line, known in zip(lines, points, strict=True):
            x, y = known[max(0, np.searchsorted(known[:, 0], group[-1], "right") - 1)]
            if group[0] <= x <= group[-1]:
                value = ": ".join(filter(None, [line.get_gid(), format_figure(figure, y)]))
                is_curve = line.get_linestyle() != "None"
                where = f" at {axes.get_xlabel()} {format_figure('', x)}" if is_curve else ""
                texts.append(value + where)
        axes.axvspan(begin, end, alpha=0, **show_on_hover("\n".join(texts)))
    axes.set_xlim(low, high)


def log_scale(
    axes: Axes, values: Sequence[float], ratio: float, axis: Literal["x", "y"] = "y"
) -> None:
    """Use a logarithmic axis with plain numbers if `values` are positive and their range exceeds
    `ratio`.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    if not values or min(values) <= 0 or max(values) / min(values) < ratio:
        return
    axes.set(**{f"{axis}scale": "log"})
    scale = axes.xaxis if axis == "x" else axes.yaxis
    span = max(values) / min(values)
    scale.set_major_locator(
        LogLocator(subs=(1, 2, 5) if span < 40 else (1, 3) if span < 1000 else (1,))
    )
    scale.set_major_formatter(lambda value, _: f"{value:g}")
    scale.set_minor_formatter(NullFormatter())


@contextmanager
def _settings(salt: str) -> Iterator[None]:
    """Give matplotlib our settings inside the block, ids made from `salt`."""
    import matplotlib

    with _drawing, matplotlib.rc_context({**LOOK, "svg.hashsalt": salt}), warnings.catch_warnings():
        # The font lacks some characters, and the reader's font has them.
        warnings.simplefilter("ignore")
        yield


def _tree(figure: Any) -> ElementTree.Element:
    """Return `figure` as an SVG tree without what a page does not need: size, metadata, ids. Those
    of `show_on_hover` become titles.
    """
    file = io.BytesIO()
    figure.savefig(
        file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    root = ElementTree.fromstring(file.getvalue())
    # matplotlib's only style rule, its first definition, would apply to every element of the page.
    # Apply it to this picture alone.
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "style": "stroke-linejoin: round; stroke-linecap: butt",
    }
    root.remove(root[0])
    for each in root.iter():
        text = ""
        if each.tag == f"{{{_SVG}}}g":
            text = each.attrib.pop("id", "")
        if text.startswith(_TITLE):
            each.set("class", "value")
            each[0].attrib.pop("clip-path", None)
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = text.removeprefix(_TITLE).replace(_BREAK, "\n")
            each.insert(0, title)
        for name in {"d", "x", "y", "transform"}.intersection(each.attrib):
            # a hundredth of a point is finer than any screen
            rounded = re.sub(
                r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", each.attrib[name]
            )
            each.set(name, rounded)
    return root
