"""The lives of a namespace's pods, as a watch sees them: when each was created, admitted by Kueue,
placed, evicted and gone. Drills make their tables of these.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import ProtocolError

CLUSTER = "dask.org/cluster-name"
GROUP = "kueue.x-k8s.io/pod-group-name"
ENDED = ("Succeeded", "Failed")


@dataclass
class PodLife:
    """Times are in seconds since the epoch; infinite before the watch has seen the change."""

    name: str
    owner: str  # name of the Dask cluster; that of the pod itself for other pods
    group: str  # name of the group that Kueue admits as a whole
    slots: int  # the pod takes so many slots of its node
    created_at: float
    admitted_at: float = math.inf
    placed_at: float = math.inf
    evicted_at: float = math.inf
    gone_at: float = math.inf


class Timeline(threading.Thread):
    """Watches the pods of a namespace until `stop`."""

    def __init__(self, namespace: str, resource: str) -> None:
        super().__init__(name="timeline", daemon=True)
        config.load_kube_config()
        self._namespace = namespace
        self._resource = resource
        self._watch = watch.Watch()
        self._lives: dict[str, PodLife] = {}
        self._is_over = False
        self.start()

    @property
    def lives(self) -> list[PodLife]:
        return list(self._lives.values())

    def stop(self) -> None:
        self._is_over = True
        self._watch.stop()

    def run(self) -> None:
        request = client.CoreV1Api().list_namespaced_pod
        while not self._is_over:
            # The API server may end a watch at any time, and refuse one for a moment.
            with contextlib.suppress(ProtocolError, ApiException):
                for event in self._watch.stream(request, self._namespace, timeout_seconds=3000):
                    self._note(event["type"], event["object"], time.time())
            time.sleep(0.1)

    def _note(self, kind: str, pod: Any, now: float) -> None:
        metadata = pod.metadata
        if metadata.uid not in self._lives:
            labels = metadata.labels or {}
            requests = [each.resources.requests or {} for each in pod.spec.containers]
            slots = sum(int(each.get(self._resource, 0)) for each in requests)
            owner = labels.get(CLUSTER, metadata.name)
            group = labels.get(GROUP, "")
            self._lives[metadata.uid] = PodLife(metadata.name, owner, group, slots, now)
        life = self._lives[metadata.uid]
        if not pod.spec.scheduling_gates:
            life.admitted_at = min(life.admitted_at, now)
        if pod.spec.node_name:
            life.placed_at = min(life.placed_at, now)
        if metadata.deletion_timestamp:
            life.evicted_at = min(life.evicted_at, now)
        if kind == "DELETED" or pod.status.phase in ENDED:
            life.gone_at = min(life.gone_at, now)


def count_free(lives: Iterable[PodLife], num_slots: int, begin: float, end: float) -> float:
    """Return the part of the slots' time from `begin` to `end` in which no pod was placed there."""
    taken = 0.0
    for life in lives:
        first, last = max(begin, life.placed_at), min(end, life.gone_at)
        taken += life.slots * max(0.0, last - first)
    return 1 - taken / (num_slots * (end - begin))


def longest_partial(lives: Sequence[PodLife], size: int) -> float:
    """Return the longest time, in seconds, for which some but not all of a group's `size` pods were
    admitted and not on their way out.
    """
    changes = [(life.admitted_at, 1) for life in lives if life.admitted_at < math.inf]
    changes += [
        (min(life.evicted_at, life.gone_at), -1)
        for life in lives
        if life.admitted_at < math.inf and min(life.evicted_at, life.gone_at) < math.inf
    ]
    changes.sort()
    longest, count, since = 0.0, 0, 0.0
    for at, change in changes:
        was_partial = 0 < count < size
        count += change
        is_partial = 0 < count < size
        if was_partial and not is_partial:
            longest = max(longest, at - since)
        elif is_partial and not was_partial:
            since = at
    return longest


def seconds_without_step(times: Sequence[float], step_seconds: float) -> float:
    """Return the sum of the gaps between steps that are longer than three steps, each less one
    step.
    """
    gaps = [after - before for before, after in pairwise(times)]
    return sum(gap - step_seconds for gap in gaps if gap > 3 * step_seconds)
