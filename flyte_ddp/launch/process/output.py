"""Where the output of a rank goes, in torchrun's terms, and how its supervisor reads it while it grows.

Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flyte_ddp.launch.process.ranks import NodeRanks

PREFIX = "[rank ${rank}] "
STREAMS = {1: "stdout", 2: "stderr"}  # by file descriptor, which is torchrun's bit for the stream as well
REDRAW_INTERVAL = 10.0  # seconds between two lines for a progress bar that a rank draws


@dataclass(frozen=True)
class RankStream:
    """Standard output or standard error of one rank."""

    path: str  # of the file that it is written to; both streams may have the same
    is_shown: bool  # its lines are the run's output too
    filters: tuple[str, ...] = ()  # lines that contain one of these are also written to `filtered`
    filtered: str = ""


@dataclass(frozen=True)
class Output:
    """Where the lines of a run's ranks go."""

    # Of each line on the console, with torchrun's macros ${local_rank}, ${rank} and ${hostname}; "" for none.
    prefix: str = PREFIX
    directory: str = ""  # of the files, made on every machine; "" for none
    # The streams that go to files alone: 0 for none, 1 for standard output, 2 for standard error, 3 for both, or local
    # ranks with one of these each, such as 0:1,1:3.
    redirects: str = "0"
    tee: str = "0"  # the streams that go to files and to the console, likewise
    ranks: str = ""  # the local ranks that the console shows, such as 0,2; "" for all
    # Lines of a stream that is tee'd are also written to one file for all ranks of a machine if they have one of these.
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()

    def streams(self, logs: str, node: NodeRanks, local_rank: int) -> dict[int, RankStream]:
        """Return the streams of a rank by their file descriptors. `logs` is a directory for the length of the run."""
        tee = _parse_streams(self.tee, local_rank)
        redirects = _parse_streams(self.redirects, local_rank) | tee
        is_shown = not self.ranks or str(local_rank) in self.ranks.split(",")
        found = {}
        for bit, name in STREAMS.items():
            if redirects & bit:
                filtered = str(self._attempt(node) / f"filtered_{name}.log")
                filters = (self.stdout_filters, self.stderr_filters)[bit - 1] if tee & bit else ()
                path = str(self._attempt(node) / str(local_rank) / f"{name}.log")
                found[bit] = RankStream(path, is_shown and bool(tee & bit), filters, filtered)
            else:
                found[bit] = RankStream(os.path.join(logs, f"rank-{node.first_rank + local_rank}.log"), is_shown)
        return found

    def error_file(self, logs: str, node: NodeRanks, local_rank: int) -> str:
        """Return the file that `torch.distributed.elastic`'s @record writes an exception to."""
        if self.directory:
            return str(self._attempt(node) / str(local_rank) / "error.json")
        return os.path.join(logs, f"rank-{node.first_rank + local_rank}-error.json")

    def prefix_of(self, node: NodeRanks, local_rank: int) -> str:
        """Return the prefix of a rank's lines."""
        values = {"rank": str(node.first_rank + local_rank), "local_rank": str(local_rank)}
        if "hostname" in self.prefix:
            values["hostname"] = socket.gethostname()
        return Template(self.prefix).safe_substitute(values)

    def _attempt(self, node: NodeRanks) -> Path:
        return Path(self.directory, f"{node.run_id}_{node.node_rank}", f"attempt_{node.num_restarts}")


def _parse_streams(text: str, local_rank: int) -> int:
    """Return the bits of the streams that `text` names for a rank; see `Output.redirects`."""
    if ":" not in text:
        return int(text)
    return int(dict(pair.split(":") for pair in text.split(",")).get(str(local_rank), 0))


def read_error(path: str) -> str:
    """Return the message that @record wrote to the file of a rank; "" if there is none."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def rank_stacks(directory: str, rank: int) -> str:
    """Return the path of the file where `rank` writes its Python stacks when it is asked to, or on SIGUSR1."""
    return os.path.join(directory, f"rank-{rank}.stacks")


class LogTail:
    """The lines that are appended to a growing file.

    A line that a progress bar draws again and again, with carriage returns, is shown as last drawn, and from time to
    time while it is incomplete.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.position = 0
        self.rest = b""
        self._next_redrawn = 0.0  # monotonic

    def new_lines(self, at_end: bool = False) -> list[str]:
        """Return the new complete lines; `at_end`, also what no line break follows."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                contents = file.read()
        except FileNotFoundError:
            return []
        self.position += len(contents)
        contents = self.rest + contents
        *lines, rest = contents.split(b"\n")
        is_redrawn, self.rest = b"\r" in rest, rest if rest.endswith(b"\r") else _as_drawn(rest)
        if at_end and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        elif is_redrawn and time.monotonic() >= self._next_redrawn:
            self._next_redrawn = time.monotonic() + REDRAW_INTERVAL
            lines.append(self.rest)
        if b"\r" in contents:
            lines = [_as_drawn(line) for line in lines]
        return b"\n".join(lines).decode(errors="replace").split("\n") if lines else []  # at once: ranks may print much

    def last_lines(self, count: int) -> str:
        try:
            return "\n".join(self.path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
        except FileNotFoundError:
            return ""


def _as_drawn(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
