"""The report of a run of a recipe, a function or a script, folded from its events. A part is there
if its data are.
"""

from __future__ import annotations

import base64
import functools
import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from flyte_ddp.events import Event, Prediction, RunStarted, RunState
from flyte_ddp.observers.formats import (
    duration,
    format_count,
    format_figure,
    format_rounded,
)
from flyte_ddp.observers.reports.page import (
    Card,
    Page,
    Table,
    cell,
    shorten,
)
from flyte_ddp.observers.reports.plots import run_panels
from flyte_ddp.observers.reports.run_rows import RunView, make_sections, make_tiles

# These keep the page below 3 MB for any run. The rest of it is 250 kB at most.
MAX_PREDICTION_BYTES = 1_400_000  # bytes of HTML with images
MAX_PICTURE_BYTES = 900_000  # bytes of PNGs, before base64
MAX_EPOCHS = 200  # rows of the table
MAX_NOTICES = 20

MAX_TEXTS, MAX_TEXT = 20, 5_000  # generated after the last epochs; characters of each

OPEN_PREDICTIONS = 40  # shown before "more" is clicked
MAX_LINES, MAX_LINE = 60, 400  # lines of the log; characters of each
PICTURE = Markup(
    '<h2>{0} <small>step {1:,}</small></h2><img alt="{0}" src="data:image/png;base64,{2}">'
)


