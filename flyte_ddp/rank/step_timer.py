"""A rank's own time per step, by phase, without what it waits for other ranks.

The phases of a recipe are `data` (until a batch is there), `forward`, and `backward` up to its last
gradient: what follows is the exchange of gradients, which ends for all ranks together. A function
has one, `step`, from report to report. Collectives that Python waits for count in no phase.
The sums go into the memory that the rank shares with its agent, so no rank ever waits to be
compared.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.launch.protocol.messages import PHASES
from flyte_ddp.rank.fast_start import time_waits

DATA, FORWARD, BACKWARD, STEP = range(len(PHASES))

_waited = 0.0  # seconds that Python has waited for collectives in this process


@dataclass(eq=False)
class StepTimer:
    """Adds up the time of one rank in each phase."""

    # takes the number of steps and the seconds of each phase since the start
    publish: Callable[[int, list[float]], None]
    # the device of the passes; on a GPU events time the passes, and no step waits for events
    device: torch.device
    # phases that are not published, because waits for other ranks look like work
    waiting: Collection[int] = ()
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    num_steps: int = 0
    _phase: int = -1
    _since: Any = 0.0
    # phases on the GPU that may not have ended
    _pending: deque[tuple[int, Any, Any]] = field(default_factory=deque)
    _is_watching: bool = False
    _gradient_at: Any = None

    def __post_init__(self) -> None:
        self._on_gpu = self.device.type == "cuda"
        time_waits(_count_wait)

    def watch(self, model: nn.Module) -> None:
        """Time a backward pass up to the gradient of the model's first trained parameter, because
        this gradient comes last.

        A pass without this gradient counts 0 s. If no model is watched, the whole pass counts.
        """
        self._is_watching = True
        for parameter in [each for each in model.parameters() if each.requires_grad][:1]:
            parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def begin(self, phase: int) -> None:
        """End the phase before it, if there is one, and begin this one."""
        self.end()
        self._phase, self._since, self._gradient_at = phase, self._now(phase), None

    def end(self) -> None:
        """End the phase; what follows belongs to none."""
        phase, self._phase = self._phase, -1
        if phase < 0:
            return
        if phase == BACKWARD and self._is_watching:
            until = self._gradient_at or self._since
        else:
            until = self._now(phase)
        if self._on_gpu and phase != DATA:
            self._pending.append((phase, self._since, until))
        else:
            self.seconds[phase] += max(0.0, until - self._since)

    def end_step(self) -> None:
        """Count an optimizer step, and publish the sums."""
        self.end()
        self.num_steps += 1
        while self._pending and self._pending[0][2].query():
            phase, since, until = self._pending.popleft()
            self.seconds[phase] += since.elapsed_time(until) / 1e3
        seconds = list(self.seconds)
        for phase in self.waiting:
            seconds[phase] = 0.0
        self.publish(self.num_steps, seconds)

    def _note_gradient(self, parameter: Tensor) -> None:
        if self._phase == BACKWARD:
            self._gradient_at = self._now(BACKWARD)

    def _now(self, phase: int) -> Any:
        if self._on_gpu and phase != DATA:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter() - _waited


def _count_wait(seconds: float) -> None:
    global _waited
    _waited += seconds


def device_name(device: torch.device) -> str:
    """Return what people call the device, with its index where the machine has several."""
    if device.type != "cuda":
        return ""
    return f"{torch.cuda.get_device_name(device)} ({device})"
