"""The memory that this container's processes may use, and how many of them the kernel killed for
lack of memory.

Reads the memory of cgroups of version 2, and counts kills in both versions. The agent and the ranks
use this module. Imports no torch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from flyte_ddp.process.cgroups import find_cgroups

SPARE_BYTES = 256 << 20  # memory that stays free
UNLIMITED = 1 << 62  # bytes


def free_memory() -> int:
    """Return the bytes that this machine or container has left, less `SPARE_BYTES`."""
    used, limit = memory_use()
    return limit - used - SPARE_BYTES


def memory_use() -> tuple[int, int]:
    """Return the bytes in use and their limit, of the machine or of the cgroup with the least
    room.
    """
    import psutil  # type: ignore[import-untyped]

    machine = psutil.virtual_memory()
    groups = find_cgroups("memory")
    known = [(machine.total - machine.available, machine.total), *map(use_of, groups)]
    return min(known, key=lambda each: each[1] - each[0])


def use_of(cgroup: Path) -> tuple[int, int]:
    """Return the bytes that a cgroup uses, and its limit. The kernel can drop cached files, so they
    do not count.
    """
    with contextlib.suppress(OSError, ValueError):  # a cgroup without a limit
        limit = int((cgroup / "memory.max").read_text())
        spare = _counter(cgroup / "memory.stat", "inactive_file")
        return int((cgroup / "memory.current").read_text()) - spare, limit
    return 0, UNLIMITED


def count_oom_kills(root: Path = Path("/")) -> int:
    """Count the processes of this container that the kernel killed for lack of memory. Return 0 if
    the number is unknown.
    """
    kills = 0
    for cgroup in find_cgroups("memory", root):
        for name in ("memory.events", "memory.oom_control"):  # files of versions 2 and 1
            with contextlib.suppress(OSError, ValueError):
                kills += _counter(cgroup / name, "oom_kill")
    return kills


def _counter(file: Path, name: str) -> int:
    counters = file.read_text().split()
    return int(counters[counters.index(name) + 1])
