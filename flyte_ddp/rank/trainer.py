"""What one rank does: the page to read first.

`fit` trains, evaluates and checkpoints, epoch by epoch; `train_epoch` and `evaluate` are what they say. Nothing here
knows who started the rank, on how many machines its peers are, or who listens to what it says.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, NonFiniteLoss, StopRequested
from flyte_ddp.events import CheckpointSaved, EpochFinished, Event, HistogramsTaken, PredictionsMade, StepFinished
from flyte_ddp.rank import inspection as describe
from flyte_ddp.rank.checkpoint import CheckpointStore, load_state, portable
from flyte_ddp.rank.data import Samples, derived_seed, epoch_shares, evaluation_share, num_batches, open_samples
from flyte_ddp.rank.world import World
from flyte_ddp.recipes import Recipe

PULSE_SECONDS = 1.0  # how often the ranks ask each other whether somebody wants them to stop
TIMED_INTERVAL = 10  # steps between two exchanges that DDP's timers measure on CPUs, after the first ten
PREDICTION_BATCH, NUM_PREDICTION_BATCHES = 32, 10  # of the held-out data, to show

# What a checkpoint fixes for whoever goes on from it. The rest may change: more epochs, other intervals, more ranks.
FIXED_BY_CHECKPOINT = (
    "seed",
    "global_batch_size",
    "optimizer",
    "learning_rate",
    "momentum",
    "weight_decay",
    "schedule",
    "warmup_steps",
    "gradient_clip_norm",
    "precision",
    "sync_batch_norm",
    "recipe_options",
)


class Supervisor(Protocol):
    """What the loop knows of whoever started it."""

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to end the run. The others may not have been, or not yet."""

    def beat(self, step: int) -> None:
        """Take note that this rank gets on; `step` counts optimizer steps from the start of the run."""

    def emit(self, event: Event) -> None:
        """Pass `event` on to the listeners. Only rank 0 calls it."""


@dataclass
class Progress:
    """How far the run is: with the weights and the optimizer's state, all that a checkpoint holds.

    There is no random state in it. Every draw is seeded by what it is for (epoch, step, rank, sample), so a resumed run
    repeats the draws of an uninterrupted one.
    """

    step: int = 0  # optimizer steps since the start of the run
    epoch: int = 1  # the one under way, from 1
    batch: int = 0  # global batches of it that are done
    loss_sum: float = 0.0  # of it, over the targets of all ranks up to the last checkpoint
    num_targets: float = 0.0  # likewise
    seconds: float = 0.0  # likewise, wall-clock
    epochs: list[EpochFinished] = field(default_factory=list)

    @property
    def best(self) -> EpochFinished | None:
        """The first of the finished epochs that has the best accuracy."""
        return max(self.epochs, key=lambda finished: finished.accuracy, default=None)


@dataclass
class Tally:
    """Sums over the samples of a stretch of training. The loss stays on the device: reading it would wait for it."""

    loss_sum: Tensor
    own_targets: float | Tensor = 0.0  # of this rank
    num_targets: float | Tensor = 0.0  # of all ranks
    num_samples: int = 0  # of all ranks
    num_steps: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


