"""The observer that shows a run on the terminal. Imports tqdm when a terminal is there to
redraw.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from flyte_ddp.config.waits import LINE_INTERVAL
from flyte_ddp.events import (
    AttemptEnded,
    CheckpointLoaded,
    Event,
    Figures,
    RunFinished,
    RunStarted,
    RunState,
)
from flyte_ddp.observers.formats import duration, format_count
from flyte_ddp.process.standard_streams import Output, open_standard_streams
from flyte_ddp.storage import redact_url

# Formats of figures. Other figures have their name and five digits.
FORMATS = {
    "accuracy": "accuracy {:.2%}",
    "samples_per_second": "{:,.0f} samples/s",
    "seconds": "",  # hidden: samples_per_second shows it
    "num_unreadable": "{:,.0f} samples could not be read",
}


@dataclass(eq=False)
class ProgressBar:
    """Shows the progress of a run: a live bar on a terminal, and a line from time to time
    elsewhere.

    What the output does not take is dropped, as on a full disk, or where the reader has gone.
    """

    stream: TextIO | None = None  # the output; standard error by default
    lines: TextIO | None = None  # the output of `write`; by default the same
    _bar: Any = None
    _next_step_line: float = 0.0
    _lost_step: int = 0  # step that the attempt before had reached
    _num_epochs: str = ""  # epochs of the whole run, such as "/3"
    _num_steps: str = ""  # steps of the whole run, such as " of 12"
    # `write` is called from other threads than `handle`
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        open_standard_streams()
        self._stream = Output(self.stream or sys.stderr)
        self._lines = Output(self.lines) if self.lines else self._stream
        self._is_live = self._stream.isatty()

    def handle(self, event: Event, state: RunState) -> None:
        with self._lock:
            match event:
                case RunStarted():
                    self._start(event)
                case RunFinished() if event.best_epoch:
                    kept = f"the model state is that of epoch {event.model_state_epoch}"
                    self._print(
                        f"best {self._describe(event.best)} after epoch {event.best_epoch}; {kept}"
                    )
                case CheckpointLoaded():
                    self._resume(event, state.started)
                case AttemptEnded():
                    self._lost_step = event.step
                case _:
                    figures = event.figures()
                    if figures.axis:
                        self._show_figures(figures, state)

    def write(self, line: str) -> None:
        """Print `line`, given without a line break, above the bar. Any thread may call this."""
        with self._lock:
            self._print(line, self._lines)

    def close(self, error: BaseException | None) -> None:
        """Remove the bar. After an error it stays, to show how far the run came."""
        with self._lock:
            if self._bar is not None:
                self._bar.leave = error is not None
                self._bar.close()
                self._bar = None

    def _start(self, event: RunStarted) -> None:
        self._num_epochs = self._num_steps = ""
        if event.config.get("epochs"):
            self._num_epochs = f"/{event.config['epochs']}"
        if event.num_steps:
            self._num_steps = f" of {event.num_steps:,}"
        line = f"{event.name}, {format_count(event.world_size, 'rank')}"
        if event.num_nodes > 1:
            line += f" on {event.num_nodes} nodes"
        if event.device:
            threads = format_count(event.num_threads, "thread")
            line += f", each on {event.device} ({event.backend}, {threads})"
        if event.num_parameters:
            line += f", {event.num_parameters:,} parameters"
        if event.data:
            line += f"; data: {event.data}"
        self._print(line)

    def _resume(self, event: CheckpointLoaded, started: RunStarted | None) -> None:
        for skipped in event.skipped:
            self._print(f"warning: {skipped}")
        num_again = self._lost_step - event.step
        line = "started again at step 0"
        if event.url:
            line = f"resumed at step {event.step:,}{self._num_steps} from {event.url}"
        if num_again > 0:
            line += f": {format_count(num_again, 'step')} again"
        if event.url or num_again > 0:
            self._print(line)
        epoch = 0.0
        if event.epochs:
            epoch = event.epochs[-1].position
        if not self._is_live or not started or not started.num_steps:
            return
        from tqdm import tqdm

        if self._bar is not None:
            self._bar.close()
        self._bar = tqdm(
            total=started.num_steps,
            initial=event.step,
            file=self._stream,
            dynamic_ncols=True,
            leave=False,
            miniters=0,
            unit="step",
            desc=self._label_epoch(epoch),
        )

    def _show_figures(self, figures: Figures, state: RunState) -> None:
        """Show every epoch's figures as a line. Show the figures of steps in the bar, or as a line
        from time to time.
        """
        values = self._describe(figures.values)
        epoch = ""
        if figures.epoch is not None:
            position = figures.epoch
            if figures.axis == "step":  # the number of the step shows how far the epoch is
                position = math.ceil(position)
            epoch = self._label_epoch(position)
        if figures.axis == "epoch":
            self._print(f"{epoch}: {values}")
        elif self._bar is not None:
            self._bar.set_description(epoch, refresh=False)
            self._bar.set_postfix_str(values, refresh=False)
        elif time.monotonic() >= self._next_step_line:
            self._next_step_line = time.monotonic() + LINE_INTERVAL
            step = f"step {figures.step:,}{self._num_steps}"
            line = ", ".join(filter(None, [epoch, step]))
            if values:
                line += f": {values}"
            seconds = state.seconds_left(time.time())
            if seconds is not None:
                line += f"; {duration(seconds)} left"
            self._print(line)
        if self._bar is not None and figures.step is not None:
            self._bar.update(figures.step - self._bar.n)

    def _describe(self, values: Mapping[str, float]) -> str:
        words = (
            FORMATS.get(name, f"{name.replace('_', ' ')} {{:.5g}}").format(value)
            for name, value in values.items()
        )
        return ", ".join(filter(None, words))

    def _label_epoch(self, epoch: float) -> str:
        return f"epoch {epoch:.4g}{self._num_epochs}"

    def _print(self, line: str, stream: Output | None = None) -> None:
        line, stream = redact_url(line), stream or self._stream
        if self._bar is None:
            print(line, file=stream, flush=True)
        else:
            self._bar.write(line, file=stream)  # removes the bar, prints, and draws it again
