"""Gangs under Kueue, which admits each of them as a whole, on four slots of a resource that only
exists for these tests.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.outside.kubernetes.conftest import Namespace, eventually, kubectl
from tests.outside.kubernetes.kueue import install_kueue, switch_off_kueue
from tests.outside.kubernetes.test_training import (  # noqa: F401 - a fixture
    CONFIGS,
    WITHOUT_DROPOUT,
    Driver,
    start,
)

SLOT = "flyte-ddp.test/slot"
NUM_SLOTS = 4
URGENT = "flyte-ddp-test-urgent"  # a WorkloadPriorityClass: kube-scheduler preempts nothing
QUEUE = "training"
VERSION = "kueue.x-k8s.io/v1beta2"
# One run lasts until the test ends it, because it has to lose nodes and to get them back.
CONFIGS |= {"yielding": {"epochs": 1000}, "urgent": {"epochs": 1}}


def objects(namespace: str) -> list[dict[str, Any]]:
    """Return a queue of the namespace for all slots, in which a higher priority evicts others."""
    amounts = {"cpu": "64", "memory": "64Gi", SLOT: str(NUM_SLOTS)}
    quotas = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
    group = {
        "coveredResources": list(amounts),
        "flavors": [{"name": namespace, "resources": quotas}],
    }
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    everywhere = {"name": namespace}
    local = {"name": QUEUE, "namespace": namespace}
    return [
        {"apiVersion": VERSION, "kind": "ResourceFlavor", "metadata": everywhere},
        {"apiVersion": VERSION, "kind": "ClusterQueue", "metadata": everywhere, "spec": spec},
        {
            "apiVersion": VERSION,
            "kind": "LocalQueue",
            "metadata": local,
            "spec": {"clusterQueue": namespace},
        },
        {
            "apiVersion": VERSION,
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": URGENT},
            "value": 1000,
        },
    ]


@pytest.fixture(scope="module")
def queue(namespace: Namespace) -> Iterator[str]:
    """The name of a LocalQueue, on nodes with slots."""
    is_new = install_kueue()
    give_slots()
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects(namespace.name)})
    kubectl("apply", "--filename=-", stdin=made)
    yield QUEUE
    eventually(lambda: not namespace.items("workloads"), 120, "an end to all workloads")
    kubectl("delete", "--filename=-", "--timeout=60s", stdin=made)
    if is_new:
        switch_off_kueue()


def give_slots() -> None:
    """Let the nodes have all slots together."""
    nodes = kubectl("get", "nodes", "--output", "jsonpath={.items[*].metadata.name}").split()
    capacity = {"status": {"capacity": {SLOT: str(NUM_SLOTS // len(nodes))}}}
    for node in nodes:
        patch = ("--subresource=status", "--type=merge", "--patch", json.dumps(capacity))
        kubectl("patch", "node", node, *patch)


def in_queue(queue: str, **labels: str) -> dict[str, Any]:
    """Return fields of a cluster whose workers take a slot each."""
    resources = {"requests": {SLOT: "1"}, "limits": {SLOT: "1"}}
    container = {"name": "worker", "resources": resources}
    return {
        "queue": queue,
        "worker_cpus": 0.2,
        "scheduler_cpus": 0.1,
        "labels": labels,
        "pod_template": {"containers": [container]},
        "autoscaled_nodes": True,  # the queue alone holds workers back
        "node_timeout": 90,
        "termination_grace": 30,
    }


def test_a_gang_starts_whole_and_takes_the_further_workers_of_another_that_loses_no_step(
    queue: str,
    namespace: Namespace,
    start: Callable[..., Driver],  # noqa: F811
) -> None:
    elastic = {"num_nodes": 4, "min_nodes": 2, "grow_delay": 5, "grow_interval": 0}
    options = {"recipe": WITHOUT_DROPOUT, **in_queue(queue)}
    yielding = start("yielding", "yielding", **elastic, **options)
    yielding.wait_for(run="yielding", event="RunStarted", world_size=4)
    # There is no room for any of its nodes.
    waiting = start("waiting", "waiting", num_nodes=2, **options)
    verdict = f"insufficient unused quota for {SLOT}"
    namespace.wait_for_line("waiting", verdict)
    pods = namespace.items("pods", f"dask.org/cluster-name={cluster_of(namespace, 'waiting')}")
    assert len(pods) == 3
    assert not any("nodeName" in pod["spec"] for pod in pods)
    namespace.kubectl("delete", "pod", waiting.pod, "--wait=false")
    urgent = start(
        "urgent",
        "urgent",
        num_nodes=2,
        recipe=WITHOUT_DROPOUT,
        **in_queue(queue, **{"kueue.x-k8s.io/priority-class": URGENT}),
    )
    urgent.succeeded()
    eventually(lambda: len(yielding.world_sizes("yielding")) == 3, 300, "the growth of the run")
    yielding.wait_for_step("yielding", yielding.steps("yielding")[-1] + 2)
    steps = yielding.steps("yielding")
    assert steps == list(range(1, len(steps) + 1)), "a step was lost or done again"
    assert yielding.world_sizes("yielding") == [4, 2, 4]
    assert yielding.losses_of_gang() == []
    namespace.kubectl("delete", "pod", yielding.pod, "--wait=false")


def cluster_of(namespace: Namespace, driver: str) -> str:
    """Return the name of the cluster that the driver's pod owns."""
    owned = {
        each["metadata"]["ownerReferences"][0]["name"]: each["metadata"]["name"]
        for each in namespace.items("daskclusters")
    }
    return str(owned[driver])
