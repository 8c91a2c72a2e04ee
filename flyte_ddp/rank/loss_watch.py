"""Ends a run at the first loss that is not finite, without making a GPU wait for each loss."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.errors import NonFiniteLoss
from flyte_ddp.world import World

REMEDY = "a lower learning_rate, warmup_steps or gradient_clip_norm may help, or the data holds such values"


class LossWatch:
    """Checks the losses of one rank: on a CPU at once, on a GPU when the value has been copied to the host.

    Reading each loss would leave the GPU idle between steps, so the checks lag a few steps behind.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: deque[tuple[Tensor, Any, int, int]] = deque()  # (loss, its copy's event, step, epoch)

    def add(self, loss: Tensor, step: int, epoch: int) -> None:
        """Check `loss`, now or later.

        Raises:
            NonFiniteLoss: this loss or an earlier one is NaN or infinite.
        """
        if self._world.device.type != "cuda":
            self._check(loss, step, epoch)
            return
        copy = loss.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((copy, event, step, epoch))
        while self._pending and self._pending[0][1].query():
            value, _, step, epoch = self._pending.popleft()
            self._check(value, step, epoch)

    def check_all(self) -> None:
        """Wait for the losses that are not checked yet, and check them.

        Raises:
            NonFiniteLoss: one of them is NaN or infinite.
        """
        while self._pending:
            value, event, step, epoch = self._pending.popleft()
            event.synchronize()
            self._check(value, step, epoch)

    def _check(self, loss: Tensor, step: int, epoch: int) -> None:
        value = float(loss)
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the loss is {value} at step {step} (epoch {epoch}) on rank {self._world.rank}; {REMEDY}"
            )