class Trainer:
    """One rank's model, optimizer and place in the run.

    Args:
        model: on `world.device`, with the same weights on every rank.
        train, test: samples that the ranks share.
        store: where checkpoints go; the same place for every rank, though only rank 0 writes.
        data_fingerprint: noted in checkpoints, so that none is continued on other data.
        initial_state: URL of the state dict from which the run starts where there is no checkpoint yet; noted in
            checkpoints likewise. "" leaves the model's own weights.

    Raises:
        ConfigError: the global batch cannot be shared evenly.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: TrainingConfig,
        world: World,
        model: nn.Module,
        train: Samples,
        test: Samples,
        store: CheckpointStore,
        supervisor: Supervisor,
        data_fingerprint: str = "",
        initial_state: str = "",
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.world = world
        self.model = model
        self.train = train
        self.test = test
        self.store = store
        self.supervisor = supervisor
        self.data_fingerprint = data_fingerprint
        self.initial_state = initial_state
        self.batch_size = config.batch_size_per_rank(world.world_size)
        self.num_steps = config.epochs * num_batches(train, config)
        self.progress = Progress()
        self.evaluated_model, self.replica = _wrapped(model, config, world)
        self.optimizer = build_optimizer(model, config)
        self.schedule = LambdaLR(self.optimizer, lambda step: learning_rate_factor(config, step, self.num_steps))
        self.first_step_at = 0.0  # seconds since the epoch
        self._num_replaced = 0  # before the current epoch, of this rank
        self._watch = _LossWatch(world)
        self._next_pulse, self._last_pulse = 0, (0, time.perf_counter())

    def fit(self) -> Progress:
        """Train the epochs that are not done yet.

        Raises:
            NonFiniteLoss: names the step and the epoch.
            StopRequested: the supervisor asked for it; a checkpoint says where the run stands.
            CheckpointError: a checkpoint could not be written.
        """
        while self.progress.epoch <= self.config.epochs:
            tally, own_seconds = self.train_epoch()
            evaluation = self.evaluate()
            finished = self._finish_epoch(tally, own_seconds, evaluation)
            self.save_checkpoint(best=finished is self.progress.best)
        self.store.wait()
        return self.progress

    def train_epoch(self) -> tuple[Tally, float]:
        """Take the optimizer steps of the current epoch that are not done yet.

        Returns:
            What was summed up on the way, and the mean seconds per step that this rank spent on loading and the forward
            pass, before it had to wait for the others: a straggler's is larger.
        """
        config, world, progress = self.config, self.world, self.progress
        shares = epoch_shares(self.train, config, world, progress.epoch, progress.batch)
        batches = self.train.batches([index for share in shares for index in share.micro_batches], progress.epoch)
        earlier = dataclasses.replace(progress)  # the epoch's sums as an earlier attempt left them
        self._num_replaced = self.train.num_replaced + self.test.num_replaced
        epoch_tally, log_tally, own_seconds = self._tally(), self._tally(), 0.0
        self.replica.train()
        describe.keep_frozen_statistics(self.model)

        for share in shares:
            self.optimizer.zero_grad()
            step_loss = torch.zeros((), device=world.device)
            for micro_batch in range(len(share.micro_batches)):
                begun = time.perf_counter()
                inputs, targets = next(batches)
                self._seed_forward(micro_batch)
                # Gradients are exchanged once per optimizer step, with its last micro-batch.
                exchanges = micro_batch == len(share.micro_batches) - 1 or world.world_size == 1
                with nullcontext() if exchanges else self.replica.no_sync():
                    loss_sum = self._losses(self.replica, inputs, targets).sum() * share.weight
                    own_seconds += time.perf_counter() - begun
                    # DDP averages over the ranks. Times their number that is the sum, and over the targets of the whole
                    # global batch the mean, however the batch was shared: the uneven last one included.
                    (loss_sum * (world.world_size / share.num_targets)).backward()
                step_loss += loss_sum.detach()
            self._watch.add(step_loss, progress)

            is_logged = (progress.step + 1) % config.log_interval == 0 or progress.step == 0
            gradient_norm = self._clip(needed=is_logged)
            self.optimizer.step()
            self.schedule.step()
            progress.step += 1
            progress.batch += 1
            for tally in (epoch_tally, log_tally):
                tally.loss_sum += step_loss
                tally.own_targets += share.own_targets
                tally.num_targets += share.num_targets
                tally.num_samples += share.num_samples
                tally.num_steps += 1
            if not self.first_step_at:
                self.first_step_at = time.time()
            self.supervisor.beat(progress.step)

            if is_logged:
                self._report_step(log_tally, gradient_norm)
                log_tally = self._tally()
            stops = self._stop_agreed()
            if stops or (config.checkpoint_interval and progress.step % config.checkpoint_interval == 0):
                self._settle(epoch_tally, earlier)
                self.save_checkpoint(best=False)
            if stops:
                self.store.wait()
                raise StopRequested
        self._settle(epoch_tally, earlier)
        return epoch_tally, own_seconds / max(1, epoch_tally.num_steps)

    def evaluate(self) -> tuple[float, float, float]:
        """Measure the model on the held-out samples, each counted once, on all ranks.

        The unwrapped model runs, because a forward pass of the wrapped one is a collective, and the ranks' shares may
        differ in length.

        Returns:
            (mean loss per target, share of targets predicted right, wall-clock seconds).

        Raises:
            NonFiniteLoss: the last step has spoiled the weights.
        """
        started = time.perf_counter()
        self._share_buffers()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        num_correct = torch.zeros((), dtype=torch.float64, device=self.world.device)
        num_targets: float | Tensor = 0.0
        share = evaluation_share(self.test, self.config, self.world)
        with describe.evaluating(self.model):
            for index, (inputs, targets) in zip(share, self.test.batches(share, epoch=0), strict=True):
                with self._autocast():
                    outputs = self.evaluated_model(self.prepared(inputs))
                loss_sum += self.recipe.losses(outputs, targets).sum()
                num_correct += self.recipe.num_correct(outputs, targets).sum()
                num_targets += self.test.num_targets(index)
                self.supervisor.beat(self.progress.step)
        total_loss, total_correct, total = self.world.sum(loss_sum, num_correct, num_targets)
        if not math.isfinite(total_loss):
            raise NonFiniteLoss(
                f"the loss on the held-out data is {total_loss / total} after step {self.progress.step} "
                f"(epoch {self.progress.epoch}); a lower learning_rate, warmup_steps or gradient_clip_norm may help"
            )
        return total_loss / total, total_correct / total, time.perf_counter() - started

    def predict(self) -> PredictionsMade:
        """What the model makes of the first held-out samples, for people to look at."""
        shown = min(len(self.test), PREDICTION_BATCH * NUM_PREDICTION_BATCHES)
        indices = torch.arange(shown, device=self.world.device).split(PREDICTION_BATCH)
        batches = self.test.batches(indices, epoch=0)
        return PredictionsMade(
            self.progress.epoch - 1, describe.predictions_of(self.recipe, self.model, self.prepared, batches)
        )

    def save_checkpoint(self, best: bool) -> None:
        """Put all that is needed to go on from here into the store. Every rank calls it; rank 0 writes."""
        self._watch.settle()  # weights that a bad loss has spoiled must not replace good ones
        if not self.world.is_first:
            return
        started = time.perf_counter()
        state = {
            "config": dataclasses.asdict(self.config),
            "data_fingerprint": self.data_fingerprint,
            "initial_state": self.initial_state,
            "progress": dataclasses.asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        url = self.store.save(state, self.progress.step, best)
        seconds = time.perf_counter() - started
        self.supervisor.emit(CheckpointSaved(self.progress.step, url, best, seconds))

    def resume(self) -> tuple[str, list[str]]:
        """Go on from the newest checkpoint in the store, else start from the initial state, if there is one.

        Every rank calls it; rank 0 chooses.

        Returns:
            The checkpoint's URL, "" for none, and why each newer one was passed over; both on rank 0 only.

        Raises:
            ConfigError: the checkpoint belongs to a run with other data, other hyperparameters or another initial
                state; the initial state is not one of this model.
            CheckpointError: what rank 0 could read, this rank cannot.
        """
        state, url, skipped = self.store.load_latest() if self.world.is_first else (None, "", [])
        # Were each rank to choose, one that failed to read the newest would quietly train from older weights.
        step = int(self.world.sum(state["progress"]["step"] if state else 0)[0])
        if step:
            self._restore(state or self.store.load(step), url or self.store.storage.url)
        elif self.initial_state:
            load_initial_state(self.model, self.initial_state)
        return url, skipped

    def _restore(self, state: dict[str, Any], url: str) -> None:
        ours = dataclasses.asdict(self.config)
        for name in FIXED_BY_CHECKPOINT:
            theirs = state["config"].get(name)
            if theirs != ours[name]:
                raise ConfigError(
                    f"{name}: {ours[name]!r} does not continue {url}, which was written with "
                    f"{theirs!r}; give that value or another place for the checkpoints"
                )
        if state["data_fingerprint"] != self.data_fingerprint:
            raise ConfigError(f"data: {url} was written by a run on other data; give another place for the checkpoints")
        started_from = state.get("initial_state", "")
        if started_from != self.initial_state:
            raise ConfigError(
                f"initial_state: {self.initial_state!r} does not continue {url}, whose run started from "
                f"{started_from!r}; give that or another place for the checkpoints"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        values = dict(state["progress"])
        values["epochs"] = [EpochFinished(**finished) for finished in values["epochs"]]
        self.progress = Progress(**values)
        self._next_pulse, self._last_pulse = self.progress.step, (self.progress.step, time.perf_counter())

    def model_state(self) -> dict[str, Any]:
        """The unwrapped model's state dict on the CPU: no `module.` in its keys, loads without a GPU."""
        return portable(self.model.state_dict())

    def _losses(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            outputs = model(self.prepared(inputs))
        return self.recipe.losses(outputs, targets)

    def prepared(self, batch: Tensor) -> Tensor:
        inputs = self.recipe.inputs(batch)
        if self.config.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def _autocast(self) -> Any:
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16)

    def _seed_forward(self, micro_batch: int) -> None:
        """Draw dropout from what step it is, not from what came before: a restart repeats it.

        After the batch is loaded, because loading in this process draws from the same generator.
        """
        seed = derived_seed(self.config.seed, self.progress.step, self.world.rank, micro_batch)
        torch.default_generator.manual_seed(seed)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _clip(self, needed: bool) -> float:
        """Clip the gradient if configured. Its L2 norm before that where `needed`, else 0: reading it waits for it."""
        if self.config.gradient_clip_norm:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip_norm)
        elif needed:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
        return float(norm) if needed else 0.0

    def _tally(self) -> Tally:
        return Tally(torch.zeros((), dtype=torch.float64, device=self.world.device))

    def _settle(self, tally: Tally, earlier: Progress) -> None:
        """Put the epoch's sums over all ranks, `earlier` attempts' and those of `tally`, into the progress."""
        self.progress.loss_sum = earlier.loss_sum + self.world.sum(tally.loss_sum)[0]
        self.progress.num_targets = earlier.num_targets + float(tally.num_targets)
        self.progress.seconds = earlier.seconds + tally.seconds

    def _last_learning_rate(self) -> float:
        """Of the last optimizer step, also where an earlier attempt took it."""
        return self.config.learning_rate * learning_rate_factor(self.config, self.progress.step - 1, self.num_steps)

    def _report_step(self, tally: Tally, gradient_norm: float) -> None:
        loss_sum = self.world.sum(tally.loss_sum)[0]
        if self.world.is_first:
            self.supervisor.emit(
                StepFinished(
                    step=self.progress.step,
                    epoch=self.progress.epoch,
                    loss=loss_sum / float(tally.num_targets),
                    learning_rate=self._last_learning_rate(),
                    gradient_norm=gradient_norm,
                    samples_per_second=tally.num_samples / tally.seconds,
                )
            )

    def _finish_epoch(self, tally: Tally, own_seconds: float, evaluation: tuple[float, float, float]) -> EpochFinished:
        """Draw up the epoch's results, tell them, and turn to the next epoch."""
        progress = self.progress
        test_loss, accuracy, evaluation_seconds = evaluation
        finished = EpochFinished(
            epoch=progress.epoch,
            step=progress.step,
            train_loss=progress.loss_sum / progress.num_targets,
            test_loss=test_loss,
            accuracy=accuracy,
            learning_rate=self._last_learning_rate(),
            seconds=progress.seconds,
            samples_per_second=len(self.train) / progress.seconds,
            evaluation_seconds=evaluation_seconds,
            rank_losses=self.world.gather(float(tally.loss_sum) / max(1.0, float(tally.own_targets))),
            rank_step_seconds=self.world.gather(own_seconds),
            num_replaced=int(self.world.sum(self.train.num_replaced + self.test.num_replaced - self._num_replaced)[0]),
            **self._exchange_seconds(),
        )
        if self.world.is_first:
            self.supervisor.emit(finished)
            self.supervisor.emit(HistogramsTaken(progress.step, *describe.histograms_of(self.model)))
        progress.epochs.append(finished)
        progress.epoch += 1
        progress.batch = 0
        progress.loss_sum = progress.num_targets = progress.seconds = 0.0
        return finished

    def _exchange_seconds(self) -> dict[str, list[float]]:
        """What DDP's own timers say of the exchange of gradients: each rank's means per step, for `EpochFinished`.

        From the first bucket's departure to the last one's arrival, and how much of that the backward pass covered.
        """
        if self.world.world_size == 1:
            return {}
        said = getattr(self.replica, "_orig_mod", self.replica)._get_ddp_logging_data()
        exchange, overlap = (
            said.get(f"avg_backward_{what}_time", 0) / 1e9 for what in ("comm", "compute_comm_overlap")
        )
        return {
            "rank_wait_seconds": self.world.gather(max(0.0, exchange - overlap)),
            "rank_overlap_seconds": self.world.gather(overlap),
        }

    def _stop_agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks get the same answer after the same step.

        Asked about once a second, not every step: the answer is a collective. Rank 0's pace decides when next.
        """
        step, now = self.progress.step, time.perf_counter()
        if step < self._next_pulse:
            return False
        last_step, last_time = self._last_pulse
        pace = (step - last_step) / (now - last_time) if self.world.is_first else 0.0
        wanted, pace = self.world.sum(float(self.supervisor.stop_requested), pace)
        self._next_pulse, self._last_pulse = step + max(1, round(pace * PULSE_SECONDS)), (step, now)
        return wanted > 0

    def _share_buffers(self) -> None:
        """Give every rank rank 0's buffers, such as BatchNorm's running statistics: those that are saved."""
        if self.world.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)


class _NobodyElse:
    """The supervisor of a trainer that only evaluates: nobody wants it to stop, and nobody listens."""

    stop_requested = False

    def beat(self, step: int) -> None:
        pass

    def emit(self, event: Event) -> None:
        pass


def evaluate_state(
    recipe: Recipe, config: TrainingConfig, state: Mapping[str, Any], directory: Path
) -> tuple[float, float]:
    """Measure `state` on the held-out data of `recipe` in `directory`, in this process, on its GPU if it has one.

    By `Trainer.evaluate`, so the figures compare with those of a run's epochs.

    Returns:
        (mean loss per target, share of targets predicted right).

    Raises:
        ConfigError: the state is not one of the recipe's model; names the keys that do not fit.
        NonFiniteLoss: the loss is not a number.
    """
    world = World(0, 0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = dataclasses.replace(config, compile=False)  # which takes longer than one pass over the data
    _, test = recipe.datasets(directory)
    samples = open_samples(test, recipe, config, world)
    model = recipe.model()
    if problem := mismatch(model.state_dict(), state):
        raise ConfigError(f"the state does not fit the model: {problem}")
    model.load_state_dict(state)
    model = model.to(world.device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    # It keeps no checkpoint and takes no step, so neither the store nor the training data is touched.
    store = CheckpointStore(str(directory), num_kept=1)
    trainer = Trainer(recipe, config, world, model, samples, samples, store, _NobodyElse())
    loss, accuracy, _ = trainer.evaluate()
    return loss, accuracy


def load_initial_state(model: nn.Module, url: str) -> None:
    """Give `model` the weights and buffers of the state dict at `url`, all of them or none.

    Raises:
        ConfigError: there is no state dict, or not one of this very model; names the keys that do not fit.
    """
    accepted = "accepted is a state dict with exactly the model's keys and shapes"
    try:
        state = load_state(url)
    except (FileNotFoundError, pickle.UnpicklingError, RuntimeError, EOFError) as error:  # the middle two are torch's
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"initial_state: {url!r} cannot be read: {type(error).__name__}: {reason}; {accepted}"
        ) from error
    if problem := mismatch(model.state_dict(), state):
        raise ConfigError(f"initial_state: {url!r} does not fit the model: {problem}; {accepted}")
    model.load_state_dict(state)


def mismatch(expected: Mapping[str, Any], state: Any) -> str:
    """What keeps `state` from being loaded where `expected` is the model's state dict, in words; "" for nothing."""
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    problems = {
        "it lacks": [key for key in expected if key not in state],
        "the model has no": [str(key) for key in state if key not in expected],
        "other shapes at": [
            f"{key} {_shape(state[key])} instead of {_shape(value)}"
            for key, value in expected.items()
            if key in state and _shape(state[key]) != _shape(value)
        ],
    }
    return "; ".join(f"{name} {_listed(keys)}" for name, keys in problems.items() if keys)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class _LossWatch:
    """Raises at the first loss that is not finite: on a CPU at once, on a GPU as soon as the value has come over.

    Waiting for each loss would leave the GPU idle between steps, so the copies run behind, by a few steps at most.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.pending: deque[tuple[Tensor, Any, int, int]] = deque()

    def add(self, loss: Tensor, progress: Progress) -> None:
        if self.world.device.type != "cuda":
            self._check(loss, progress.step + 1, progress.epoch)
            return
        copied = loss.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending.append((copied, event, progress.step + 1, progress.epoch))
        while self.pending and self.pending[0][1].query():
            value, _, step, epoch = self.pending.popleft()
            self._check(value, step, epoch)

    def settle(self) -> None:
        """Wait for the values that are still on their way."""
        while self.pending:
            value, event, step, epoch = self.pending.popleft()
            event.synchronize()
            self._check(value, step, epoch)

    def _check(self, loss: Tensor, step: int, epoch: int) -> None:
        value = float(loss)
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the loss is {value} at step {step} (epoch {epoch}) on rank {self.world.rank}; "
                "a lower learning_rate, warmup_steps or gradient_clip_norm may help, or the data holds such values"
            )


def build_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """The configured optimizer over the parameters of `model` that are trained, fused into one kernel per step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.momentum, weight_decay=decay, fused=True)
    optimizer = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return optimizer(parameters, lr=rate, weight_decay=decay, fused=True)


