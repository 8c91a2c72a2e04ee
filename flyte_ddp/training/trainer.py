"""The training loop of one rank: the page to read first.

`fit` trains, evaluates and checkpoints, epoch by epoch. Nothing here knows what started the rank,
on how many machines its peers are, or what becomes of the events that it emits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from torch import nn

from flyte_ddp.errors import NonFiniteLoss, StopRequested
from flyte_ddp.events import EpochFinished
from flyte_ddp.rank.data import Samples
from flyte_ddp.rank.plan import BatchShard, EpochShards, epoch_shards, num_batches
from flyte_ddp.rank.session import Session
from flyte_ddp.rank.step_timer import StepTimer
from flyte_ddp.training.bad_steps import REMEDY, BadSteps, Rewound
from flyte_ddp.training.batch_norm import keep_frozen_statistics
from flyte_ddp.training.checkpointer import Checkpointer, RunNotes
from flyte_ddp.training.evaluation import Evaluation, evaluate, share_buffers
from flyte_ddp.training.measures import Measures
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.passes import clip_gradients, compute_gradients
from flyte_ddp.training.progress import Progress, count_steps
from flyte_ddp.training.result_reporter import ResultReporter
from flyte_ddp.training.trained_state import TrainedState
from flyte_ddp.training.verification import Verification
from flyte_ddp.training.watch import LossWatch, WatchedStep

LONG_EVALUATION = 5.0  # seconds after which an evaluation saves what was trained before it


class Trainer:
    """One rank of a training.

    trainer = Trainer(parallelism, open_model(parallelism), train, test, session)
    trainer.checkpoints.resume()
    progress = trainer.fit()
    """

    def __init__(
        self,
        parallelism: Parallelism,
        model: nn.Module,  # the result of `open_model`, with the same weights on every rank
        train: Samples,  # samples that the ranks share
        test: Samples,
        session: Session,  # this rank's session, with open checkpoints
        notes: RunNotes | None = None,
    ) -> None:
        config, world = parallelism.config, parallelism.world
        self.parallelism, self.session = parallelism, session
        self.train, self.test = train, test
        size = num_batches(train, config)
        self.evaluated_model, self.replica = parallelism.shard(model)
        parallelism.watch_passes(self.replica, model, session.process.open_store)
        num_steps = count_steps(len(train), parallelism.recipe.tokens_per_sample(), config)
        self.state = TrainedState.open(parallelism, model, num_steps)
        self.timer = StepTimer(session.process.link.set_pace, world.device)
        parallelism.watch(self.timer, model)
        notes = notes or RunNotes(parallelism)
        self.checkpoints = Checkpointer(session, parallelism, self.state, notes)
        self.bad_steps = BadSteps(self.checkpoints, LossWatch(config, world, train), size)
        self.verification = Verification(parallelism, model)
        reporter = ResultReporter(session.reporter, parallelism, model, test)
        self.measures = Measures(reporter, parallelism, self.state, self.timer, train, test, size)

    def fit(self) -> Progress:
        """Train the epochs that are not done yet.

        Raises:
            NonFiniteLoss: names the step and the epoch.
            StopRequested: the run has to end; a checkpoint contains the progress.
            StorageUnavailable: the store has been away for `store_timeout`.
            CheckpointError: a checkpoint could not be written.
            ConfigError: the recipe has no figure called `monitor.metric`.
        """
        if self.checkpoints.best_is_unsaved:
            self.checkpoints.save(best=True)
        while not self.state.is_done:
            try:
                self.train_epoch()
            except Rewound:
                continue
            finished = self.measure_epoch()
            is_best = finished is self.state.best
            if is_best or finished.share == 1 or self.state.is_done:
                self.checkpoints.save(is_best)
        self.checkpoints.store.queue.has_finished = True
        self.session.saver.wait()
        return self.state.progress

    def train_epoch(self) -> None:
        """Take the optimizer steps of the current epoch that are not done yet, up to the next
        evaluation.
        """
        progress, shards = self.state.progress, self.shards()
        end = self.state.find_end(len(shards))
        batches = self._read(shards, end)
        self.measures.begin()
        self.replica.train()
        keep_frozen_statistics(self.state.model)

        while progress.batch < end:
            if progress.is_left_out(progress.batch):
                self.state.end_step()
                continue
            gradient_norm = self.step(shards[progress.batch], batches)
            self.boundary(gradient_norm)

        self.bad_steps.check_loss()
        self.measures.update_progress()

    def step(self, shard: BatchShard, batches: Iterator[tuple[Any, ...]]) -> float:
        """Take an optimizer step, if neither its loss nor its gradient is bad.

        Args:
            shard: this rank's part of the step's global batch.
            batches: yields its micro-batches next.

        Returns:
            The norm of the gradient; NaN or 0 if the norm is not needed.
        """
        state, progress, bad_steps = self.state, self.state.progress, self.bad_steps
        needs_norm = self._is_logged(progress.step + 1) or bad_steps.takes_back
        bad_steps.begin_step()
        state.optimizer.zero_grad()
        watched = WatchedStep(shard, bad_steps.watch.is_shared)
        sums = compute_gradients(
            self.replica,
            self.parallelism,
            batches,
            progress.step,
            self.timer,
            watched,
            self.measures.by_source,
        )
        bad_steps.watch.end(watched, sums.num_targets, progress)
        norm = math.nan
        if not bad_steps.check_loss(may_wait=needs_norm):
            state.scaler.unscale_(state.optimizer)
            max_norm = self.parallelism.config.gradient_clip_norm
            norm = clip_gradients(state.model, max_norm, needs_norm)
            bad_steps.check_gradient(watched, norm)
        if not progress.is_left_out(progress.batch):
            progress.learning_rate = state.schedule.begin_step(progress.step)
            state.scaler.step(state.optimizer)  # skips the step if a gradient overflows
            state.scaler.update()
            state.average.update(progress.step)
            self.measures.add(sums)
        state.end_step()
        return norm

    def boundary(self, gradient_norm: float) -> None:
        """Do what is due between two steps: report, save, stop.

        Raises:
            StopRequested: the run has to end; a checkpoint contains the progress.
            StorageUnavailable, CheckpointError: a checkpoint could not be written.
            WrongResult, RuntimeError: see `Verification.check`.
        """
        checkpoints, step = self.checkpoints, self.state.progress.step
        self.timer.end_step()
        self.beat()
        checkpoints.store.check()
        self.verification.check(step)
        is_logged = self._is_logged(step)
        if is_logged:
            self.measures.report_step(gradient_norm)
        stops = self.session.stop.poll()
        to_store = stops or checkpoints.is_due(is_logged)
        if to_store or checkpoints.memory_interval.is_due(step):
            self._save_between_steps(to_store)
        if stops:
            self._stop()

    def _save_between_steps(self, to_store: bool) -> None:
        self.bad_steps.check_loss()
        # The wait for queued work and for other ranks is no part of the cost.
        self.parallelism.world.all_reduce(0.0)
        started = time.perf_counter()
        self.measures.update_progress()
        is_kept = self.checkpoints.save(best=False, to_store=to_store)
        if not to_store:
            self.checkpoints.memory_interval.measure(started, is_kept)

    def _stop(self) -> None:
        self.session.saver.wait()
        raise StopRequested

    def _is_logged(self, step: int) -> bool:
        """Return whether a step is reported; `step` counts from 1."""
        return step % self.parallelism.config.log_interval == 0 or step == 1

    def shards(self) -> EpochShards:
        """Return this rank's shards of the current epoch."""
        world, epoch = self.parallelism.world, self.state.progress.epoch
        return epoch_shards(self.train, self.parallelism.config, world, epoch)

    def _read(self, shards: EpochShards, end: int) -> Iterator[tuple[Any, ...]]:
        """Yield the micro-batches up to batch `end`, without the batches that are left out."""
        progress = self.state.progress
        first = progress.batch

        def list_indices() -> Iterator[Any]:
            for batch, shard in enumerate(shards.read(first, end), first):
                if not progress.is_left_out(batch):
                    yield from shard.micro_batches

        return self.verification.watch(self.train.batches(list_indices(), progress.epoch))

    def measure_epoch(self) -> EpochFinished:
        """Evaluate the model, and report the results since the last evaluation."""
        average, world = self.state.average, self.parallelism.world
        if average.is_needed:  # the average puts these buffers back later
            share_buffers(self.evaluated_model, world)
        with average.in_place():
            evaluation = self.evaluate()
            exchange = self.parallelism.exchange_seconds(self.replica)
            return self.measures.finish_epoch(evaluation, exchange)

    def evaluate(self) -> Evaluation:
        """Measure the model on the held-out data. If the evaluation takes long, or on a stop, the
        training so far is saved.

        Raises:
            NonFiniteLoss: the last step has spoiled the weights.
            StopRequested: a run that resumes from the checkpoint starts with this evaluation.
        """
        started, is_saved = time.perf_counter(), False

        def on_batch() -> None:
            nonlocal is_saved
            self.beat()
            stops = self.session.stop.poll()
            # The time differs between ranks, and a collective save needs all of them at once.
            is_long = time.perf_counter() - started > LONG_EVALUATION
            is_long = is_long and not self.parallelism.is_collective
            if not is_saved and (stops or is_long):
                self.checkpoints.save(best=False)
                is_saved = True
            if stops:
                self._stop()

        share_buffers(self.evaluated_model, self.parallelism.world)
        result = evaluate(self.evaluated_model, self.test, self.parallelism, on_batch)
        if not math.isfinite(result.loss):
            progress = self.state.progress
            raise NonFiniteLoss(
                f"the loss on the held-out data is {result.loss} after step {progress.step} "
                f"(epoch {progress.epoch}); {REMEDY}"
            )
        return result

    def beat(self) -> None:
        """Report that this rank makes progress."""
        self.session.reporter.beat(self.state.progress.step)
