"""Private names of torch and glibc, which make a rank start and step faster or show what it does. All can be missing.

A torch or a C library without these names never ends a run: each function says what happens then, and
tests/test_fast_start.py shows that each name still helps. Imports no torch at the top.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES, RETURNED_BYTES = 1 << 30, 1 << 20


def keep_freed_memory() -> None:
    """Keep glibc from returning a step's activations to the kernel, only to fault them in again in the next step.

    By default it maps large blocks one by one and trims the end of the heap until it has seen larger blocks freed: up
    to 5,000 page faults and a quarter of the time of a step of `mnist`. The process keeps its peak instead, which it
    needs again. A C library without `mallopt` keeps its own ways.
    """
    _keep_blocks_below(KEPT_BYTES)


def return_freed_memory() -> None:
    """Have glibc return large blocks to the kernel at once: a rank splits its model in order to have more memory.

    Kept, the blocks of weights that are gathered and dropped stay in the heap of each thread that gathered one: 0.6 GB
    of a rank on a CPU with 100 million parameters.
    """
    _keep_blocks_below(RETURNED_BYTES)


def _keep_blocks_below(size: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, size)


def avoid_importing_dynamo() -> None:
    """Keep torch from importing its compiler (4 s of CPU and 150 MB) in a process that compiles nothing.

    Three places in torch 2.15 import torch._dynamo only to query or set a flag: functions that it must not trace
    (they remember the answer in `__dynamo_disable`, so it can be put there first: themselves, unchanged), the
    wrapper of every optimizer's `step`, which breaks the graph, and the constructor of DistributedDataParallel,
    which reads a setting. A torch that does this in another way just imports its compiler as before.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import SGD, Adam, Optimizer

    for owner in (Optimizer, DistributedDataParallel):
        for function in vars(owner).values():
            while (function := getattr(function, "__wrapped__", None)) is not None:
                if hasattr(function, "__dict__"):
                    function.__dict__.setdefault("__dynamo_disable", function)
    for optimizer in (SGD, Adam):  # AdamW is an Adam
        step: Any = optimizer.step
        if getattr(step, "__code__", None) and step.__code__.co_name == "_use_grad":
            optimizer.step = torch.no_grad()(step.__wrapped__)  # type: ignore[method-assign]
    if "torch._dynamo" not in sys.modules:
        utils = _LazyModule("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # torch's default
        vars(torch)["_dynamo"] = _LazyModule("torch._dynamo", utils=utils)  # an import of the real one replaces it


class _LazyModule(types.ModuleType):
    """Stand-in for a module, with some of its attributes. Reading another attribute imports the module."""

    def __init__(self, name: str, **attributes: object) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def call_around_compilations(start: Callable[[], object], end: Callable[[], object]) -> None:
    """Call `start` before and `end` after each compilation by torch in this process.

    A torch without these callbacks calls neither: a cold compilation then counts as a stall after `stall_timeout`.
    """
    try:
        handler = importlib.import_module("torch._dynamo.callback").callback_handler
        handler.register_start_callback(lambda *arguments: start())
        handler.register_end_callback(lambda *arguments: end())
    except (ImportError, AttributeError):
        return


def set_ddp_timing_interval(replica: Any, num_steps: int) -> None:
    """Make DDP time its exchange of gradients every `num_steps` steps; without a setter, its interval of 100 stays."""
    set_rate = getattr(replica, "_set_ddp_runtime_logging_sample_rate", None)
    if set_rate is not None:
        set_rate(num_steps)


def ddp_exchange_seconds(replica: Any) -> tuple[float, float] | None:
    """Return DDP's mean (exchange, overlap) per timed step; None where it has no timers.

    The exchange lasts from the first bucket's departure to the last one's arrival; the overlap is the part of it that
    the backward pass covered.
    """
    read = getattr(getattr(replica, "_orig_mod", replica), "_get_ddp_logging_data", None)
    if read is None:
        return None
    data = read()
    return data.get("avg_backward_comm_time", 0) / 1e9, data.get("avg_backward_compute_comm_overlap_time", 0) / 1e9
