"""The memory that the processes of this container may use, and whether the kernel killed some for
the lack of it.

By cgroups of both versions. Agent and ranks ask for it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SPARE_BYTES = 256 << 20  # of memory that stay free
UNLIMITED = 1 << 62  # bytes


def free_memory() -> int:
    """Return the bytes that may still be used on this machine, or in the container; some stay
    free.
    """
    used, limit = memory_use()
    return limit - used - SPARE_BYTES


def memory_use() -> tuple[int, int]:
    """Return the bytes in use and their limit: of this machine, or of a cgroup with fewer free."""
    import psutil  # type: ignore[import-untyped]

    machine = psutil.virtual_memory()
    known = [(machine.total - machine.available, machine.total), *map(use_of, memory_cgroups())]
    return min(known, key=lambda each: each[1] - each[0])


def use_of(cgroup: Path) -> tuple[int, int]:
    """Return the bytes that a cgroup uses, and its limit. Files that it has read can go, so they do
    not count.
    """
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or no limit
            counters = (cgroup / "memory.stat").read_text().split()
            spare = int(counters[counters.index(cached) + 1])
            return int((cgroup / used).read_text()) - spare, int((cgroup / limit).read_text())
    return 0, UNLIMITED


def count_oom_kills(root: Path = Path("/")) -> int:
    """Count the processes of this container that the kernel killed for lack of memory; 0 if that is
    not known.

    Of this process's cgroup and of the one that the container sees as its root, with both versions
    of cgroups.
    """
    return sum(map(_count_kills, memory_cgroups(root)))


def memory_cgroups(root: Path = Path("/")) -> set[Path]:
    """Return the directories of this process's cgroup for memory, and of the root of what is
    mounted of the cgroups.
    """
    try:
        groups = [
            line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()
        ]
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return set()
    paths = {
        "cgroup2" if not names else "cgroup": path
        for _, names, path in groups
        if "memory" in names or not names
    }
    found = set()
    for _, _, _, mounted, point, *_, kind, _, options in mounts:
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            directory = root / point.lstrip("/")
            # a container may see its cgroup as the root
            own = os.path.relpath(paths[kind], mounted)
            found |= {directory, directory / own} if not own.startswith("..") else {directory}
    return found


def _count_kills(cgroup: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
        with contextlib.suppress(OSError, ValueError):
            counters = (cgroup / name).read_text().split()
            return int(counters[counters.index("oom_kill") + 1])
    with contextlib.suppress(OSError, ValueError):
        # before Linux 4.13: how often the limit was reached
        return int((cgroup / "memory.failcnt").read_text())
    return 0
