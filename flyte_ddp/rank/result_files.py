"""Files that a rank sends to where the run was started. Imports no torch."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from flyte_ddp.config.waits import POLL_INTERVAL
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.protocol.messages import Submitted
from flyte_ddp.rank.reporter import Reporter

# bytes of a file that a rank submits, and of all that are not taken yet, as which each costs more
MAX_RESULT, MAX_SUBMITTED, FILE_COST = 64 << 20, 65 << 20, 1 << 20


@dataclass(eq=False, repr=False)
class ResultFiles:
    """The files of `session.submit_result`. The agent takes them in their order."""

    reporter: Reporter
    # files that may still be on this node, and what they cost
    _submitted: deque[tuple[Path, int]] = field(default_factory=deque)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def submit(self, path: str, data: str | bytes) -> None:
        """See `session.submit_result`."""
        parts = PurePosixPath(path).parts if isinstance(path, str) and path.isprintable() else ()
        if not parts or parts[0][0] == "/" or ".." in parts:
            raise ConfigError(
                "session.submit_result: path: expected that of a file below a directory, such as "
                f"rank-1/losses.json, got {path!r}"
            )
        contents = data.encode() if isinstance(data, str) else data
        if not isinstance(contents, bytes) or len(contents) > MAX_RESULT:
            size = f" of {len(contents):,} bytes" if isinstance(contents, bytes) else ""
            raise ConfigError(
                f"session.submit_result: data: expected str or bytes, at most {MAX_RESULT >> 20} "
                f"MiB, got {type(data).__name__}{size}"
            )
        process = self.reporter.process
        node = process.node
        if not node.results:
            self.reporter.warn_once(
                "session.submit_result: nothing is kept, because the run has no results"
            )
            return
        while self._count_bytes() + len(contents) + FILE_COST > MAX_SUBMITTED:
            time.sleep(POLL_INTERVAL)
        name = f"{node.num_restarts}-{process.rank}-{next(self._numbers)}"
        file = Path(node.results, name)
        os.makedirs(node.results, exist_ok=True)
        file.write_bytes(contents)
        self._submitted.append((file, len(contents) + FILE_COST))
        process.link.send(Submitted(name, "/".join(parts)))

    def _count_bytes(self) -> int:
        """Return the bytes of this rank's files that are not taken yet."""
        while self._submitted and not self._submitted[0][0].exists():
            self._submitted.popleft()
        return sum(size for _, size in self._submitted)
