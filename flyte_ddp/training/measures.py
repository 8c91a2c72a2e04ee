"""What the steps and epochs of a training measure, and what is reported of them."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

from flyte_ddp.errors import NonFiniteLoss
from flyte_ddp.events import EpochFinished, Reported
from flyte_ddp.launch.protocol.messages import PHASES
from flyte_ddp.rank.data import Samples
from flyte_ddp.rank.step_timer import BACKWARD, DATA, FORWARD, StepTimer
from flyte_ddp.training.bad_steps import REMEDY
from flyte_ddp.training.evaluation import Evaluation, sample_utilization
from flyte_ddp.training.metrics import check_monitor, read_figures
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.passes import gradient_norm
from flyte_ddp.training.progress import MetricSums, Stretch
from flyte_ddp.training.result_reporter import ResultReporter
from flyte_ddp.training.sources import SourceLosses
from flyte_ddp.training.trained_state import TrainedState

# the scale of fp16 begins with 65536, and each gradient that overflows halves it
MIN_LOSS_SCALE = 2.0**-10


@dataclass(eq=False)
class Measures:
    """Sums up the steps of one rank, and reports them with the other ranks' sums."""

    reporter: ResultReporter
    parallelism: Parallelism
    state: TrainedState
    timer: StepTimer
    train: Samples
    test: Samples
    num_batches: int  # batches in an epoch
    first_step_at: float = 0.0  # seconds since the epoch

    def __post_init__(self) -> None:
        self.by_source = SourceLosses.open(self.train, self.parallelism)
        self.sample_utilization = sample_utilization(self.state.model, self.parallelism)
        self.begin()

    def begin(self) -> None:
        """Begin the sums up to the next evaluation. The sums of an earlier attempt stay."""
        before = dataclasses.replace(self.state.progress)
        self.stretch = Stretch(self.parallelism.world.device, before)
        self._before = list(self.timer.seconds), self._count_unreadable()

    def _count_unreadable(self) -> int:
        return self.train.num_unreadable + self.test.num_unreadable

    def add(self, step: MetricSums) -> None:
        """Add the sums of an optimizer step."""
        self.first_step_at = self.first_step_at or time.time()
        for sums in (self.stretch.since_log, self.stretch.sums):
            sums.add(step)

    def update_progress(self) -> None:
        """Set the epoch's sums over all ranks: the sums of earlier attempts plus the stretch's.

        Raises:
            NonFiniteLoss: a step has spoiled the weights. No checkpoint may be written of them.
        """
        progress, sums, earlier = self.state.progress, self.stretch.sums, self.stretch.before
        progress.loss_sum = earlier.loss_sum + self.parallelism.world.all_reduce(sums.loss_sum)[0]
        progress.num_targets = earlier.num_targets + float(sums.num_targets)
        progress.num_samples = earlier.num_samples + sums.num_samples
        progress.seconds = earlier.seconds + sums.seconds
        if self.state.scaler.is_enabled():  # the scaler leaves out steps whose gradient overflows
            return
        norm = gradient_norm(self.state.model)
        if not math.isfinite(norm):
            raise NonFiniteLoss(
                f"the gradient's norm is {norm} at step {progress.step} (epoch "
                f"{progress.epoch}); {REMEDY}"
            )

    def report_step(self, gradient_norm: float) -> None:
        """Report the steps since the last report."""
        progress, scaler, world = self.state.progress, self.state.scaler, self.parallelism.world
        if not self.stretch.since_log.num_steps:
            return
        sums = self.stretch.begin_log()
        if scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE:
            raise NonFiniteLoss(
                f"precision: every gradient overflows in fp16 up to step {progress.step}: "
                "bf16 or fp32 may help, or the gradient is NaN"
            )
        values = {
            "loss": world.all_reduce(sums.loss_sum)[0] / float(sums.num_targets),
            "learning_rate": progress.learning_rate,
            "gradient_norm": gradient_norm,
            "samples_per_second": sums.num_samples / sums.seconds,
        }
        if self.by_source:
            values |= self.by_source.average(sums.by_source)
        epoch = progress.step / self.num_batches
        reported = Reported(step=progress.step, epoch=epoch, values=values)
        self.reporter.report_step(reported)

    def finish_epoch(self, evaluation: Evaluation, exchange: dict[str, Any]) -> EpochFinished:
        """Report the results since the last evaluation, and advance to the next epoch after a whole
        one.

        Args:
            exchange: the result of `Parallelism.exchange_seconds`.
        """
        finished = self.reporter.report_epoch(self._measure(evaluation, exchange))
        self.state.schedule.end_evaluation(finished)
        self.state.progress.note(finished)
        return finished

    def _measure(self, evaluation: Evaluation, exchange: dict[str, Any]) -> EpochFinished:
        progress, world, sums = self.state.progress, self.parallelism.world, self.stretch.sums
        seconds, num_unreadable = self._before
        # Waits for other ranks are left out, so a straggler shows more seconds than the others.
        phases = {
            PHASES[phase]: world.all_gather(
                (self.timer.seconds[phase] - seconds[phase]) / max(1, sums.num_steps)
            )
            for phase in (DATA, FORWARD, BACKWARD)
        }
        own_loss = float(sums.loss_sum) / max(1.0, float(sums.own_targets))
        rank_losses = world.all_gather(own_loss)
        own_unreadable = self._count_unreadable() - num_unreadable
        finished = EpochFinished(
            epoch=progress.epoch,
            step=progress.step,
            train_loss=progress.loss_sum / (progress.num_targets or math.nan),
            test_loss=evaluation.loss,
            learning_rate=progress.learning_rate,
            seconds=progress.seconds,
            samples_per_second=progress.num_samples / progress.seconds,
            evaluation_seconds=evaluation.seconds,
            rank_losses=rank_losses,
            rank_step_seconds=[sum(each) for each in zip(*phases.values(), strict=True)],
            rank_phase_seconds=phases,
            num_unreadable=int(world.all_reduce(own_unreadable)[0]),
            metrics=evaluation.metrics,
            share=progress.batch / self.num_batches,
            **exchange,
        )
        with self.reporter.log_failures("figures"):
            figures = {**finished.metrics, **read_figures(self.parallelism.recipe, finished)}
            figures |= self._count_tokens(finished)
            utilization = self.sample_utilization * finished.samples_per_second
            if utilization:
                figures["model_flops_utilization"] = utilization
            finished = dataclasses.replace(finished, metrics=figures)
        check_monitor(self.parallelism.config, ["test_loss", *finished.metrics])
        return finished

    def _count_tokens(self, finished: EpochFinished) -> dict[str, float]:
        """Return the tokens that the run has seen, and the speed in tokens; nothing for samples
        without a known number of tokens.
        """
        progress, config, size = self.state.progress, self.parallelism.config, len(self.train)
        tokens = self.parallelism.recipe.tokens_per_sample()
        if not tokens:
            return {}
        num_seen = min(progress.batch * config.global_batch_size, size)
        num_seen += (progress.epoch - 1) * size
        return {
            "tokens_per_second": tokens * finished.samples_per_second,
            "tokens_seen": float(tokens * num_seen),  # Flyte takes no int here
        }
