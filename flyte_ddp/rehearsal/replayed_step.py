"""Replay a step of a recipe's run: load the state before the step, train up to the step's gradient,
and describe the step.

The ordinary trainer takes the steps, so the gradient equals the run's to the bit. Nothing is
written to the run's place.
"""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import functools
import json
import math
import pdb
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flyte_ddp.checkpoints import BAD_STEP, stored_steps
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events.history import plain
from flyte_ddp.rank.nested import tensors_in
from flyte_ddp.rank.plan import BatchShard, EpochShards, epoch_shards, num_batches
from flyte_ddp.rank.session import Session
from flyte_ddp.rank.sharding import whole
from flyte_ddp.training.main import keep_beating, main, open_trainer
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.passes import gradient_norm
from flyte_ddp.training.progress import Progress
from flyte_ddp.training.trainer import Trainer
from flyte_ddp.training.watch import LossWatch, WatchedStep


def find_state(place: str, step: int) -> tuple[int, bool, dict[str, Any], list[list[int]]]:
    """Return the newest state before a step: the number of its last step, whether it was kept
    because the step was bad, its values, and the batches that the run has left out so far.

    Raises:
        ConfigError: there is no such state, the run is no recipe's, or the run never took the step.
        CheckpointError: the state is damaged.
    """
    steps = dict.fromkeys(stored_steps(place), False)
    steps |= {bad - 1: True for bad in stored_steps(place, BAD_STEP) if bad == step}
    start = max((each for each in steps if each < step), default=None)
    if start is None:
        found = "none"
        if steps:
            found = f"the first one after step {min(steps)}"
        raise ConfigError(f"replay: expected a state before step {step} in {place}, got {found}")
    store, end = CheckpointStore(place, 1), max(steps)
    states = {each: store.load(each + steps[each], is_bad=steps[each]) for each in {start, end}}
    state = states[start]
    if "position" in state:
        at = ", ".join(f"{name} {state['position'].get(name)}" for name in ("epoch", "num_samples"))
        raise ConfigError(
            "replay: expected a recipe's run, got a function's, whose steps only it can repeat: "
            f"it has a state after step {start} ({at}), and its log names the samples of a step "
            "whose loss is not finite"
        )
    if not state.get("origin", {}).get("code"):
        what = "that has a name, with this version of the library or a later one"
        raise ConfigError(f"replay: expected the run of a recipe {what}, got {place}")
    config = state["config"]
    batches = -(-state["data_facts"]["number of training samples"] // config["global_batch_size"])
    # Each epoch leaves a state, so the run may have gone one epoch beyond the newest state.
    last = batches * min(config["epochs"], end // batches + 1)
    if step > last:
        why = f"because the newest state is that after step {end} of {batches * config['epochs']}"
        raise ConfigError(f"--step: expected at most {last}, {why}, got {step}")
    return start, steps[start], state, states[end]["progress"]["left_out"]


class _Reached(Exception):
    """The gradient of the step is computed, and its update is not done."""


@dataclass(frozen=True)
class ReplayCall:
    """The program of the ranks of a replay. Returns the facts of the step, and the same as text.

    Args:
        step: the step's number, from 1.
        start, is_bad, left_out: see `find_state`.
        num_threads: threads of each rank; 0 for the machine's default.
        without: index or key of a sample to leave out of the step; "" for none.
        terminal: the beginning of the names of a terminal's pipes; "" for none.
    """

    recipe: str
    config: TrainingConfig
    place: str
    step: int
    start: int
    is_bad: bool
    left_out: list[list[int]]
    num_threads: int
    without: str = ""
    terminal: str = ""

    def __call__(self) -> bytes:
        seen = main(self.recipe, self.config, self.replay)
        return json.dumps([plain(seen), describe(seen)]).encode()

    def replay(self, parallelism: Parallelism, current: Session) -> dict[str, Any]:
        """Return the facts of the step, the same on all ranks.

        Raises:
            ConfigError: the run never took the step, or the step has no such sample; also the
                errors of `Trainer.resume`.
        """
        if self.num_threads:
            torch.set_num_threads(self.num_threads)
        trainer, _ = open_trainer(Replay, parallelism, current)
        with keep_beating(trainer.beat):
            trainer.begin(self)
        with contextlib.suppress(_Reached):
            end = trainer.fit().step
            raise ConfigError(f"--step: expected at most {end}, its last one, got {self.step}")
        return trainer.describe(self.terminal)


@dataclass(eq=False)
class _ReducedShards(EpochShards):
    """Shards of an epoch. One batch keeps only some of its samples, each on its rank."""

    batch: int
    left: torch.Tensor  # (B,): the samples that the batch keeps, on all ranks

    def make(self, number: int, batch: torch.Tensor) -> BatchShard:
        if number != self.batch:
            return super().make(number, batch)
        left = [part[torch.isin(part, self.left)] for part in self.split(batch)]
        return self.build(self.left, left)


class _WatchUpTo(LossWatch):
    """Ends the training in a step, after the step's gradient is computed."""

    last_step: int

    def end(self, watched: WatchedStep, num_targets: float | torch.Tensor, at: Progress) -> None:
        super().end(watched, num_targets, at)
        if watched.step == self.last_step:
            raise _Reached


class Replay(Trainer):
    """A trainer that goes up to the gradient of a step, and saves nothing."""

    place = 0, 0  # epoch and batch of the step
    samples: Sequence[int] = ()  # the step's samples on all ranks, without the left-out sample

    def begin(self, call: ReplayCall) -> None:
        """Go to the state before the step. Every rank calls it. Raises like `ReplayCall.replay`."""
        trained, config, world = self.state, self.parallelism.config, self.parallelism.world
        self.checkpoints.is_read_only = True
        state = CheckpointStore(call.place, 1).load(
            call.start + call.is_bad, world, trained.boxes(), call.is_bad
        )
        self.checkpoints.notes.check(state, call.place, trained)
        trained.load(state)
        self.watch = self.bad_steps.watch = _WatchUpTo(config, world, self.train)
        self.watch.last_step, self.watch.is_shared = call.step, world.world_size > 1
        self.first: dict[str, Any] = {}  # the first module whose output is not finite
        epoch, batch = divmod(call.step - 1, num_batches(self.train, config))
        self.place, progress = (epoch + 1, batch), trained.progress
        before = [each for each in progress.left_out if each < [progress.epoch, progress.batch]]
        # If the run left out the step itself, the replay takes all steps since the state.
        progress.left_out = call.left_out
        if [*self.place] in call.left_out:
            progress.left_out = before
        alone = dataclasses.replace(world, rank=0, world_size=1)
        whole = epoch_shards(self.train, config, alone, self.place[0])[batch]
        keys = {each: self.watch.key(each) for each in torch.cat([*whole.micro_batches]).tolist()}
        self.samples = [each for each in keys if call.without not in (str(each), keys[each] or " ")]
        if call.without and not 0 < len(self.samples) < len(keys):
            named = ", ".join(keys[each] or str(each) for each in [*keys][:3])
            raise ConfigError(
                f"--without: expected index or key of one of several samples of step "
                f"{call.step}, such as {named}, got {call.without!r}"
            )
        if not config.compile:  # hooks would change a compiled model
            for name, module in trained.model.named_modules():
                module.register_forward_hook(functools.partial(self._look, name))

    def shards(self) -> EpochShards:
        shards, (epoch, batch) = super().shards(), self.place
        if self.state.progress.epoch != epoch:
            return shards
        left = torch.tensor(self.samples, device=self.train.index_device)
        return _ReducedShards(shards.samples, shards.plan, shards.size, batch, left)

    def _look(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Note the first module in the step whose output is not finite. A hook of all modules."""
        is_due = self.state.progress.step == self.watch.last_step - 1 and torch.is_grad_enabled()
        if is_due and not self.first and not _is_finite(outputs):
            self.first = {
                "name": name,
                "kind": type(module).__name__,
                "rank": self.parallelism.world.rank,
                "input_is_finite": _is_finite(inputs),
            }

    def describe(self, terminal: str) -> dict[str, Any]:
        """Return the facts of the step. Every rank calls it.

        Args:
            terminal: debugs the rank of the worst sample; "" for none.
        """
        world, watched, state = self.parallelism.world, self.watch.last, self.state
        assert watched is not None  # the step was reached
        own = [
            [order, each.index, each.key, each.loss, world.rank]
            for order, each in self.watch.rank_samples(watched)
        ]
        every = [
            world.broadcast_object([own, self.first], rank) for rank in range(world.world_size)
        ]
        # A sample that stands in for an empty part is also on its own rank.
        rows = {row[1]: row for found, _ in reversed(every) for row in found}
        worst = sorted(rows.values(), key=lambda row: row[0], reverse=True)
        parameters = dict(state.model.named_parameters())
        gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        scale, norm_of = state.scaler.get_scale(), torch.linalg.vector_norm
        norms = {  # waits for a GPU
            name: float(whole(norm_of(each))) / scale for name, each in gradients.items()
        }
        weights = nn.utils.get_total_norm([each.detach() for each in parameters.values()])
        if terminal:
            self._debug(watched, terminal, worst[0][-1])
        return {
            "step": watched.step,
            "epoch": self.place[0],
            "num_ranks": world.world_size,
            "loss": float(watched.total or 0.0),
            "weights_are_finite": math.isfinite(float(whole(weights))),
            "first_not_finite": next((first for _, first in every if first), None),
            "samples": [
                {"index": index, "key": key, "rank": rank, "loss": loss, "largest_value": order[-1]}
                for order, index, key, loss, rank in worst
            ],
            "gradient_norm": gradient_norm(state.model) / scale,
            "gradient_norms": norms,
        }

    def _debug(self, watched: WatchedStep, terminal: str, rank: int) -> None:
        """Let a terminal debug a rank after its backward pass, while the others wait."""
        world = self.parallelism.world
        if world.rank == rank:
            model, losses = self.state.model, watched.losses  # noqa: F841 - to be looked at
            batch = list(self.train.batches(watched.shard.micro_batches, watched.epoch))  # noqa: F841
            with open(f"{terminal}-in") as stdin, open(f"{terminal}-out", "w") as stdout:
                with contextlib.suppress(bdb.BdbQuit):
                    pdb.Pdb(stdin=stdin, stdout=stdout, nosigint=True).set_trace()
                    stdout.flush()  # Pdb stops here: see model, batch and losses of this rank
        world.all_reduce(0.0)


def _is_finite(value: Any) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors_in(value))


def describe(seen: dict[str, Any]) -> str:
    """Return the facts of a step as text."""
    plural = "s" * (seen["num_ranks"] > 1)
    lines = [
        f"step {seen['step']} (epoch {seen['epoch']}) on {seen['num_ranks']} rank{plural}: loss "
        f"{seen['loss']:.5g}, gradient's norm {seen['gradient_norm']:.5g}"
    ]
    if not seen["weights_are_finite"]:
        lines.append("the weights were not finite before this step: replay the one before it")
    first = seen["first_not_finite"]
    if first:
        kind = "not finite either"
        if first["input_is_finite"]:
            kind = "finite"
        lines.append(
            f"the first output that is not finite: {first['name'] or 'the model'} "
            f"({first['kind']}) on rank {first['rank']}; its input is {kind}"
        )
    samples = []
    for each in seen["samples"]:
        start = f"{each['index']:<8}{each['rank']:<6}{each['loss']:<12.5g}"
        samples.append(f"{start}{each['largest_value']:<15.5g}{each['key']}".rstrip())
    norms = [f"{norm:<14.5g}{name}" for name, norm in seen["gradient_norms"].items()]
    head = "sample  rank  loss        largest value  key"
    return "\n".join([*lines, "", head, *samples, "", "gradient norm parameter", *norms])
