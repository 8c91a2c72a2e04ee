"""The results of steps and epochs on their way to people, with views of the model.

What fails here cannot end a training: it is only shown.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import nn

from flyte_ddp import errors
from flyte_ddp.events import EpochFinished, HistogramsTaken, PredictionsMade, Reported
from flyte_ddp.rank.data import Samples
from flyte_ddp.rank.reporter import Reporter
from flyte_ddp.training import inspection
from flyte_ddp.training.parallel import Parallelism


@dataclass(eq=False)
class ResultReporter:
    """Emits the results of a rank, and calls its recipe with them."""

    reporter: Reporter
    parallelism: Parallelism
    model: nn.Module
    test: Samples
    # parts of the report that failed in this attempt: each is logged once
    _failed: set[str] = field(default_factory=set)

    def log_failures(self, what: str) -> AbstractContextManager[object]:
        """Return a context that ends without the error of a part of the report."""
        return errors.log_failures(what, self._failed, (SystemExit,))

    def report_step(self, reported: Reported) -> None:
        """Emit the results of the steps since the last report."""
        self.reporter.emit(reported)
        if self.parallelism.world.is_first:
            with self.log_failures("result of on_step"):
                self.parallelism.recipe.on_step(reported)

    def report_epoch(self, finished: EpochFinished) -> EpochFinished:
        """Emit the results since the last evaluation. Return them with the recipe's sample."""
        if self.parallelism.saves:
            finished = self._show(finished)
        if self.parallelism.world.is_first:
            with self.log_failures("result of on_epoch"):
                self.parallelism.recipe.on_epoch(finished)
        return finished

    def _show(self, finished: EpochFinished) -> EpochFinished:
        """Emit the results with views of the model. Return them with the recipe's sample."""
        model, parallelism = self.model, self.parallelism
        with self.log_failures("sample"):
            sample = inspection.generate_sample(model, parallelism.recipe)
            finished = dataclasses.replace(finished, sample=sample)
        self.reporter.emit(finished)
        with self.log_failures("histograms"):
            histograms = inspection.take_histograms(model, parallelism)
            self.reporter.emit(HistogramsTaken(finished.step, histograms))
        interval = parallelism.config.prediction_interval
        # The end of the run shows the predictions of the model that it keeps.
        is_last = finished.epoch == parallelism.config.epochs
        is_due = interval and finished.share == 1 and finished.epoch % interval == 0
        if is_due and not is_last:
            self.reporter.beat(finished.step)
            with self.log_failures("predictions"):
                made = inspection.make_predictions(model, self.test, parallelism)
                self.reporter.emit(PredictionsMade(finished.epoch, made))
        return finished
