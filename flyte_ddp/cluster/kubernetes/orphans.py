"""Dask clusters that outlived their driver: find them, and remove them.

python -m flyte_ddp.cluster.kubernetes.orphans [--namespace N] [--older-than 24h] [--delete]
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyte_ddp.cluster.kubernetes.api import call, find
from flyte_ddp.cluster.kubernetes.lifecycle import delete_cluster
from flyte_ddp.cluster.kubernetes.manifest import GROUP, MANAGED_BY, PLURAL, VERSION
from flyte_ddp.config.fields import parse_duration
from flyte_ddp.errors import ClusterError, ConfigError


@dataclass(frozen=True)
class FoundCluster:
    name: str
    namespace: str
    uid: str
    age: float  # seconds
    orphaned: str  # why it has no driver any more; "" where it may have one


def find_clusters(namespace: str, older_than: float) -> list[FoundCluster]:
    """Return the clusters of this package in `namespace` ("": in all).

    An orphan is a cluster whose driver's pod is gone or has ended, and one without such a pod (its driver ran outside
    Kubernetes) that is older than `older_than` seconds.
    """
    arguments = (GROUP, VERSION, PLURAL) if not namespace else (GROUP, VERSION, namespace, PLURAL)
    selector = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
    method = "list_namespaced_custom_object" if namespace else "list_cluster_custom_object"
    found = []
    for cluster in call("CustomObjectsApi", method, *arguments, label_selector=selector)["items"]:
        metadata = cluster["metadata"]
        created = datetime.datetime.fromisoformat(metadata["creationTimestamp"].replace("Z", "+00:00"))
        age = (datetime.datetime.now(datetime.timezone.utc) - created).total_seconds()
        owners = metadata.get("ownerReferences", [])
        reason = ""
        if owners:
            reason = _why_ownerless(owners[0], metadata["namespace"])
        elif age > older_than:
            reason = f"it has no driver's pod and is older than {older_than:g} s"
        found.append(FoundCluster(metadata["name"], metadata["namespace"], metadata["uid"], age, reason))
    return found


def _why_ownerless(owner: Mapping[str, Any], namespace: str) -> str:
    pod = find("CoreV1Api", "read_namespaced_pod", owner["name"], namespace)
    if pod is None or pod.metadata.uid != owner["uid"]:
        return f"its driver's pod {owner['name']} is gone"
    has_ended = pod.status.phase in ("Succeeded", "Failed")
    return f"its driver's pod {owner['name']} has {pod.status.phase.lower()}" if has_ended else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flyte_ddp.cluster.kubernetes.orphans",
        description="List the Dask clusters of this package; with --delete remove those that outlived their driver.",
    )
    parser.add_argument("--namespace", default="", help="look at this one only; by default at all of them")
    parser.add_argument(
        "--older-than",
        default="24h",
        help="age from which a cluster counts as orphaned whose driver ran outside Kubernetes (default 24h)",
    )
    parser.add_argument("--delete", action="store_true", help="remove the orphans")
    options = parser.parse_args(arguments)

    try:
        found = find_clusters(options.namespace, parse_duration("--older-than", options.older_than))
        lines = []
        for each in found:
            state = each.orphaned or "in use"
            if each.orphaned and options.delete:
                delete_cluster(each.name, each.namespace, each.uid)
                state = f"deleted: {each.orphaned}"
            lines.append(f"{each.namespace}/{each.name}  age {datetime.timedelta(seconds=round(each.age))}  {state}")
    except (ClusterError, ConfigError) as error:
        parser.exit(1, f"error: {error}\n")
    num_orphans = sum(bool(each.orphaned) for each in found)
    lines.append(f"{len(found)} cluster{'s' * (len(found) != 1)}, {num_orphans} orphaned")
    if num_orphans and not options.delete:
        lines[-1] += "; remove them with --delete"
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
