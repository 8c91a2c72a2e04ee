"""The observer that writes a run's events to a file. `flyte_ddp.events.read_history` reads it."""

from __future__ import annotations

import time
from pathlib import Path

from flyte_ddp.events import (
    NOT_IN_HISTORY,
    CheckpointLoaded,
    Event,
    RunState,
    TimeSpent,
    len_of_whole_lines,
    read_history,
    to_line,
)
from flyte_ddp.storage import redact_values


class HistoryFile:
    """Writes events to a file, one JSON object per line.

    Each line is flushed at once, so another process can follow the file. Predictions and histograms
    are left out because they are large: the report and W&B have them. When a resumed run starts,
    the epochs of earlier attempts that the file lacks are added, because those attempts' files may
    have been lost with their pods. The last line says what the run's time went to.

    Args:
        path: of the file. An existing file is continued.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # This state also contains the events that the file has already.
        self._state = RunState.of(read_history(path) if path.exists() else [], keep_reports=False)
        self._file = open(path, "ab")  # noqa: SIM115 - open for as long as the run
        self._file.truncate(len_of_whole_lines(path.read_bytes()))

    def handle(self, event: Event) -> None:
        known = [epoch.step for epoch in self._state.epochs]
        self._state.handle(event)
        if not isinstance(event, NOT_IN_HISTORY):
            self._write(event)
        if isinstance(event, CheckpointLoaded):
            for epoch in event.epochs:
                if epoch.step not in known:
                    self._write(epoch)

    def close(self, error: BaseException | None) -> None:
        """Write the account of the wall time, and close the file. The end of the run is not
        recorded.
        """
        spent = self._state.time_spent(time.time())
        if spent.wall:
            self._write(spent)
        self._file.close()

    def _write(self, event: Event | TimeSpent) -> None:
        self._file.write(to_line(redact_values(event)).encode())
        self._file.flush()
