"""Read what W&B recorded in the files of an offline run."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def records(directory: Path) -> list[Any]:
    """Return the records of W&B's one transaction log below `directory`: LevelDB's log format, of protocol buffers."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # W&B's own process writes the last of it after `finish`
    (path,) = directory.rglob("*.wandb")
    contents = path.read_bytes()
    found, record, at = [], b"", 7
    while at + 7 <= len(contents):
        if 32768 - at % 32768 < 7:  # the rest of a block that is too small for a header
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", contents, at)
        record += contents[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(record))
            record = b""
    return found


def values_of(items: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in items:
        *parents, key = item.nested_key or [item.key]
        inner = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[key] = json.loads(item.value_json)
    return values


def records_of(directory: Path, kind: str) -> list[Any]:
    """The parts of the record that are of this kind."""
    return [getattr(record, kind) for record in records(directory) if record.WhichOneof("record_type") == kind]


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """The rows logged, without W&B's own columns."""
    rows = [values_of(history.item) for history in records_of(directory, "history")]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def config_of(directory: Path) -> dict[str, Any]:
    return values_of([item for config in records_of(directory, "config") for item in config.update])


def summary_of(directory: Path) -> dict[str, Any]:
    return values_of([item for summary in records_of(directory, "summary") for item in summary.update])
