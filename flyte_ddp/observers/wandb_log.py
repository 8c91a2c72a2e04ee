"""Read the log in which W&B's own process records a run: LevelDB's log format, of protocol buffers."""

from __future__ import annotations

import struct
from pathlib import Path

FILE_HEADER = 7  # bytes, of W&B
BLOCK = 32768  # bytes; no header crosses from one to the next
HEADER = struct.Struct("<IHB")  # of a part: its checksum, its size, and which part of a record it is
WHOLE, LAST = 1, 4


def read_records(log: Path) -> list[bytes]:
    """Return the records of the log, each a `wandb_internal_pb2.Record`, without one that is not complete yet."""
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


def is_complete(log: Path) -> bool:
    """Return whether the log has the end of its run, which W&B's process writes some time after `finish`."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = read_records(log)
    return bool(records) and Record.FromString(records[-1]).WhichOneof("record_type") == "exit"