def learning_rate_factor(config: TrainingConfig, step: int, num_steps: int) -> float:
    """What the peak learning rate is multiplied with at optimizer step `step` of `num_steps`, in [0, 1].

    A function of the step alone, so that a schedule has nothing to restore and fits any change of the run's length.
    one_cycle takes its shape from Smith, "Super-Convergence" (2018), with torch's defaults: from 1/25 up over the first
    30 %, then down to 1/250,000, both along a cosine.
    """
    if config.schedule == "one_cycle":
        rise = max(1.0, 0.3 * num_steps)
        if step < rise:
            return _cosine(1 / 25, 1.0, step / rise)
        return _cosine(1.0, 1 / 250_000, (step - rise) / max(1.0, num_steps - rise))
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    return _cosine(1.0, 0.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2


def _wrapped(model: nn.Module, config: TrainingConfig, world: World) -> tuple[Any, Any]:
    """(what evaluates, what trains): the model itself, compiled and under DDP as configured."""
    replica: Any = model
    if world.world_size > 1:
        on_gpu = world.device.type == "cuda"
        replica = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if on_gpu else None,
            gradient_as_bucket_view=True,  # saves a copy of every gradient
        )
        if not on_gpu:  # where each timed step would wait for the device, DDP's own interval of 100 stays
            replica._set_ddp_runtime_logging_sample_rate(TIMED_INTERVAL)
    if config.compile:
        return torch.compile(model), torch.compile(replica)
    return model, replica
