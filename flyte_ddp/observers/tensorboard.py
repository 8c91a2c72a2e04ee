"""The observer that writes a run for TensorBoard. The extra `tensorboard` installs the package.

Imports it when a run starts, and neither torch nor TensorFlow.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.config.extras import require
from flyte_ddp.events import Histogram, RunStarted
from flyte_ddp.observers.recorder import NOTHING, Entry, Recorder
from flyte_ddp.storage import SHORT_TIMEOUT, Storage, check_url, redact_url

UPLOAD_INTERVAL = 30.0  # seconds between uploads of a file to a store, which takes it whole


@dataclass(eq=False)
class Tensorboard(Recorder):
    """Writes a run into a directory of its own in `logdir`. A failure never affects the training.

    All curves are over optimizer steps. Ranks that start again repeat steps. Their first record
    makes TensorBoard purge the steps from there on, so no step is drawn twice.
    """

    service, label = "TensorBoard", "TensorBoard log"
    close_timeout = SHORT_TIMEOUT
    _has_earlier = False  # earlier ranks have written epochs
    _has_start = False  # the present ranks have their purging record
    _next_upload = 0.0

    logdir: str  # path or URL; created if missing
    run_id: str  # the same in every attempt of one run; the name of the directory

    def __post_init__(self) -> None:
        require("tensorboard", "tensorboard")
        check_url(self.logdir, "tensorboard")
        self.url = f"{self.logdir.rstrip('/')}/{self.run_id}"

    def _open(self, event: RunStarted, config: Mapping[str, Any]) -> None:
        if self._run is None:
            self._start()
        self._has_earlier = self._has_earlier or self._has_start
        self._has_start = False
        self._reached = NOTHING  # repeated steps are written again
        if not self._has_earlier:
            rows = (f"| {name} | {value} |" for name, value in config.items())
            self._write_text("config", "\n".join(["| | |", "|---|---|", *rows]), 0)

    def _start(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._place = Storage(self.url, "tensorboard", SHORT_TIMEOUT)
        self._has_earlier = bool(self._place.names())
        self._name = (
            f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        )
        directory = self._place.root
        if self._place.is_local:
            os.makedirs(directory, exist_ok=True)
        else:  # no store can append
            self._directory = tempfile.TemporaryDirectory()
            directory = self._directory.name
        self._file = Path(directory, self._name)
        self._run = RecordWriter(self._file.open("wb"))
        self._write(0, file_version="brain.Event:2")
        self.say(f"TensorBoard: {redact_url(self.url)}")

    def _log(self, entries: Sequence[Entry]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        resumed = self._resumed_step
        for entry in entries:
            step = entry.step
            if step is None or not entry.axis:
                continue
            if self._has_earlier and resumed and entry.axis == "epoch" and step <= resumed:
                continue
            if not self._has_start:
                self._has_start = True
                first = step
                if resumed is not None:
                    first = resumed + 1
                self._write(first, session_log=SessionLog(status=SessionLog.START))
            numbers = {}
            for name, value in entry.values.items():
                if isinstance(value, str):
                    self._write_text(name, f"```\n{value}\n```", step)
                else:
                    numbers[name] = _summary(value)
            self._summarize(step, numbers)
        self._save()

    def _image(self, step: int, name: str, png: bytes) -> None:
        self._summarize(step, {name: {"image": {"encoded_image_string": png}}})
        self._save()

    def _write_text(self, name: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        tensor = {"dtype": DT_STRING, "string_val": [text.encode()]}
        metadata = {"plugin_data": {"plugin_name": "text"}}
        self._summarize(step, {name: {"tensor": tensor, "metadata": metadata}})

    def _summarize(self, step: int, values: Mapping[str, Mapping[str, Any]]) -> None:
        summary = {"value": [{"tag": name, **value} for name, value in values.items()]}
        self._write(step, summary=summary)

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        self._run.write(Record(wall_time=time.time(), step=step, **content).SerializeToString())

    def _save(self) -> None:
        self._run.flush()
        if not self._place.is_local and time.monotonic() >= self._next_upload:
            self._place.write(self._name, self._file)
            self._next_upload = time.monotonic() + UPLOAD_INTERVAL

    def _close(self, status: str) -> None:
        self._next_upload = 0.0
        self._save()
        self._run.close()
        if not self._place.is_local:
            self._directory.cleanup()


def _summary(value: Any) -> dict[str, Any]:
    """Return a number or a histogram in the form of TensorBoard's summary."""
    if not isinstance(value, Histogram):
        return {"simple_value": value}
    histogram = {
        "min": value.edges[0],
        "max": value.edges[-1],
        "num": sum(value.counts),
        "bucket_limit": value.edges[1:],
        "bucket": value.counts,
    }
    return {"histo": histogram}
