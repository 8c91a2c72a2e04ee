"""The cgroups of this container: how many processes the kernel killed there for lack of memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def count_oom_kills(root: Path = Path("/")) -> int:
    """Count the processes of this container that the kernel killed for lack of memory; 0 if that is not known.

    Of this process's cgroup and of the one that the container sees as its root, with both versions of cgroups.
    """
    return sum(map(_count_kills, memory_cgroups(root)))


def memory_cgroups(root: Path = Path("/")) -> set[Path]:
    """Return the directories of this process's cgroup for memory, and of the root of what is mounted of the cgroups."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return set()
    paths = {"cgroup2" if not names else "cgroup": path for _, names, path in groups if "memory" in names or not names}
    found = set()
    for _, _, _, mounted, point, *_, kind, _, options in mounts:
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            directory = root / point.lstrip("/")
            own = os.path.relpath(paths[kind], mounted)  # a container may see its cgroup as the root
            found |= {directory, directory / own} if not own.startswith("..") else {directory}
    return found


def _count_kills(cgroup: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
        with contextlib.suppress(OSError, ValueError):
            counters = (cgroup / name).read_text().split()
            return int(counters[counters.index("oom_kill") + 1])
    with contextlib.suppress(OSError, ValueError):
        return int((cgroup / "memory.failcnt").read_text())  # before Linux 4.13: how often the limit was reached
    return 0
