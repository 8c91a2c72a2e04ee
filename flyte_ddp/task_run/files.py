"""The files of a task: their places on the machine, and the places of the task's outputs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.errors import log_failures
from flyte_ddp.events import RunFinished
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import CARD_JSON, card_files
from flyte_ddp.storage import fetch_file, file_below, write_file

HISTORY = "history.jsonl"
EXPORT = "export"  # name of an output, a directory


@dataclass(frozen=True)
class TaskFiles:
    """The files of one task."""

    directory: Path  # directory in the pod for the task's own files
    outputs: str = ""  # URL of the task's outputs; "" for outputs that stay on this machine
    output_directory: Path | None = None  # directory of a local run's outputs; None: `directory`

    @property
    def for_outputs(self) -> Path:
        """The directory on this machine for outputs."""
        return self.output_directory or self.directory

    def url(self, name: str) -> str | None:
        """Return the URL that an output will have; None if it stays on this machine."""
        if not self.outputs:
            return None
        return f"{self.outputs}/{name}"

    def upload(self, name: str) -> str:
        """Copy a file of the directory to the URL of the outputs; return the file's URL."""
        url = f"{self.outputs}/{name}"
        write_file(url, (self.directory / name).read_bytes(), "outputs")
        return url

    def collect_export(self, finished: RunFinished, card: Mapping[str, Any]) -> Path:
        """Fetch the files that other programs load, and write the run card; return the
        directory.
        """
        directory = self.for_outputs / EXPORT
        # An earlier run with the same --output may have left its files here.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            card_before = json.loads((directory / CARD_JSON).read_text(encoding="utf-8"))
            for name in card_before["model"]["files"]:
                file_below(directory, name, CARD_JSON).unlink()
        directory.mkdir(parents=True, exist_ok=True)  # The output exists even without any export.
        with log_failures(EXPORT):
            for name in finished.exported:
                file = file_below(directory, name, EXPORT)
                file.parent.mkdir(parents=True, exist_ok=True)
                fetch_file(f"{finished.export_url}/{name}", file)
        with log_failures(CARD_JSON):
            for name, contents in card_files(card).items():
                (directory / name).write_bytes(contents)
        return directory

    def keep_history(self, report: Report) -> None:
        """Upload the history to the task's outputs, and name it in the report, for a task that does
        not return it.

        This does not raise: the run has ended, and the task's own outputs matter more.
        """
        file = self.directory / HISTORY
        if file.is_file():
            with log_failures("history"):
                place = str(file)
                if self.outputs:
                    place = self.upload(HISTORY)
                report.outputs["history"] = place