@dataclass(eq=False)
class Report(Page):
    """The report of one run. A listener."""

    progress_label = "optimizer steps done"
    needs_reports = True

    name: str = ""  # title of the report; by default the program's name
    # URLs of the outputs by name; to be set at the end
    outputs: dict[str, str] = field(default_factory=dict)
    # The run's own state. A page is rendered during an event, or after the last one.
    _state: RunState = field(default_factory=RunState, init=False)
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES), init=False)
    # panels of the present state; drawing takes half a second
    _panels: list[Markup] | None = field(default=None, init=False)

    @classmethod
    def of(cls, state: RunState) -> Report:
        """Return the report of a run that has finished with this state."""
        report = cls()
        report._state = state
        report.closed_at = state.finished.at if state.finished else 0.0
        return report

    def add_line(self, line: str) -> None:
        """Add a line of the log. Any thread may call this."""
        self._lines.append(shorten(line, MAX_LINE))

    def handle(self, event: Event, state: RunState) -> None:
        self._state, self._panels = state, None

    def close(self, error: BaseException | None) -> None:
        """Record the end of the run. The page of an earlier run stays where this one was refused
        before it began.
        """
        started = self._state.started
        has_begun = started is not None and (self._state.loaded is not None or not started.config)
        if error is not None and not has_begun and self.file and self.file.is_file():
            is_empty = self.file.stat().st_size == 0  # made for this run
            self.file = self.file if is_empty else None
        super().close(error)

    @property
    def status(self) -> str:
        return "finished" if self._state.finished and self.error is None else super().status

    @property
    def title(self) -> str:
        started = self._state.started
        return self.name or (f"Training {started.name}" if started else "Training")

    def content(self) -> dict[str, Any]:
        if self._panels is None:
            self._panels = self.draw(run_panels(self._state))
        started = self._state.started
        if not started:
            lead = "Waiting for the ranks to start."
            if self._state.awaited:
                lead = f"Waiting for nodes. {self._state.awaited.reason}"
            return {"lead": lead, "percent_done": 0, "cards": self._cards()}
        view = self._view(started)
        ranks = format_count(started.world_size, "rank")
        nodes = format_count(started.num_nodes, "node")
        lead = f"{ranks} on {nodes}" + (f": {started.data}" if started.data else "")
        return {
            "lead": lead,
            "percent_done": view.percent_done,
            "notices": self._notices(),
            "tiles": make_tiles(view),
            "charts": [("", "", self._panels), *self._pictures()],
            "tables": [self._epochs_table()] if self._state.epochs else [],
            "predictions": self._prediction_section(),
            "cards": self._cards(),
            "sections": make_sections(view),
        }

    def _pictures(self) -> list[tuple[str, str, list[Markup]]]:
        """Return the chart of the pictures that the program has shown, the last ones for which the
        page has room.
        """
        pictures = list(reversed(self._state.pictures.values()))
        sizes = itertools.accumulate(len(each.png) for each in pictures)
        shown = [
            PICTURE.format(each.name, each.step, base64.b64encode(each.png).decode())
            for each, size in zip(pictures, sizes, strict=True)
            if size <= MAX_PICTURE_BYTES
        ]
        left_out = len(pictures) - len(shown)
        note = f"the newest of each name; {left_out} older ones are left out" if left_out else ""
        return [("Pictures", note, shown)] if shown else []

    def _view(self, started: RunStarted) -> RunView:
        state = self._state
        until = self.closed_at or time.time()
        spent, cost = state.time_spent(until), state.cost(until)
        # A replayed history is reported within a second, so the duration in its own last event
        # counts.
        replayed = state.finished.seconds if state.finished else 0.0
        seconds = spent.wall or max(self.seconds(), replayed)
        left = None
        if not self.closed_at:
            left = state.seconds_left(time.time())
        return RunView(state, started, spent, cost, seconds, left, self.outputs)

    def _notices(self) -> list[str]:
        state, loaded = self._state, self._state.loaded
        notices = []
        if state.awaited:
            notices.append(f"Waiting for nodes. {state.awaited.reason}")
        notices += [str(each) for found in state.stragglers[-1:] for each in found.stragglers]
        if state.slow_nodes:
            notices += map(str, state.slow_nodes.nodes)
        notices += map(str, state.bad_steps[-MAX_NOTICES:])
        notices += loaded.skipped[-MAX_NOTICES:] if loaded else []
        if loaded and loaded.url:
            notices.append(f"Resumed at step {loaded.step:,} from {loaded.url}")
        if 0 < state.grace_seconds < state.writing_seconds:
            notices.append(
                f"The store took {state.writing_seconds:.0f} s for the newest checkpoint, and a "
                "node that is told to "
                f"go has {state.grace_seconds:.0f} s: an announced loss would cost steps. A "
                "longer termination grace "
                "of the pods avoids that"
            )
        return notices

    def _epochs_table(self) -> Table:
        best, epochs = self._state.best, self._state.epochs
        metrics = dict.fromkeys(name for epoch in epochs for name in epoch.metrics)
        shown = [
            epoch
            for index, epoch in enumerate(epochs)
            if index >= len(epochs) - MAX_EPOCHS or epoch is best
        ]
        rows = []
        for epoch in shown:
            cells = {
                "epoch": cell(epoch.position, "{:.3g}".format),
                "train loss": cell(epoch.train_loss, "{:.4g}".format),
                "test loss": cell(epoch.test_loss, "{:.4g}".format),
            }
            for name in metrics:
                form = functools.partial(format_figure, name)
                cells[name.replace("_", " ")] = cell(epoch.metrics.get(name), form)
            cells["learning rate"] = cell(epoch.learning_rate, "{:.3g}".format)
            cells["train"] = cell(epoch.seconds, duration)
            cells["test"] = cell(epoch.evaluation_seconds, duration)
            cells["samples/s"] = cell(epoch.samples_per_second, format_rounded)
            rows.append((epoch is best, cells))
        left_out = len(epochs) - len(shown)
        note = f"The best epoch and the last {MAX_EPOCHS}; {left_out:,} are left out."
        return Table("Epochs", note if left_out else "", rows)

    def _cards(self) -> list[Card]:
        """Return what the model generated after the last epochs, the newest open, and the last
        lines of the log.
        """
        written = [epoch for epoch in reversed(self._state.epochs) if epoch.sample][:MAX_TEXTS]
        texts = [
            (f"after epoch {epoch.position:.3g}", shorten(epoch.sample, MAX_TEXT))
            for epoch in written
        ]
        log = "\n".join(self._lines)
        cards = []
        if texts:
            cards.append(Card("Generated text", *texts[0], texts[1:]))
        if log:
            cards.append(Card("Log", "the last lines", log))
        return cards

    def _prediction_section(self) -> dict[str, Any] | None:
        """Return as many predictions as the page has room for, the worst first. Predicted numbers
        are in a scatter plot.
        """
        made = self._state.predictions.predictions if self._state.predictions else []
        every = [each for each in made if not each.numbers or each.image or each.text]
        if not every:
            return None
        samples = [_sample(each) for each in sorted(every, key=_error, reverse=True)]
        sizes = itertools.accumulate(
            250 + 6 * len("".join(each.values())) - 5 * len(each["image"]) for each in samples
        )
        shown = samples[: sum(size <= MAX_PREDICTION_BYTES for size in sizes)]
        num_right = sum(sample["kind"] == "right" for sample in samples)
        note = f"{num_right} of {len(every)} held-out samples right"
        if any(each.error is not None for each in every):
            note = f"{len(every)} held-out samples, the largest error first"
        if len(shown) < len(every):
            note += (
                f"; {len(every) - len(shown)} left out, because they would make this page too large"
            )
        return {"note": note, "first": shown[:OPEN_PREDICTIONS], "rest": shown[OPEN_PREDICTIONS:]}


def _error(prediction: Prediction) -> float:
    if prediction.error is None:
        return float(prediction.truth != prediction.guess)
    return prediction.error


def _sample(prediction: Prediction) -> dict[str, Any]:
    """Return the texts of a prediction for the template, and its image in base64."""
    kind = ""
    if prediction.error is None:
        kind = "wrong" if _error(prediction) else "right"
    scores = sorted(prediction.scores.items(), key=lambda item: -item[1])[:3]
    words = f"guess {shorten(prediction.guess)}, truth {shorten(prediction.truth)}"
    likely = ", ".join(f"{shorten(name)} {100 * score:.0f} %" for name, score in scores)
    return {
        "kind": kind,
        "truth": shorten(prediction.truth),
        "guess": shorten(prediction.guess),
        "words": words,
        "scores": f"{words} ({likely})" if likely else words,
        "text": shorten(prediction.text),
        "image": base64.b64encode(prediction.image).decode(),
    }
