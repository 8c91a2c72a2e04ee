"""Measure what a node's ranks use of its cores, its memory and its GPUs. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from flyte_ddp.events import NodeMeasured
from flyte_ddp.launch.agent.devices import measure_gpus, num_cores
from flyte_ddp.storage.cgroups import memory_use

MIN_INTERVAL = 15.0  # seconds between two measurements, each of which takes some milliseconds
# of the attempt so far, if that is more: days of a run have a thousand points, not a hundred
# thousand
INTERVAL_SHARE = 0.01


@dataclass
class NodeMeter:
    """Measures a node."""

    node: int
    num_gpus: int  # that the ranks use
    started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._last_at, self._last_seconds = self.started_at, 0.0

    @property
    def interval(self) -> float:
        """Seconds until the next measurement."""
        return max(MIN_INTERVAL, INTERVAL_SHARE * (time.monotonic() - self.started_at))

    def measure(self, groups: Collection[int | None]) -> NodeMeasured:
        """Return the use of the node, of its cores by the process groups that the ranks lead."""
        now, seconds = time.monotonic(), _cpu_seconds(groups)
        elapsed = max(1e-9, now - self._last_at)
        cpu = max(0.0, seconds - self._last_seconds) / elapsed / num_cores()
        self._last_at, self._last_seconds = now, seconds
        used, limit = memory_use()
        gpu, gpu_memory = measure_gpus(self.num_gpus)
        return NodeMeasured(self.node, min(1.0, cpu), used / limit, limit, gpu, gpu_memory)


def _cpu_seconds(groups: Collection[int | None]) -> float:
    """Return the CPU time of all processes of `groups`, and of their children that have ended."""
    import psutil  # type: ignore[import-untyped]

    seconds = 0.0
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            if os.getpgid(pid) in groups:
                seconds += sum(psutil.Process(pid).cpu_times()[:4])
    return seconds
