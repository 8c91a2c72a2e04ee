"""Read what W&B recorded in the files of an offline run."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

FILE_HEADER = 7  # bytes, of W&B
BLOCK = 32768  # bytes; no header crosses from one to the next
# the header of a part: checksum, size, and position in its record
HEADER = struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def read_records(log: Path) -> list[bytes]:
    """Return the records of the log, each a `wandb_internal_pb2.Record`, without one that is not
    complete yet.
    """
    contents = log.read_bytes()
    found, record, at = [], b"", FILE_HEADER
    while at + HEADER.size <= len(contents):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, size, part = HEADER.unpack_from(contents, at)
        at += HEADER.size
        if at + size > len(contents):
            break
        record += contents[at : at + size]
        at += size
        if part in (WHOLE, LAST):
            found.append(record)
            record = b""
    return found


def records(directory: Path) -> list[Any]:
    """Return the records of W&B's one log below `directory`."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # W&B's own process writes the last of it after `finish`
    (path,) = directory.rglob("*.wandb")
    return [Record.FromString(record) for record in read_records(path)]


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
    return [
        getattr(record, kind)
        for record in records(directory)
        if record.WhichOneof("record_type") == kind
    ]


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """The rows logged, without W&B's own columns."""
    rows = []
    for history in records_of(directory, "history"):
        row = values_of(history.item)
        rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def config_of(directory: Path) -> dict[str, Any]:
    return values_of([item for config in records_of(directory, "config") for item in config.update])


def summary_of(directory: Path) -> dict[str, Any]:
    return values_of(
        [item for summary in records_of(directory, "summary") for item in summary.update]
    )
