"""What a run does about a bad step: it leaves the step out, goes back, or stops."""

from __future__ import annotations

import logging
import math
import shlex
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flyte_ddp.errors import NonFiniteLoss
from flyte_ddp.events import StepFoundBad
from flyte_ddp.process.invocation import find_flyte_ddp_command
from flyte_ddp.storage import redact_url
from flyte_ddp.training.checkpointer import Checkpointer
from flyte_ddp.training.progress import Progress
from flyte_ddp.training.watch import LossWatch, WatchedStep

REMEDY = (
    "a lower learning_rate, warmup_steps or gradient_clip_norm may help, or the data holds "
    "such values"
)
MAX_NAMED = 3  # samples that an error names
MAX_REWINDS = 3  # times that a run goes back to one state

logger = logging.getLogger(__name__)


class Rewound(Exception):
    """The run has gone back to a state. The epoch goes on from there."""


@dataclass(eq=False)
class BadSteps:
    """Answers the steps that are bad, by `config.on_bad_step`."""

    checkpoints: Checkpointer
    watch: LossWatch
    num_batches: int  # batches in an epoch
    _buffers: list[Tensor] = field(default_factory=list)  # the buffers before the step

    def __post_init__(self) -> None:
        self.parallelism, self.state = self.checkpoints.parallelism, self.checkpoints.state
        # A bad step has to be found before its update, so each step waits for its loss.
        self.takes_back = self.parallelism.config.on_bad_step != "stop"

    def begin_step(self) -> None:
        """Keep what a bad step would change before its update."""
        if self.takes_back:
            self._buffers = [each.clone() for each in self.state.model.buffers()]

    def check_loss(self, may_wait: bool = True) -> bool:
        """Check the losses of the steps so far. On a GPU the last loss is left out unless
        `may_wait`. Return True if the last step is skipped. Raises as `_answer`.
        """
        bad = self.watch.find_bad(self.state.progress, may_wait)
        if bad:
            self._answer(bad)
        return bad is not None

    def check_gradient(self, watched: WatchedStep, norm: float) -> None:
        """Answer a gradient that is not finite like a bad loss, if a step can be taken back. Raises
        the errors of `_answer`.
        """
        if self.takes_back and not self.state.scaler.is_enabled() and not math.isfinite(norm):
            reason = f"the gradient's norm is {norm}"
            self._answer(self.watch.blame(watched, float(watched.total or 0.0), reason))

    def _answer(self, bad: StepFoundBad) -> None:
        """Skip a bad step, go back to the newest state, or stop. Every rank that judges calls it.

        Raises:
            NonFiniteLoss: the run has to stop, or `max_bad_steps` are exceeded; names the samples.
            Rewound: the run has gone back.
        """
        world, config = self.parallelism.world, self.parallelism.config
        is_shared = self.watch.is_shared
        if world.is_first or not is_shared:
            self.checkpoints.session.reporter.emit(bad, from_all=True)
            logger.warning("%s", bad)
        self._take_back()
        progress, why = self.state.progress, ""
        num_before = len(progress.rewinds or progress.left_out)
        if self.takes_back and num_before >= config.max_bad_steps:
            why = f"; max_bad_steps: {config.max_bad_steps} were met before"
        elif config.on_bad_step == "skip":
            progress.left_out.append([progress.epoch, progress.batch])
            return
        elif config.on_bad_step == "rewind":
            why = f"; on_bad_step: {self._rewind(bad.step)}"
        # If each rank judges for itself, it holds the whole model, and all write the same file.
        saves = not self.parallelism.is_collective
        if is_shared:
            saves = self.parallelism.saves
        if saves and bad.step > progress.step:
            self.checkpoints.save_bad(bad.step)
        if is_shared:  # ranks wait for each other, so that each reports before the first one ends
            world.all_reduce(0.0)
        place = shlex.quote(redact_url(self.checkpoints.store.storage.url))
        command = f"{find_flyte_ddp_command()} replay {place} --step {bad.step}"
        # The samples get a line of their own, because long lines of an error are cut.
        raise NonFiniteLoss(
            f"{bad.describe(MAX_NAMED)}{why}; {REMEDY}\nto build the step once more: {command}"
        )

    def _take_back(self) -> None:
        """Put back what a step has changed before its update. A save must not find the bad
        gradient.
        """
        self.state.optimizer.zero_grad()
        if self.takes_back:
            with torch.no_grad():
                for buffer, before in zip(self.state.model.buffers(), self._buffers, strict=True):
                    buffer.copy_(before)

    def _rewind(self, bad_step: int) -> str:
        """Go back to the newest state, and leave out the batches up to a step's batch. Every rank
        calls it.

        Returns:
            Why the run cannot go back.

        Raises:
            Rewound: the run has gone back.
        """
        world = self.parallelism.world
        self.checkpoints.session.saver.note_saves(world)
        state = self.checkpoints.find_newest().state
        if state is None:
            return "there is no state to go back to"
        met, found = self.state.progress, Progress.from_dict(state["progress"])
        place = [found.epoch, found.batch]
        if met.rewinds.count(place) == MAX_REWINDS:
            return f"the run went back to step {found.step} {MAX_REWINDS} times before"
        self.state.load(state)
        left_out = list(met.left_out)
        for step in range(found.step, bad_step):
            epoch, batch = divmod(step, self.num_batches)
            if [epoch + 1, batch] not in left_out:
                left_out.append([epoch + 1, batch])
        self.state.progress.left_out = left_out
        self.state.progress.rewinds = [*met.rewinds, place]
        if world.is_first:
            logger.warning(
                "the run goes back to step %d, and leaves out the batches up to step %d",
                found.step,
                bad_step,
            )
        raise Rewound
