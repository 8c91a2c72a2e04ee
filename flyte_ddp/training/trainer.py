"""The training loop of one rank: the page to read first.

`fit` trains, evaluates and checkpoints, epoch by epoch. Nothing here knows what started the rank,
on how many machines its peers are, or what becomes of the events that it emits.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.checkpoints.assembly import BoxOf
from flyte_ddp.checkpoints.state import count_bytes
from flyte_ddp.config.by_value import is_by_value
from flyte_ddp.config.typed_command import own_command
from flyte_ddp.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteLoss,
    StopRequested,
    in_one_line,
    log_failures,
)
from flyte_ddp.events import (
    EpochFinished,
    HistogramsTaken,
    PredictionsMade,
    Reported,
    StepFoundBad,
    find_best,
)
from flyte_ddp.rank.agreement import Facts, check_checkpoint, describe_samples
from flyte_ddp.rank.data import BatchShard, EpochShards, Samples, epoch_shards, num_batches
from flyte_ddp.rank.memory_interval import MemoryInterval
from flyte_ddp.rank.session import Session
from flyte_ddp.rank.sharding import load_model, load_optimizer, own_boxes
from flyte_ddp.rank.states import check_kind, load_newest
from flyte_ddp.rank.step_timer import StepTimer
from flyte_ddp.recipes import list_class_names
from flyte_ddp.storage import redact_url, redact_values
from flyte_ddp.storage.hidden import OPTIONS, hash_hidden
from flyte_ddp.training import inspection
from flyte_ddp.training.average import WeightAverage
from flyte_ddp.training.batch_norm import keep_frozen_statistics
from flyte_ddp.training.evaluation import Evaluation, evaluate, sample_utilization, share_buffers
from flyte_ddp.training.initial_state import (
    check_same_run,
    load_initial_state,
    recorded_config,
)
from flyte_ddp.training.metrics import check_monitor, read_figures
from flyte_ddp.training.optim import Schedule, has_modes, open_optimizer
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.passes import clip_gradients, compute_gradients, gradient_norm
from flyte_ddp.training.progress import MetricSums, Progress, Stretch
from flyte_ddp.training.trial import check_length, check_schedule
from flyte_ddp.training.watch import LossWatch, WatchedStep
from flyte_ddp.world import call_together

REMEDY = (
    "a lower learning_rate, warmup_steps or gradient_clip_norm may help, or the data holds "
    "such values"
)
# of fp16, which begins with 65536 and is halved by each gradient that overflows
MIN_LOSS_SCALE = 2.0**-10
MAX_NAMED = 3  # samples, in an error
MAX_REWINDS = 3  # to one state
LONG_EVALUATION = 5.0  # seconds after which an evaluation saves what was trained before it

logger = logging.getLogger(__name__)


class _Rewound(Exception):
    """The run has gone back to a state, from which the epoch is to go on."""


@dataclass(eq=False)
class Trainer:
    """One rank's model, optimizer and progress."""

    parallelism: Parallelism
    model: nn.Module  # from `open_model`, with the same weights on every rank
    train: Samples  # samples that the ranks share
    test: Samples
    # of the rank, whose checkpoints are open; the ranks of a split model are their `peers`
    session: Session
    data_fingerprint: str = ""  # noted in checkpoints, so that none is continued on other data
    recipe_version: str = ""  # SHA-256 of the recipe's code, noted likewise
    # of `describe_samples`; noted there as well
    data_facts: Facts = dataclasses.field(default_factory=dict)
    # what else replays need: "recipe" and "data" as they were given, "code" by file, "num_ranks"
    # and "num_threads" of each
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)
    progress: Progress = dataclasses.field(default_factory=Progress)
    # of the run that this one goes on from; 0 where there is none
    num_ranks_before: int = 0
    first_step_at: float = 0.0  # seconds since the epoch
    # the run goes on from the state of the best epoch, which the store lacks
    _best_is_unsaved: bool = False
    _buffers: list[Tensor] = dataclasses.field(default_factory=list)  # as they were before the step
    # what could not be shown in this attempt: it is logged once
    _failed: set[str] = dataclasses.field(default_factory=set)
    _num_unreadable: int = 0  # before the current epoch, of this rank

    def __post_init__(self) -> None:
        parallelism, model = self.parallelism, self.model
        recipe = self.recipe = parallelism.recipe
        config, world = self.config, self.world = parallelism.config, parallelism.world
        self.hidden = hash_hidden(dataclasses.asdict(config))
        self.scaler = parallelism.scaler
        self.store = self.session.saver.open()
        self.store.returns_to_best = config.model_state == "best"
        self.num_steps = config.epochs * num_batches(self.train, config)
        self.evaluated_model, self.replica = parallelism.shard(model)
        parallelism.watch_passes(self.replica, model, self.session.open_store)
        self.optimizer = open_optimizer(recipe, model, config, parallelism.has_fused_sgd)
        self.schedule = Schedule(recipe, self.optimizer, config, self.num_steps)
        self.average = WeightAverage(model, config.ema_decay, self.optimizer)
        self.timer = StepTimer(self.session.process.link.set_pace, world.device)
        parallelism.watch(self.timer, model)
        self.watch = LossWatch(config, world, self.train)
        # a bad step is to be known before its update, for which each step waits
        self._takes_back = config.on_bad_step != "stop"
        self.sample_utilization = sample_utilization(model, parallelism)
        self.saved_at = time.monotonic()  # of the last checkpoint, or the start
        self.memory_interval = MemoryInterval(
            config.memory_interval, self.session.process, world, self._count_bytes
        )

    def fit(self) -> Progress:
        """Train the epochs that are not done yet.

        Raises:
            NonFiniteLoss: names the step and the epoch.
            StopRequested: the run is to end; a checkpoint has the progress.
            StorageUnavailable: the store has been away for `store_timeout`.
            CheckpointError: a checkpoint could not be written.
            ConfigError: the recipe has no figure called `monitor.metric`.
        """
        if self._best_is_unsaved:
            self.save_checkpoint(best=True)
        while not self.is_done:
            try:
                sums, own_seconds = self.train_epoch()
            except _Rewound:
                continue
            if self.average.is_needed:  # which puts these buffers back
                share_buffers(self.evaluated_model, self.world)
            with self.average.in_place():
                finished = self._finish_epoch(sums, own_seconds, self.evaluate())
            is_best = finished is self.best
            if is_best or finished.share == 1 or self.is_done:
                self.save_checkpoint(is_best)
        self.store.has_finished = True
        self.session.saver.wait()
        return self.progress

    @property
    def best(self) -> EpochFinished:
        """The best of the finished epochs, by `config.monitor`."""
        best = find_best(self.progress.epochs, self.config.monitor)
        assert best is not None  # there is one
        return best

    @property
    def is_done(self) -> bool:
        """True once all epochs are trained, or `patience` of the evaluations were not better than
        one before.
        """
        epochs, patience = self.progress.epochs, self.config.patience
        return self.progress.epoch > self.config.epochs or bool(
            patience and epochs and self.best not in epochs[-patience:]
        )

    def load_model_state(self) -> EpochFinished:
        """Go back to the weights that the run returns, and return their epoch. Every rank calls it.

        They are the last epoch's also where the checkpoint of the best one is missing or damaged,
        with a warning.
        """
        kept = self.progress.epochs[-1]
        if self.config.model_state == "best" and self.best is not kept:
            try:
                state = self.store.load(self.best.step, self.world, self._boxes())
                load_model(self.model, state["model"])
                if has_modes(self.optimizer):  # it has a part of the weights to evaluate
                    load_optimizer(self.optimizer, state["optimizer"])
                self.average.load(state.get("average", {}))
                kept = self.best
            except CheckpointError as error:
                logger.warning(
                    "the model state is that of epoch %d, and not of the best: %s",
                    kept.epoch,
                    error,
                )
        self.average.keep()
        return kept

    def train_epoch(self) -> tuple[MetricSums, float]:
        """Take the optimizer steps of the current epoch that are not done yet, those up to the next
        evaluation.

        Returns:
            The sums over these steps, and the mean seconds per step that this rank spent on its own
            part of them, without its waits for the others: a straggler's are more.
        """
        progress, shards = self.progress, self._shards()
        end = self._find_end(len(shards))
        batches = self._read(shards, end)
        stretch = self.stretch = Stretch(self.world.device, dataclasses.replace(progress))
        own_seconds = sum(self.timer.seconds)
        self._num_unreadable = self.train.num_unreadable + self.test.num_unreadable
        self.replica.train()
        keep_frozen_statistics(self.model)

        while progress.batch < end:
            if [progress.epoch, progress.batch] in progress.left_out:
                self._count_step()
                continue
            gradient_norm = self.step(shards[progress.batch], batches)
            self.boundary(gradient_norm)

        self._check_loss()
        self._update_progress()
        own_seconds = sum(self.timer.seconds) - own_seconds
        return stretch.sums, own_seconds / max(1, stretch.sums.num_steps)

    def step(self, shard: BatchShard, batches: Iterator[tuple[Any, ...]]) -> float:
        """Take an optimizer step, if neither its loss nor its gradient is bad.

        Args:
            shard: this rank's part of the step's global batch.
            batches: yields its micro-batches next.

        Returns:
            The norm of the gradient; NaN or 0 where nobody asks for it.
        """
        progress = self.progress
        is_asked_for = self._is_logged(progress.step + 1) or self._takes_back
        if self._takes_back:
            self._buffers = [each.clone() for each in self.model.buffers()]
        self.optimizer.zero_grad()
        watched = WatchedStep(shard, self.watch.is_shared)
        loss_sum, own_targets, num_targets = compute_gradients(
            self.replica, self.parallelism, batches, progress.step, self.timer, watched
        )
        self.watch.end(watched, num_targets, progress)
        norm = math.nan
        if not self._check_loss(may_wait=is_asked_for):
            self.scaler.unscale_(self.optimizer)
            norm = clip_gradients(self.model, self.parallelism, is_asked_for)
            self._check_gradient(watched, norm)
        if progress.left_out[-1:] != [[progress.epoch, progress.batch]]:
            progress.learning_rate = self.schedule.begin_step(progress.step)
            self.scaler.step(self.optimizer)  # not where a gradient overflows
            self.scaler.update()
            self.average.update(progress.step)
            for sums in (self.stretch.since_log, self.stretch.sums):
                sums.add(loss_sum, own_targets, num_targets, shard.num_samples)
        self._count_step()
        return norm

    def boundary(self, gradient_norm: float) -> None:
        """Do what is due between two steps: report, save, stop.

        Raises:
            StopRequested: the run is to end; a checkpoint has the progress.
            StorageUnavailable, CheckpointError: a checkpoint could not be written.
        """
        step = self.progress.step
        self.timer.end_step()
        self.first_step_at = self.first_step_at or time.time()
        self.beat()
        self.store.check()
        is_logged = self._is_logged(step)
        if is_logged and self.stretch.since_log.num_steps:
            self._report_step(self.stretch.begin_log(), gradient_norm)
        stops = self.session.stop.poll()
        to_store = stops or self._is_checkpoint_due(is_logged)
        if to_store or self.memory_interval.is_due(step):
            self._save_between_steps(to_store)
        if stops:
            self.session.saver.wait()
            raise StopRequested

    def _save_between_steps(self, to_store: bool) -> None:
        self._check_loss()
        # to wait for what is queued and for other ranks is no part of the cost
        self.world.all_reduce(0.0)
        started = time.perf_counter()
        self._update_progress()
        is_kept = self.save_checkpoint(best=False, to_store=to_store)
        if not to_store:
            self.memory_interval.measure(started, is_kept)

    def _count_step(self) -> None:
        """Note that a step is done, or left out."""
        self.schedule.end_step()
        self.progress.step += 1
        self.progress.batch += 1

    def _is_logged(self, step: int) -> bool:
        """Return whether a step is reported; `step` counts from 1."""
        return step % self.config.log_interval == 0 or step == 1

    def _find_end(self, num_batches: int) -> int:
        """Return the batch before which the next evaluation is due."""
        progress, interval = self.progress, self.config.evaluation_interval
        if not interval:
            return num_batches
        evaluated = progress.epochs[-1].step if progress.epochs else 0
        left = evaluated + interval - progress.step
        return min(num_batches, progress.batch + max(0, left))

    def _read(self, shards: EpochShards, end: int) -> Iterator[tuple[Any, ...]]:
        """Yield the micro-batches up to batch `end`, without those of batches that are left out."""
        epoch, first = self.progress.epoch, self.progress.batch
        kept = (
            shard
            for batch, shard in enumerate(shards.read(first, end), first)
            if [epoch, batch] not in self.progress.left_out
        )
        return self.train.batches((index for shard in kept for index in shard.micro_batches), epoch)

    def _is_checkpoint_due(self, is_logged: bool) -> bool:
        """Return whether the step just done is one after which the config asks for a checkpoint.

        By the clock it is rank 0 that decides, where the ranks wait for each other anyway.
        """
        interval, minutes = self.config.checkpoint_interval, self.config.checkpoint_minutes
        if interval and self.progress.step % interval == 0:
            return True
        if not (minutes and is_logged):
            return False
        is_late = self.world.is_first and time.monotonic() - self.saved_at >= 60 * minutes
        return bool(self.world.all_reduce(float(is_late))[0])

    def _shards(self) -> EpochShards:
        """Return this rank's shards of the current epoch."""
        return epoch_shards(self.train, self.config, self.world, self.progress.epoch)

    def evaluate(self) -> Evaluation:
        """Measure the model on the held-out data. What was trained before is saved if that takes
        long, or on a stop.

        Raises:
            NonFiniteLoss: the last step has spoiled the weights.
            StopRequested: a run that resumes from the checkpoint starts with this evaluation.
        """
        started, is_saved = time.perf_counter(), False

        def on_batch() -> None:
            nonlocal is_saved
            self.beat()
            stops = self.session.stop.poll()
            # Its length differs between the ranks, which may have to save at once.
            is_long = time.perf_counter() - started > LONG_EVALUATION
            is_long = is_long and not self.parallelism.is_collective
            if not is_saved and (stops or is_long):
                self.save_checkpoint(best=False)
                is_saved = True
            if stops:
                self.session.saver.wait()
                raise StopRequested

        share_buffers(self.evaluated_model, self.world)
        result = evaluate(self.evaluated_model, self.test, self.parallelism, on_batch)
        if not math.isfinite(result.loss):
            raise NonFiniteLoss(
                f"the loss on the held-out data is {result.loss} after step {self.progress.step} "
                f"(epoch {self.progress.epoch}); {REMEDY}"
            )
        return result

    def save_checkpoint(self, best: bool, to_store: bool = True) -> bool:
        """Write a checkpoint of the current state. Every rank calls it; those write that
        `Parallelism.saves` says.

        Args:
            to_store: else in memory alone, where it may be left out.

        Returns:
            True if this rank has written something.
        """
        started = time.perf_counter()
        if to_store:
            self.saved_at = time.monotonic()
        if not self.parallelism.saves:
            return False
        is_kept_in_memory = self.memory_interval.is_on
        with self.average.trained():
            return self.session.saver.write(
                self._state(), self.progress.step, best, started, to_store, is_kept_in_memory
            )

    def _state(self) -> dict[str, Any]:
        """Return what this rank writes of a checkpoint."""
        return {
            "config": redact_values(dataclasses.asdict(self.config)),
            "hidden": self.hidden,
            "data_fingerprint": self.data_fingerprint,
            "recipe": [type(self.recipe).__qualname__, self.recipe_version],
            "data_facts": self.data_facts,
            "origin": self.origin,
            "progress": self.progress.to_dict(),
            **self.average.state_dicts(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def _count_bytes(self) -> int:
        """Return the bytes of what the ranks of this node save of a state."""
        num_savers = min(self.parallelism.num_shards, self.session.process.node.num_ranks)
        return num_savers * count_bytes(self._state())

    def resume(self) -> tuple[str, list[str]]:
        """Go on from the newest state, in memory or in the store, or start from the initial one, if
        one is given.

        Every rank calls it; each file is read by one rank, and the others get from that rank what
        they need of it.

        Returns:
            The checkpoint's URL or where in memory the state was, "" for none; and on rank 0 why
            each newer one was skipped.

        Raises:
            ConfigError: the checkpoint belongs to a run with other data, other hyperparameters or
                another initial state; the initial state is not one of this model.
            StorageUnavailable: the store has been away for `store_timeout`.
        """
        loaded = load_newest(
            self.world, self.session.process, self.store, self._boxes(), self._needed_step
        )
        state, url = loaded.state, loaded.origin
        if state is not None:
            self._check(state, url)
            self._load(state)
            self.num_ranks_before = state.get("origin", {}).get("num_ranks", 0)
            self._best_is_unsaved = (
                loaded.is_in_memory and self._needed_step(state) == state["progress"]["step"]
            )
        elif self.config.initial_model_state:
            config, names = self.config, list_class_names(self.recipe)
            given = config.initial_model_state, config.store_timeout, config.fresh_layers
            call_together(lambda: load_initial_state(self.model, *given, names), self.world)
            self.average.start()
        check_schedule(
            self.model, self.parallelism, self.optimizer, self.schedule, self.progress.step
        )
        return url, loaded.skipped

    def _check(self, state: Mapping[str, Any], url: str) -> None:
        """Check that a state, read at `url`, is of a run that this one may continue. Raises as
        `resume`.
        """
        check_kind(state, url, is_function=False)
        check_same_run(
            state, url, self.config, self.data_fingerprint, self.recipe.changeable_options
        )
        ours = [type(self.recipe).__qualname__, self.recipe_version]
        if state["recipe"] != ours and is_by_value(type(self.recipe)):
            raise ConfigError(
                f"recipe: expected {ours[0]} as it was in the run of {url}, got other code or "
                "other values that it refers to: give other checkpoints"
            )
        # it may be a mistake that was corrected
        if state["recipe"] != ours and self.world.is_first:
            before, now = state.get("origin", {}).get("code", {}), self.origin.get("code", {})
            changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            logger.warning(
                "the run of %s goes on with other code: recipe %s %s, before %s %s%s",
                url,
                *ours,
                *state["recipe"],
                f"; changed: {', '.join(changed)}" if before and changed else "",
            )
        epochs = state["config"]["epochs"]
        check_length(self.model, self.parallelism, self.num_steps, epochs, url)
        theirs, options = recorded_config(state), self.config.recipe_options
        # The samples may differ where an option such as the augmentation has changed.
        if all(theirs.is_same(f"{OPTIONS}.{name}", value) for name, value in options.items()):
            read = functools.partial(
                describe_samples, self.recipe, self.config, self.train, self.test
            )
            check_checkpoint(self.recipe, self.data_facts, read, state, url)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `_state` has returned."""
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state.get("schedule", {}))
        self.scaler.load_state_dict(state.get("scaler", {}))
        self.average.load(state.get("average", {}))
        self.progress = Progress.from_dict(state["progress"])

    def _boxes(self) -> BoxOf:
        averages = {("average", name): each for name, each in self.average.values.items()}
        return own_boxes(self.model, {("optimizer",): self.optimizer}, averages)

    def _needed_step(self, state: Mapping[str, Any]) -> int:
        """Return the step of the checkpoint to which a run from `state` will go back at its end; 0
        for none.
        """
        best = find_best(Progress.from_dict(state["progress"]).epochs, self.config.monitor)
        return best.step if best and self.config.model_state == "best" else 0

    def beat(self) -> None:
        """Report that this rank makes progress."""
        self.session.reporter.beat(self.progress.step)

    def _check_loss(self, may_wait: bool = True) -> bool:
        """Check the losses of the steps so far, that of the last one on a GPU if `may_wait`. Return
        True if the last step is skipped. Raises as `_answer`.
        """
        bad = self.watch.find_bad(self.progress, may_wait)
        if bad:
            self._answer(bad)
        return bad is not None

    def _check_gradient(self, watched: WatchedStep, norm: float) -> None:
        """Answer a gradient that is not finite as a loss, where a step can be taken back. Raises as
        `_answer`.
        """
        if self._takes_back and not self.scaler.is_enabled() and not math.isfinite(norm):
            reason = f"the gradient's norm is {norm}"
            self._answer(self.watch.blame(watched, float(watched.total or 0.0), reason))

    def _answer(self, bad: StepFoundBad) -> None:
        """Skip a bad step, go back to the newest state, or stop. Every rank that judges calls it.

        Raises:
            NonFiniteLoss: the run is to stop, or has done too much of the other; names the samples.
            _Rewound: it has gone back.
        """
        is_shared = self.watch.is_shared
        if self.world.is_first or not is_shared:
            self.session.reporter.emit(bad, from_all=True)
            logger.warning("%s", bad)
        progress, config, why = self.progress, self.config, ""
        self.optimizer.zero_grad()  # else a save would find the bad gradient
        if self._takes_back:
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), self._buffers, strict=True):
                    buffer.copy_(before)
        if self._takes_back and len(progress.rewinds or progress.left_out) >= config.max_bad_steps:
            why = f"; max_bad_steps: {config.max_bad_steps} were met before"
        elif config.on_bad_step == "skip":
            progress.left_out.append([progress.epoch, progress.batch])
            return
        elif config.on_bad_step == "rewind":
            why = f"; on_bad_step: {self._rewind(bad.step)}"
        # Where each rank judges for itself, any of them has the whole, and all write the same file.
        saves = self.parallelism.saves if is_shared else not self.parallelism.is_collective
        if saves and bad.step > progress.step:  # before its update: what a replay begins with
            try:
                self.store.save_bad(self._state(), bad.step, self.beat)
            except Exception as error:  # the bad step is what is to be reported
                logger.warning("the state before it is not kept: %s", in_one_line(error))
        if is_shared:  # the first rank that ends would end one that tells no more
            self.world.all_reduce(0.0)
        place = shlex.quote(redact_url(self.store.storage.url))
        command = f"{own_command()} replay {place} --step {bad.step}"
        # a line of its own, because long lines of an error are cut
        raise NonFiniteLoss(
            f"{bad.describe(MAX_NAMED)}{why}; {REMEDY}\nto build the step once more: {command}"
        )

    def _rewind(self, bad_step: int) -> str:
        """Go back to the newest state, and leave out the batches up to that of a step. Every rank
        calls it.

        Returns:
            Why that cannot be done.

        Raises:
            _Rewound: it is done.
        """
        self.session.saver.note_saves(self.world)
        process = self.session.process
        state = load_newest(self.world, process, self.store, self._boxes(), self._needed_step).state
        if state is None:
            return "there is no state to go back to"
        met, found = self.progress, Progress.from_dict(state["progress"])
        place = [found.epoch, found.batch]
        if met.rewinds.count(place) == MAX_REWINDS:
            return f"the run went back to step {found.step} {MAX_REWINDS} times before"
        self._load(state)
        size = num_batches(self.train, self.config)
        since = [[1 + step // size, step % size] for step in range(found.step, bad_step)]
        self.progress.left_out = met.left_out + [each for each in since if each not in met.left_out]
        self.progress.rewinds = [*met.rewinds, place]
        if self.world.is_first:
            logger.warning(
                "the run goes back to step %d, and leaves out the batches up to step %d",
                found.step,
                bad_step,
            )
        raise _Rewound

    def _update_progress(self) -> None:
        """Set the epoch's sums over all ranks: those of earlier attempts plus the stretch's.

        Raises:
            NonFiniteLoss: a step has spoiled the weights. No checkpoint may be written of them.
        """
        progress, sums, earlier = self.progress, self.stretch.sums, self.stretch.before
        progress.loss_sum = earlier.loss_sum + self.world.all_reduce(sums.loss_sum)[0]
        progress.num_targets = earlier.num_targets + float(sums.num_targets)
        progress.num_samples = earlier.num_samples + sums.num_samples
        progress.seconds = earlier.seconds + sums.seconds
        if self.scaler.is_enabled():  # whose steps are left out where a gradient overflows
            return
        norm = gradient_norm(self.model, self.parallelism)
        if not math.isfinite(norm):
            raise NonFiniteLoss(
                f"the gradient's norm is {norm} at step {progress.step} (epoch "
                f"{progress.epoch}); {REMEDY}"
            )

    def _report_step(self, sums: MetricSums, gradient_norm: float) -> None:
        if self.scaler.is_enabled() and self.scaler.get_scale() < MIN_LOSS_SCALE:
            raise NonFiniteLoss(
                f"precision: every gradient overflows in fp16 up to step {self.progress.step}: "
                "bf16 or fp32 may help, or the gradient is NaN"
            )
        reported = Reported(
            step=self.progress.step,
            epoch=self.progress.step * self.config.epochs / self.num_steps,
            values={
                "loss": self.world.all_reduce(sums.loss_sum)[0] / float(sums.num_targets),
                "learning_rate": self.progress.learning_rate,
                "gradient_norm": gradient_norm,
                "samples_per_second": sums.num_samples / sums.seconds,
            },
        )
        self.session.reporter.emit(reported)
        if self.world.is_first:
            with log_failures("result of on_step", self._failed, (SystemExit,)):
                self.recipe.on_step(reported)

    def _finish_epoch(
        self, sums: MetricSums, own_seconds: float, evaluation: Evaluation
    ) -> EpochFinished:
        """Report the results since the last evaluation, and advance to the next epoch after a whole
        one.
        """
        progress, world = self.progress, self.world
        finished = EpochFinished(
            epoch=progress.epoch,
            step=progress.step,
            train_loss=progress.loss_sum / (progress.num_targets or math.nan),
            test_loss=evaluation.loss,
            learning_rate=progress.learning_rate,
            seconds=progress.seconds,
            samples_per_second=progress.num_samples / progress.seconds,
            evaluation_seconds=evaluation.seconds,
            rank_losses=world.all_gather(float(sums.loss_sum) / max(1.0, float(sums.own_targets))),
            rank_step_seconds=world.all_gather(own_seconds),
            num_unreadable=int(
                world.all_reduce(
                    self.train.num_unreadable + self.test.num_unreadable - self._num_unreadable
                )[0]
            ),
            metrics=evaluation.metrics,
            share=progress.batch / num_batches(self.train, self.config),
            **self.parallelism.exchange_seconds(self.replica),
        )
        with log_failures("figures", self._failed, (SystemExit,)):
            figures = {**finished.metrics, **read_figures(self.recipe, finished)}
            if utilization := self.sample_utilization * finished.samples_per_second:
                figures["model_flops_utilization"] = utilization
            finished = dataclasses.replace(finished, metrics=figures)
        check_monitor(self.config, ["test_loss", *finished.metrics])
        if self.parallelism.saves:
            with log_failures("sample", self._failed, (SystemExit,)):
                finished = dataclasses.replace(
                    finished, sample=inspection.generate_sample(self.model, self.recipe)
                )
            self.session.reporter.emit(finished)
            with log_failures("histograms", self._failed):
                self.session.reporter.emit(
                    HistogramsTaken(
                        progress.step, inspection.take_histograms(self.model, self.parallelism)
                    )
                )
            interval = self.config.prediction_interval
            is_last = progress.epoch == self.config.epochs  # the run's end shows the kept model's
            if interval and finished.share == 1 and progress.epoch % interval == 0 and not is_last:
                self.beat()
                with log_failures("predictions", self._failed, (SystemExit,)):
                    made = inspection.make_predictions(self.model, self.test, self.parallelism)
                    self.session.reporter.emit(PredictionsMade(progress.epoch, made))
        if world.is_first:
            with log_failures("result of on_epoch", self._failed, (SystemExit,)):
                self.recipe.on_epoch(finished)
        self.schedule.end_evaluation(finished)
        progress.note(finished)
        return finished
