"""The cluster of tests on a real Flyte, of either version."""

from __future__ import annotations

# Small enough for two nodes of two cores that also run the task's own pod.
SMALL_CLUSTER = {
    "num_nodes": 2,
    "start_timeout": 400,
    "kubernetes": {
        "worker_cpus": 0.5,
        "worker_memory": "1Gi",
        "shared_memory": "128Mi",
        "scheduler_cpus": 0.25,
        "scheduler_memory": "512Mi",
    },
}
