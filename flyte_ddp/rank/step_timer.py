"""A rank's own time per step, by phase, without what it waits for other ranks.

The phases are `data` (until a batch is there), `forward`, and `backward` up to its last gradient: what follows is the
exchange of gradients, which ends for all ranks together. Collectives that Python waits for count in no phase either.
A function without such phases has one, `step`, from report to report.
The sums go into the memory that the rank shares with its supervisor, so no rank ever waits to be compared.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.launch.process.ranks import PHASES

DATA, FORWARD, BACKWARD, STEP = range(len(PHASES))
NUM_SEARCHED = 2  # backward passes with a hook on every parameter, until it is known which gradient comes last
MAX_MISSED = 10  # forward passes of a function without a backward pass after which that is looked for anew

_waited = 0.0  # seconds that Python has waited for collectives in this process
_is_waiting = False


@dataclass(eq=False)
class StepTimer:
    """Adds up the time of one rank in each phase."""

    publish: Callable[[int, list[float]], None]  # gets the steps and the seconds of each phase, since the start
    device: torch.device  # on which the passes run; on a GPU they are timed by events, which no step waits for
    waiting: Collection[int] = ()  # phases in which waits for other ranks cannot be told from work: not published

    def __post_init__(self) -> None:
        self.seconds = [0.0] * len(PHASES)
        self.num_steps = 0
        self._on_gpu = self.device.type == "cuda"
        self._phase = -1
        self._since: Any = 0.0
        self._pending: deque[tuple[int, Any, Any]] = deque()  # phases on the GPU that may not have ended
        self._last_gradients: weakref.WeakKeyDictionary[nn.Module, LastGradient] = weakref.WeakKeyDictionary()
        self._gradient_at: Any = None
        _count_waits()

    def watch(self, model: nn.Module) -> None:
        """Note the last gradient of this model, too. Without one, the whole backward pass counts."""
        self._last_gradients[model] = LastGradient(model, self._note_gradient)

    def begin(self, phase: int) -> None:
        """End the phase before it, if there is one, and begin this one."""
        self.end()
        self._phase, self._since, self._gradient_at = phase, self._now(phase), None

    def end(self) -> None:
        """End the phase; what follows belongs to none."""
        phase, self._phase = self._phase, -1
        if phase < 0:
            return
        is_found = phase == BACKWARD and self._gradient_at is not None
        until = self._gradient_at if is_found else self._now(phase)
        if phase == BACKWARD:
            self._settle(is_found)
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
        seconds = [0.0 if phase in self.waiting else each for phase, each in enumerate(self.seconds)]
        self.publish(self.num_steps, seconds)

    def _settle(self, is_found: bool) -> None:
        for each in list(self._last_gradients.values()):
            each.settle(is_found)

    def _note_gradient(self) -> None:
        if self._phase == BACKWARD:
            self._gradient_at = self._now(BACKWARD)

    def _now(self, phase: int) -> Any:
        if self._on_gpu and phase != DATA:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter() - _waited


class LastGradient:
    """Calls `note` when the last gradient of a backward pass is there; after some passes, once per pass.

    A hook on each parameter would cost a call of Python each. So after the first passes only the parameter whose
    gradient came last keeps its hook; all get theirs back if it gets no gradient. Keeps no model or parameter alive.
    """

    def __init__(self, model: nn.Module, note: Callable[[], None]) -> None:
        self._note = note
        self._model = weakref.ref(model)
        self._handles: list[Any] = []
        self._latest: weakref.ref[Tensor] | None = None
        self._num_searched = 0
        self._hook(model.parameters())

    def settle(self, is_found: bool) -> None:
        """Note the end of a pass, and whether any model got a gradient in it."""
        latest = self._latest() if self._latest else None
        if not is_found:
            if self._num_searched > NUM_SEARCHED and (model := self._model()):
                self._num_searched = 0
                self._hook(model.parameters())
        elif latest is not None:
            self._latest = None
            self._num_searched += 1
            if self._num_searched == NUM_SEARCHED:
                self._hook([latest])

    def _hook(self, parameters: Iterable[Tensor]) -> None:
        for handle in self._handles:
            handle.remove()
        trained = [each for each in parameters if each.is_leaf and each.requires_grad]  # which the program may change
        self._handles = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in trained]

    def _on_gradient(self, parameter: Tensor) -> None:
        self._latest = weakref.ref(parameter)
        self._note()


def _count_waits() -> None:
    """Count the seconds that this process waits for collectives in Python, or for DDP's buffers, from now on."""
    from torch._C._distributed_c10d import Work  # torch.distributed's own, which it does not export for type checkers
    from torch.nn.parallel import DistributedDataParallel

    if not getattr(Work.wait, "is_counted", False):
        Work.wait = _count_wait(Work.wait)  # type: ignore[method-assign]
        # It waits for rank 0 in C++, at the start of a forward pass.
        DistributedDataParallel._sync_buffers = _count_wait(DistributedDataParallel._sync_buffers)  # type: ignore[method-assign]


