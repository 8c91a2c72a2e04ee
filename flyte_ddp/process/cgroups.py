"""The cgroups of this container, of versions 1 and 2. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def find_cgroups(controller: str, root: Path = Path("/")) -> set[Path]:
    """Return the directories of this process's cgroup and of the root of the mounted cgroups that
    have a controller, such as "cpu". A container may see the root as its own cgroup.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except OSError:  # this system is not Linux
        return set()
    groups = [line.split(":", 2) for line in lines]
    found = set()
    for _, _, _, mounted, point, *_, kind, _, options in mounts:
        if kind == "cgroup2":
            wanted = ""
        elif kind == "cgroup" and controller in options.split(","):
            wanted = controller
        else:
            continue
        directory = root / point.lstrip("/")
        own = [path for _, names, path in groups if wanted in names.split(",")]
        below = [os.path.relpath(path, mounted) for path in own]
        found |= {directory, *(directory / each for each in below if not each.startswith(".."))}
    return found


def usable_cores(root: Path = Path("/")) -> float:
    """Return the cores that this process may use at a time, within its affinity and the quotas of
    its cgroups.
    """
    cores = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = float(len(os.sched_getaffinity(0)))
    return min([cores, *map(_read_quota, find_cgroups("cpu", root))])


def _read_quota(cgroup: Path) -> float:
    """Return the cores that a cgroup may use at a time; infinity without a quota."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu.cfs_period_us").read_text()
        cores = int(quota) / int(period)
    except (OSError, ValueError):  # "max" is no number
        return float("inf")
    if cores <= 0:
        return float("inf")
    return cores
