"""The form of events as plain values, and as the JSON lines of a history.

JSON has no NaN and no infinities: they are written as null, and null is read back as NaN where a
number belongs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.events.kinds import Event, HistogramsTaken, PictureShown, PredictionsMade, to_utf8
from flyte_ddp.events.wall_time import TimeSpent

MAX_SHOWN = 60  # bytes of a line in an error
KINDS: dict[str, Any] = {kind.__name__: kind for kind in typing.get_args(Event)}
# too large; the report and W&B have them
NOT_IN_HISTORY = (HistogramsTaken, PredictionsMade, PictureShown)


def restore_value(value: Any, hint: Any) -> Any:
    """Return a plain value as what its type hint says: an object of a dataclass, or NaN for a
    number that is null.
    """
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        return kind(
            **{name: restore_value(each, _find_hints(kind)[name]) for name, each in value.items()}
        )
    *_, part = Any, *typing.get_args(hint)
    match value:
        case None if hint is float:
            return math.nan
        case list():
            return [restore_value(each, part) for each in value]
        case dict():
            return {name: restore_value(each, part) for name, each in value.items()}
    return value


_find_hints = functools.cache(typing.get_type_hints)


def plain(value: Any) -> Any:
    """Return `value` without what strict JSON and UTF-8 do not have: NaN, infinities, and halves of
    surrogate pairs.

    The latter stand for bytes of file names that are no UTF-8. A field "url" keeps them, because
    the place is read.
    """
    match value:
        case str():
            return to_utf8(value)
        case Mapping():
            return {
                to_utf8(str(key)): each if str(key).endswith("url") else plain(each)
                for key, each in value.items()
            }
        case list() | tuple():
            return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_line(record: Event | TimeSpent) -> str:
    """Return `record` as one line of a history: a JSON object of its fields, with its kind as
    "event" and the current "time".

    Fields of bytes are left out: what a function returned may be large.
    """
    values = {
        name: value
        for name, value in dataclasses.asdict(record).items()
        if not isinstance(value, bytes)
    }
    # A user's configuration may hold values that JSON does not know. Their repr is enough for a
    # record.
    line = plain({"time": time.time(), "event": type(record).__name__, **values})
    return json.dumps(line, default=repr, allow_nan=False) + "\n"


def parse_history(contents: bytes, name: str) -> list[Event]:
    """Return the events in the lines of a history. An incomplete last line, left by a killed
    writer, is ignored.

    Raises:
        ValueError: any other line is not an event; names the line and `name`.
    """
    events: list[Event] = []
    for number, line in enumerate(contents[: len_of_whole_lines(contents)].splitlines(), start=1):
        try:
            values = json.loads(line)
            del values["time"]
            kind = values.pop("event")
            if kind != TimeSpent.__name__:  # the account follows from the other lines
                events.append(restore_value(values, KINDS[kind]))
        except (ValueError, KeyError, TypeError) as error:
            text = line[:MAX_SHOWN].decode(errors="replace")
            raise ValueError(
                f"{name}, line {number}: expected an event of a run, got {text!r}"
            ) from error
    return events


def read_history(path: str | Path) -> list[Event]:
    """Return the events in a history file, as `parse_history`."""
    return parse_history(Path(path).read_bytes(), str(path))


def len_of_whole_lines(contents: bytes) -> int:
    """Return the number of bytes that belong to complete lines."""
    return contents.rfind(b"\n") + 1