def _count_wait(wait: Any) -> Any:
    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        global _waited, _is_waiting
        if _is_waiting:
            return wait(self, *arguments, **options)
        _is_waiting, started = True, time.perf_counter()
        try:
            return wait(self, *arguments, **options)
        finally:
            _is_waiting = False
            _waited += time.perf_counter() - started

    counted.is_counted = True  # type: ignore[attr-defined]
    return counted


def device_name(device: torch.device) -> str:
    """Return what people call the device, with its index where the machine has several."""
    if device.type != "cuda":
        return ""
    return f"{torch.cuda.get_device_name(device)} ({device})"


def watch_ddp(publish: Callable[[int, list[float]], None], send_device: Callable[[str], None]) -> Callable[[], None]:
    """Time the passes of a function's DistributedDataParallel from now on; each backward pass is a step.

    The data phase is all that a step does between two passes, such as the optimizer's update. Several models, such as
    a GAN's, share one timer.

    Returns:
        What a report of the function calls: while there are no such passes, each ends a step.
    """
    from torch.nn.parallel import DistributedDataParallel

    timer: _FunctionTimer | None = None
    reports = StepTimer(publish, torch.device("cpu"))
    models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    forward: Any = DistributedDataParallel.forward

    def note_report() -> None:
        if timer is None:
            reports.end_step()
            reports.begin(STEP)

    def timed(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        nonlocal timer
        if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return forward(self, *inputs, **options)
        if timer is None:
            device = next(self.parameters()).device
            timer = _FunctionTimer(publish, device)
            timer.num_steps, timer.seconds = reports.num_steps, reports.seconds
            send_device(device_name(device))
        if self not in models:
            models.add(self)
            timer.watch(self)
        timer.begin_forward()
        outputs = forward(self, *inputs, **options)
        timer.begin(BACKWARD)
        return outputs

    DistributedDataParallel.forward = timed  # type: ignore[method-assign]
    return note_report


class _FunctionTimer(StepTimer):
    """The timer of a function, of which only gradients show when a backward pass runs."""

    _is_ending = False
    _num_missed = 0

    def begin_forward(self) -> None:
        """Begin a forward pass. Drop the time since one that raised, or that no backward pass followed."""
        self._is_ending = False
        self._num_missed += 1
        if self._phase != DATA:
            self._phase = -1
        if self._num_missed > MAX_MISSED:
            self._num_missed = 0
            self._settle(is_found=False)
        self.begin(FORWARD)

    def _note_gradient(self) -> None:
        super()._note_gradient()
        if not self._is_ending and self._phase == BACKWARD:
            self._is_ending = True
            # DDP waits for its exchange in a callback of this kind. One that a callback adds comes after that.
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end_pass))

    def _end_pass(self) -> None:
        self._is_ending, self._num_missed = False, 0
        self.end_step()
        self.begin(DATA)
