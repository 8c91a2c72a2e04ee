"""How glibc's `malloc` keeps a process's memory. For rank processes before they import torch, so it imports none."""

from __future__ import annotations

import ctypes

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
