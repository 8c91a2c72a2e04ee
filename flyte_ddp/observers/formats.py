"""Numbers as texts for people."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_LABEL = 60  # characters of a value in the name of a trial


def format_figure(name: str, value: float) -> str:
    """Format a figure by its name: an accuracy in percent, others with four digits; NaN as "-"."""
    if math.isnan(value):
        return "-"
    if is_share(name, value):
        return percent(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def is_share(name: str, value: float) -> bool:
    """Return whether a figure is shown in percent: an accuracy, unless it is in percent already."""
    return name == "accuracy" and value <= 1


def title_of(name: str) -> str:
    """Return a figure's name as a heading, such as "Test loss"; "lr" and "mAP" stay as they are."""
    words = name.replace("_", " ")
    is_word = len(words) > 2 and words.partition(" ")[0].islower()
    return words[:1].upper() + words[1:] if is_word else words


def percent(share: float) -> str:
    """Format a share in [0, 1], with enough decimals to distinguish 99.95 % from 100 %."""
    return f"{100 * share:.2f} %"


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun, such as "1 thread" and "2 threads"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_rounded(value: float, position: object = None) -> str:
    """Format a number: whole, but for small ones. A formatter of matplotlib's axes, too."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def format_value(value: Any) -> str:
    """Format `value` as a user would write it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def shown_value(value: Any) -> str:
    """Format `value` as `format_value`, in one line that is short enough for a name."""
    text = " ".join(format_value(value)[: 10 * MAX_LABEL].split())
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


def duration(seconds: float) -> str:
    """Format seconds with the two largest units that matter."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
