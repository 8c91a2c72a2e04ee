"""The messages between the driver and a node's supervisor, by msgpack: neither executes what the
other one sends.

Knows nothing of Dask, which only carries it. A supervisor gets the job of an attempt as a line of a
pipe, then one command per line. It answers with one message per line, and an empty line after an
attempt's last.
"""

from __future__ import annotations

import base64
import dataclasses
import operator
from dataclasses import dataclass, field
from typing import Any

import msgpack  # type: ignore[import-untyped]

from flyte_ddp.launch.process.programs import Job, Program
from flyte_ddp.launch.process.ranks import NodeRanks

BEAT_INTERVAL = 1.0  # seconds between two heartbeats, in either direction
# the worker's command: start the server of ranks, before the first attempt; its modules follow
PREPARE = "prepare"
PREPARED = "prepared"  # the line that answers it, when the server has imported them
JOB = "job "  # begins the line with the job of an attempt
END_OF_ATTEMPT = ""  # the line after the last message of an attempt


@dataclass(frozen=True)
class NodeJob:
    """Everything that the supervisor of a node needs to start its ranks."""

    job: Job
    ranks: NodeRanks  # the supervisor chooses its interface
    # seconds without a command from the driver after which the ranks are killed
    driver_timeout: float
    environment: dict[str, str]  # of the supervisor and its ranks, in addition to the worker's own
    # the driver's storage environment, with keys: for no log
    storage: dict[str, str] = field(repr=False)
    data: str  # directory of the prepared data if this machine has it
    data_archive: str  # else the URL of a zip of it; "" for a program that needs no data
    data_name: str  # of the unpacked copy, which later attempts find again
    prints_lines: bool  # print the ranks' output into the worker's own log as well
    # seconds for which the next attempt may wait for nodes, while this one keeps its memory
    start_timeout: float = 0.0

    def to_line(self) -> str:
        return f"{JOB}{encode(dataclasses.asdict(self))}"

    @classmethod
    def from_line(cls, text: str) -> NodeJob:
        values = decode(text.removeprefix(JOB), use_list=False)
        job = values.pop("job")
        job["program"] = Program.from_dict(job["program"])
        return cls(job=Job(**job), ranks=NodeRanks(**values.pop("ranks")), **values)


class Inbox:
    """Sorts the messages of a node and yields each of them once, however often and in whatever
    order they arrive.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._early: dict[int, dict[str, Any]] = {}

    def put(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages whose turn has come with `message`."""
        if message["number"] >= self.num_taken:
            self._early[message["number"]] = message
        ready = []
        while self.num_taken in self._early:
            ready.append(self._early.pop(self.num_taken))
            self.num_taken += 1
        return ready


def encode(values: dict[str, Any]) -> str:
    """Return `values`, plain ones and bytes, as one line of text."""
    packed = msgpack.packb(
        values, default=operator.methodcaller("item"), unicode_errors="surrogatepass"
    )
    return base64.b64encode(packed).decode()


def decode(text: str | bytes, use_list: bool = True) -> dict[str, Any]:
    """Return what `encode` made `text` of. Tuples are lists then, or lists tuples, and NumPy's
    numbers Python's.
    """
    packed = base64.b64decode(text)
    values: dict[str, Any] = msgpack.unpackb(
        packed, use_list=use_list, strict_map_key=False, unicode_errors="surrogatepass"
    )
    return values
