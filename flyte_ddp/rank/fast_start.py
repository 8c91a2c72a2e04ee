"""Private names of torch, which make a rank start and step faster, or show what it does or what is
wrong. All can be missing.

A torch without these names never ends a run: each function says what happens then, and
tests/rank/test_fast_start.py shows that each name still helps.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def avoid_importing_dynamo() -> None:
    """Keep torch from importing its compiler (4 s of CPU and 150 MB) in a process that compiles
    nothing.

    Three places in torch 2.15 import torch._dynamo only to query or set a flag. First, functions
    that it must not trace: they cache the answer in `__dynamo_disable`, so the unchanged functions
    are put there first. Second, the wrapper of every optimizer's `step`, which breaks the graph.
    Third, the constructor of DistributedDataParallel, which reads a setting. Another version of
    torch may just import its compiler.
    """
    for owner in (Optimizer, DistributedDataParallel):
        for function in vars(owner).values():
            function = getattr(function, "__wrapped__", None)
            while function is not None:
                if hasattr(function, "__dict__"):
                    function.__dict__.setdefault("__dynamo_disable", function)
                function = getattr(function, "__wrapped__", None)
    for optimizer in vars(torch.optim).values():
        step: Any = getattr(optimizer, "step", None)
        if getattr(step, "__code__", None) and step.__code__.co_name == "_use_grad":
            optimizer.step = torch.no_grad()(step.__wrapped__)
    if "torch._dynamo" not in sys.modules:
        # torch's default
        utils = _LazyModule("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        # An import of the real module replaces this module.
        vars(torch)["_dynamo"] = _LazyModule("torch._dynamo", utils=utils)


class _LazyModule(types.ModuleType):
    """Stand-in for a module, with some of its attributes. Reading another attribute imports the
    module.
    """

    def __init__(self, name: str, **attributes: object) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def call_around_compilations(start: Callable[[], object], end: Callable[[], object]) -> None:
    """Call `start` before and `end` after each compilation by torch in this process.

    A torch without these callbacks calls neither: a cold compilation then counts as a stall after
    `stall_timeout`.
    """
    try:
        handler = importlib.import_module("torch._dynamo.callback").callback_handler
        handler.register_start_callback(lambda *arguments: start())
        handler.register_end_callback(lambda *arguments: end())
    except (ImportError, AttributeError):
        return


def time_waits(add: Callable[[float], None]) -> None:
    """Call `add` with the seconds of each wait of Python for a collective in this process, from now
    on. Without the name, the waits count as steps.
    """
    work = getattr(dist, "Work", None)
    wait: Any = getattr(work, "wait", None)
    if wait is None or hasattr(wait, "is_timed"):
        return

    def timed(self: Any, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return wait(self, *arguments, **options)
        finally:
            add(time.perf_counter() - started)

    timed.is_timed = True  # type: ignore[attr-defined]
    work.wait = timed  # type: ignore[union-attr]


def dump_gpu_memory(file: Path) -> list[Path]:
    """Write what the memory of this process's GPU holds to a file, for pytorch.org/memory_viz.
    Return the file; [] without a GPU in use, or without the name.
    """
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None or not torch.cuda.is_initialized():
        return []
    dump(str(file))
    return [file]


def group_timeout(device: torch.device) -> timedelta:
    """Return the timeout of the default group's collectives; years if the backend shows none."""
    world: Any = dist.group.WORLD
    try:
        timeout: timedelta = world._get_backend(device).options._timeout
    except AttributeError:
        return timedelta.max
    return timeout


def open_group_store() -> Store | None:
    """Return a new connection to the store where the default group met; None without one."""
    try:
        return dist.distributed_c10d._get_default_store().clone()
    except (AttributeError, RuntimeError):  # not every kind of store can be opened twice
        return None


def find_root_mesh(mesh: object) -> Any:
    """Return the whole mesh of which this one is a part; None for no mesh, or without the name: all
    ranks then count as readers of the same samples.
    """
    return getattr(mesh, "_get_root_mesh", lambda: None)()


def set_ddp_timing_interval(replica: Any, num_steps: int) -> None:
    """Make DDP time its exchange of gradients every `num_steps` steps; without a setter, its
    interval of 100 stays.
    """
    with contextlib.suppress(AttributeError):
        replica._set_ddp_runtime_logging_sample_rate(num_steps)


def has_all_gradients(replica: Any) -> bool:
    """Return whether DDP has exchanged the gradients of all parameters in the last backward pass.
    True if DDP does not show it: its next forward pass then fails.
    """
    try:
        getattr(replica, "_orig_mod", replica)._check_reducer_finalized()
    except AttributeError:
        return True
    except RuntimeError:
        return False
    return True


def ddp_exchange_seconds(replica: Any) -> tuple[float, float] | None:
    """Return DDP's mean (exchange, overlap) per timed step; None where it has no timers.

    The exchange lasts from the first bucket's departure to the last one's arrival; the overlap is
    the part of it that the backward pass covered.
    """
    try:
        data = getattr(replica, "_orig_mod", replica)._get_ddp_logging_data()
    except AttributeError:
        return None
    names = "avg_backward_comm_time", "avg_backward_compute_comm_overlap_time"
    exchange, overlap = (data.get(name, 0) / 1e9 for name in names)
    return exchange, overlap
