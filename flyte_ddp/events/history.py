"""The form of events as plain values, and as the JSON lines of a history."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import typing
from pathlib import Path
from typing import Any

from flyte_ddp.events.kinds import Event, HistogramsTaken, PredictionsMade
from flyte_ddp.events.wall_time import TimeSpent

KINDS: dict[str, Any] = {kind.__name__: kind for kind in typing.get_args(Event)}
NOT_IN_HISTORY = (HistogramsTaken, PredictionsMade)  # too large; the report and W&B have them


def to_dict(event: Event) -> dict[str, Any]:
    """Return `event` as plain values, with its kind under "event"."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def from_dict(values: dict[str, Any]) -> Event:
    """Return the event that `to_dict` made `values` from."""
    values = dict(values)
    kind: Any = KINDS[values.pop("event")]
    for name, part in _find_parts(kind).items():
        found = values[name]
        if isinstance(found, list):
            values[name] = [part(**each) for each in found]
        else:
            values[name] = {key: part(**each) for key, each in found.items()}
    event: Event = kind(**values)
    return event


@functools.cache
def _find_parts(kind: Any) -> dict[str, Any]:
    """Return the fields of `kind` that are lists or dicts of dataclasses, each with that dataclass."""
    parts = {name: typing.get_args(hint)[-1:] for name, hint in typing.get_type_hints(kind).items()}
    return {name: part[0] for name, part in parts.items() if part and dataclasses.is_dataclass(part[0])}


def to_line(record: Event | TimeSpent) -> str:
    """Return `record` as one line of a history: a JSON object in `to_dict`'s form with the current "time".

    Fields of bytes are left out: what a function returned may be large.
    """
    values = {name: value for name, value in dataclasses.asdict(record).items() if not isinstance(value, bytes)}
    # A user's configuration may hold values that JSON does not know. Their repr is enough for a record.
    return json.dumps({"time": time.time(), "event": type(record).__name__, **values}, default=repr) + "\n"


def parse_history(contents: bytes, name: str) -> list[Event]:
    """Return the events in the lines of a history. An incomplete last line, left by a killed writer, is ignored.

    Raises:
        ValueError: any other line is not an event; names the line and `name`.
    """
    events: list[Event] = []
    for number, line in enumerate(contents[: len_of_whole_lines(contents)].splitlines(), start=1):
        try:
            values = json.loads(line)
            del values["time"]
            if values["event"] != TimeSpent.__name__:  # which follows from the others
                events.append(from_dict(values))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name}, line {number}: expected an event of a run: {error!r}") from error
    return events


def read_history(path: str | Path) -> list[Event]:
    """Return the events in a history file, as `parse_history`. Raises FileNotFoundError if there is none."""
    return parse_history(Path(path).read_bytes(), str(path))


def len_of_whole_lines(contents: bytes) -> int:
    """Return the number of bytes that belong to complete lines."""
    return contents.rfind(b"\n") + 1
