"""The observer that shows a run on the terminal. Imports tqdm when a terminal is there to redraw."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any, TextIO

from flyte_ddp.events import (
    CheckpointLoaded,
    EpochFinished,
    Event,
    FunctionStarted,
    Reported,
    RunFinished,
    RunStarted,
    StepFinished,
)
from flyte_ddp.events.wall_time import AttemptEnded
from flyte_ddp.storage import redact_url

FLUSH_INTERVAL = 0.1  # seconds for which lines of ranks may stay in this process, so that many at a time are written
PLAIN_STEP_INTERVAL = 10.0  # seconds between lines about steps if the output is not a terminal


class ProgressBar:
    """Shows the progress of a run: a live bar on a terminal, and a line from time to time elsewhere.

    Args:
        stream: the output; standard error by default.
        lines: the output of `write`; by default the same.
    """

    def __init__(self, stream: TextIO | None = None, lines: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._lines = lines or self._stream
        self._is_live = self._stream.isatty()
        self._bar: Any = None
        self._run: RunStarted | None = None
        self._next_step_line = 0.0
        self._lost_step = 0  # that the attempt before had reached
        self._lock = threading.Lock()  # `write` is called from other threads than `handle`
        self._is_flush_due = False

    def handle(self, event: Event) -> None:
        """Show starts, steps, epochs and the end."""
        with self._lock:
            if isinstance(event, RunStarted):
                self._start(event)
            elif isinstance(event, StepFinished):
                self._show_step(event)
            elif isinstance(event, EpochFinished):
                self._show_epoch(event)
            elif isinstance(event, RunFinished):
                self._print(f"best accuracy {event.best_accuracy:.2%} after epoch {event.best_epoch}")
            elif isinstance(event, FunctionStarted):
                ranks = "1 rank" if event.world_size == 1 else f"{event.world_size} ranks"
                nodes = f" on {event.num_nodes} nodes" if event.num_nodes > 1 else ""
                self._print(f"{event.name}, {ranks}{nodes}")
            elif isinstance(event, CheckpointLoaded):
                self._print(f"resumed at step {event.step:,} from {event.url}{self._steps_again(event.step)}")
            elif isinstance(event, AttemptEnded):
                self._lost_step = event.step
            elif isinstance(event, Reported):
                self._show_report(event)

    def write(self, line: str) -> None:
        """Print `line`, given without a line break, above the bar. Any thread may call this."""
        with self._lock:
            if self._bar is not None:
                self._print(line, self._lines)
                return
            self._lines.write(f"{redact_url(line)}\n")
            if not self._is_flush_due:
                self._is_flush_due = True
                timer = threading.Timer(FLUSH_INTERVAL, self._flush)
                timer.daemon = True
                timer.start()

    def close(self, error: BaseException | None) -> None:
        """Remove the bar. After an error it stays, to show how far the run came."""
        self._flush()
        with self._lock:
            if self._bar is not None:
                self._bar.leave = error is not None
                self._bar.close()
                self._bar = None

    def _steps_again(self, resumed_step: int) -> str:
        """Return how many steps that the attempt before had done are done again."""
        num_steps = self._lost_step - resumed_step
        return f": {num_steps:,} step{'s' * (num_steps > 1)} again" if num_steps > 0 else ""

    def _flush(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # a reader that has gone: the next line says so
            self._is_flush_due = False
            self._lines.flush()

    def _start(self, event: RunStarted) -> None:
        self._run = event
        ranks = "1 rank" if event.world_size == 1 else f"{event.world_size} ranks"
        threads = "1 thread" if event.num_threads == 1 else f"{event.num_threads} threads"
        self._print(
            f"recipe {event.recipe}, {ranks} on {event.device} ({event.backend}, {threads} each), "
            f"{event.num_parameters:,} parameters; data: {event.data}"
        )
        for skipped in event.skipped_checkpoints:
            self._print(f"warning: {skipped}")
        again = self._steps_again(event.resumed_step)
        if event.resumed_step:
            where = f"{event.resumed_step:,} of {event.num_steps:,} from {event.resumed_from}"
            self._print(f"resumed at step {where}{again}")
        elif again:
            self._print(f"started again at step 0{again}")
        if not self._is_live:
            return
        from tqdm import tqdm

        if self._bar is not None:
            self._bar.close()
        self._bar = tqdm(
            total=event.num_steps,
            initial=event.resumed_step,
            file=self._stream,
            dynamic_ncols=True,
            leave=False,
            miniters=0,
            unit="step",
            desc=f"epoch {len(event.previous_epochs) + 1}/{event.config.get('epochs', '?')}",
        )

    def _show_step(self, event: StepFinished) -> None:
        status = f"loss {event.loss:.4f}, {event.samples_per_second:,.0f} samples/s"
        if self._bar is not None:
            self._bar.set_description(self._epoch_label(event.epoch), refresh=False)
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.update(event.step - self._bar.n)
        elif (now := time.monotonic()) >= self._next_step_line:
            self._next_step_line = now + PLAIN_STEP_INTERVAL
            total = f" of {self._run.num_steps:,}" if self._run else ""
            self._print(f"{self._epoch_label(event.epoch)}, step {event.step:,}{total}: {status}")

    def _show_epoch(self, event: EpochFinished) -> None:
        self._print(
            f"{self._epoch_label(event.epoch)}: train loss {event.train_loss:.4f}, test loss {event.test_loss:.4f}, "
            f"accuracy {event.accuracy:.2%}, {event.samples_per_second:,.0f} samples/s"
            + (f", {event.num_replaced:,} samples could not be read" if event.num_replaced else "")
        )
        if self._bar is not None:
            self._bar.update(event.step - self._bar.n)

    def _show_report(self, event: Reported) -> None:
        """Show what a function reports: its number of steps is unknown, so there is no bar to fill."""
        if (now := time.monotonic()) < self._next_step_line:
            return
        self._next_step_line = now + PLAIN_STEP_INTERVAL
        epoch = "" if event.epoch is None else f"epoch {event.epoch:.4g}, "
        values = ", ".join(f"{name} {value:.6g}" for name, value in event.values.items())
        self._print(f"{epoch}step {event.step:,}" + (f": {values}" if values else ""))

    def _epoch_label(self, epoch: int) -> str:
        return f"epoch {epoch}/{self._run.config.get('epochs', '?') if self._run else '?'}"

    def _print(self, line: str, stream: TextIO | None = None) -> None:
        line, stream = redact_url(line), stream or self._stream
        if self._bar is None:
            print(line, file=stream, flush=True)
        else:
            self._bar.write(line, file=stream)  # removes the bar, prints, and draws it again
