"""Pictures of a model's predictions: numbers against the true ones, and a confusion matrix."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flyte_ddp.events import Prediction
from flyte_ddp.observers.formats import percent
from flyte_ddp.observers.reports.drawing import (
    FAINT,
    INK,
    PAGE_INK,
    PALETTE,
    Panel,
    printable,
    show_on_hover,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CLASSES, MAX_CLASS_NAME = 20, 12  # classes of a confusion matrix; characters of a name
MAX_OPACITY = 0.75


def prediction_panels(predictions: Sequence[Prediction]) -> list[Panel]:
    """Return the panel of predicted against true numbers, or of a confusion matrix of few classes,
    if there is one.
    """
    pairs = [
        each.numbers
        for each in predictions
        if each.numbers and all(map(math.isfinite, each.numbers))
    ]
    if pairs:
        return [_scatter_panel(pairs)]
    classes = sorted({name for each in predictions for name in (each.truth, each.guess)})
    if not 2 <= len(classes) <= MAX_CLASSES or any(
        each.error is not None or each.text for each in predictions
    ):
        return []
    return [_confusion_panel(classes, [(each.truth, each.guess) for each in predictions])]


def _scatter_panel(pairs: Sequence[Sequence[float]]) -> Panel:
    truths, guesses = zip(*pairs, strict=True)

    def draw(axes: Axes) -> None:
        ends = [min(*truths, *guesses), max(*truths, *guesses)]
        axes.plot(ends, ends, color=INK, alpha=FAINT, linewidth=1, linestyle=(0, (1, 2)))
        axes.plot(truths, guesses, ".", color=PALETTE[0], markersize=4, alpha=0.7)

    error = statistics.fmean(abs(truth - guess) for truth, guess in pairs)
    note = f"{len(pairs)} held-out samples"
    summary = f"Predicted over true numbers of {note}: mean absolute error {error:.4g}"
    return Panel("predictions", "Predicted against true", summary, (), "true", note, draw=draw)


def _confusion_panel(classes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> Panel:
    counts = Counter(pairs)

    def draw(axes: Axes) -> None:
        from matplotlib.patches import Rectangle

        totals = Counter(truth for truth, _ in pairs)
        for (truth, guess), count in counts.items():
            x, y, share = classes.index(guess), classes.index(truth), count / totals[truth]
            text = f"true {truth}, predicted {guess}: {count} of {totals[truth]} ({percent(share)})"
            # never opaque: on a light and on a dark page the page's own ink can be read on it
            look = {"facecolor": PALETTE[0], "alpha": MAX_OPACITY * share, **show_on_hover(text)}
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
            axes.text(x, y, f"{count}", ha="center", va="center", fontsize=8, color=PAGE_INK)
        names = [printable(name)[:MAX_CLASS_NAME] for name in classes]
        axes.set_xticks(
            range(len(classes)), names, fontsize=8, rotation=0 if max(map(len, names)) < 3 else 60
        )
        axes.set_yticks(range(len(classes)), names, fontsize=8)
        axes.set(xlim=(-0.5, len(classes) - 0.5), ylim=(len(classes) - 0.5, -0.5))
        axes.grid(False)

    wrong = Counter(f"{truth} for {guess}" for truth, guess in pairs if truth != guess)
    note = f"{len(pairs)} held-out samples"
    summary = f"Confusion matrix of {note}: {sum(wrong.values())} wrong"
    for worst, count in wrong.most_common(1):
        summary += f"; most often {worst}, {count} times"
    return Panel(
        "confusion", "Confusion (true over predicted)", summary, (), "predicted", note, draw=draw
    )
