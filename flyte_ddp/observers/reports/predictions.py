"""Pictures of a model's predictions: numbers against the true ones, and a confusion matrix."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flyte_ddp.events import Prediction
from flyte_ddp.observers.reports.drawing import FAINT, INK, PALETTE, Panel, label_x, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CLASSES, MAX_CLASS_NAME = 20, 12  # of a confusion matrix; characters of each


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
        label_x(axes, "true")

    error = statistics.fmean(abs(truth - guess) for truth, guess in pairs)
    note = f"{len(pairs)} held-out samples"
    summary = f"Predicted over true numbers of {note}: mean absolute error {error:.4g}"
    return Panel("predictions", "Predicted against true", summary, draw, note)


def _confusion_panel(classes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> Panel:
    counts = Counter(pairs)

    def draw(axes: Axes) -> None:
        rows = [[counts[truth, guess] for guess in classes] for truth in classes]
        shares = [[count / max(1, sum(row)) for count in row] for row in rows]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for y, row in enumerate(rows):
            for x, count in enumerate(row):
                color = "white" if shares[y][x] > 0.6 else "#222222"
                axes.text(x, y, f"{count or ''}", ha="center", va="center", fontsize=8, color=color)
        names = [printable(name)[:MAX_CLASS_NAME] for name in classes]
        axes.set_xticks(
            range(len(classes)), names, fontsize=8, rotation=0 if max(map(len, names)) < 3 else 60
        )
        axes.set_yticks(range(len(classes)), names, fontsize=8)
        axes.grid(False)
        label_x(axes, "predicted")

    wrong = Counter(f"{truth} for {guess}" for truth, guess in pairs if truth != guess)
    note = f"{len(pairs)} held-out samples"
    summary = f"Confusion matrix of {note}: {sum(wrong.values())} wrong"
    for worst, count in wrong.most_common(1):
        summary += f"; most often {worst}, {count} times"
    return Panel("confusion", "Confusion (true over predicted)", summary, draw, note)
