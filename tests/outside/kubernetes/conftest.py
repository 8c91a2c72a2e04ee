"""A namespace on whatever cluster KUBECONFIG names, with the Dask operator and exactly the RBAC of
deploy/.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flyte_ddp.cluster.config import ClusterConfig, KubernetesConfig, cluster_config
from tests.outside.kubernetes.store import Store

ROOT = Path(__file__).parents[3]
IMAGE = os.environ.get("FLYTE_DDP_TEST_IMAGE", "flyte-ddp:dev")

# Small enough for two nodes of two cores that other pods share.
SMALL = {"kind": "kubernetes", "num_nodes": 2, "start_timeout": 400}
SMALL_PODS = {
    "image": IMAGE,
    "worker_cpus": 0.6,
    "worker_memory": "1Gi",
    "shared_memory": "128Mi",
    "scheduler_cpus": 0.5,
    "scheduler_memory": "512Mi",
}


# Security settings that the `restricted` namespaces of the tests demand of a task's pod.
_TEMPLATE = yaml.safe_load((ROOT / "deploy/pod-template.yaml").read_text())["template"]["spec"]
POD_SECURITY = {"securityContext": _TEMPLATE["securityContext"]}
CONTAINER_SECURITY = {"securityContext": _TEMPLATE["containers"][0]["securityContext"]}

# Code for pods that the image does not have: this checkout's, and the tests' own.
CODE = ["flyte_ddp", "tests/__init__.py", "tests/support/runs.py", "tests/support/recipes.py"]
CODE += ["tests/support/events.py", "tests/support/predicted.py"]
CODE += ["tests/outside/kubernetes/__init__.py", "tests/outside/kubernetes/driver.py"]
SCRIPT = 'python -W ignore -c "$0"'  # a command of a driver's pod
# This command ends a container without any message.
KILL_UNANNOUNCED = "kill -KILL $(cat /proc/1/task/1/children)"
CLUSTER_KINDS = ("daskclusters", "daskworkergroups")


def small_cluster(**changes: Any) -> dict[str, Any]:
    """A small cluster as `--cluster` takes it, with `changes` of fields of either level."""
    pod_fields = {each.name for each in dataclasses.fields(KubernetesConfig)}
    pods = {name: value for name, value in changes.items() if name in pod_fields}
    rest = {name: value for name, value in changes.items() if name not in pod_fields}
    return {**SMALL, **rest, "kubernetes": {**SMALL_PODS, **pods}}


def kubectl(*arguments: str, stdin: str | bytes | None = None, check: bool = True) -> str:
    """Return the output of kubectl; AssertionError with its standard error if it fails."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(["kubectl", *arguments], input=data, capture_output=True, check=False)
    assert not check or done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def apply(manifest: dict[str, Any]) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps(manifest))


def eventually(holds: Callable[[], object], timeout: float, what: str) -> Any:
    """Return the first true value of `holds` within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.5)
    return value


@dataclass
class Namespace:
    """The tests' own namespace, and queries of its objects."""

    name: str

    def config(self, **changes: Any) -> ClusterConfig:
        return cluster_config(small_cluster(**{"namespace": self.name, **changes}))

    def kubectl(self, *arguments: str, stdin: str | bytes | None = None, check: bool = True) -> str:
        return kubectl("--namespace", self.name, *arguments, stdin=stdin, check=check)

    def items(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            self.kubectl("get", kind, "--selector", selector, "--output", "json")
        )["items"]
        return found

    def clusters(self) -> list[str]:
        """Return the names of the clusters that are not being deleted."""
        metadata = [item["metadata"] for item in self.items("daskclusters")]
        return [each["name"] for each in metadata if "deletionTimestamp" not in each]

    def pods(self, cluster: str, component: str) -> list[dict[str, Any]]:
        """Return a cluster's pods of one component. Pods of an earlier test may still be ending."""
        return self.items("pods", f"dask.org/cluster-name={cluster},dask.org/component={component}")

    def left_of_clusters(self) -> list[str]:
        """Return everything that Dask clusters have made, or are, as kind/name, deleted or not."""
        kinds = {
            ",".join(CLUSTER_KINDS): "",
            "pods,deployments,services": "dask.org/cluster-name",
            "secrets,networkpolicies": "app.kubernetes.io/managed-by=flyte-ddp",
        }
        return [
            f"{each['kind'].lower()}/{each['metadata']['name']}"
            for kind, selector in kinds.items()
            for each in self.items(kind, selector)
        ]

    def copy_code(self, other: Namespace) -> None:
        """Bring the code of `start_driver` here from another namespace."""
        code = json.loads(other.kubectl("get", "configmap", "code", "--output", "json"))
        copy = {**code, "metadata": {"name": "code", "namespace": self.name}}
        kubectl("create", "-f", "-", stdin=json.dumps(copy))

    def start_driver(
        self, name: str, command: str, argument: str, service_account: str = "flyte-ddp"
    ) -> None:
        """Run `command`, in which "$0" is `argument`, in a pod as a Flyte task would run, on the
        code as it is here, whatever the image holds.
        """
        # The working directory comes before all else on Python's path.
        unpack = "mkdir /tmp/code && cd /tmp/code && tar xzf /code/code.tar.gz"
        container = {
            **CONTAINER_SECURITY,
            "name": name,
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "args": ["bash", "-c", f"{unpack} && exec {command}", textwrap.dedent(argument)],
            "envFrom": [{"secretRef": {"name": "storage", "optional": True}}],
            "volumeMounts": [{"name": "code", "mountPath": "/code"}],
        }
        spec = {
            **POD_SECURITY,
            "restartPolicy": "Never",
            "serviceAccountName": service_account,
            "containers": [container],
            "volumes": [{"name": "code", "configMap": {"name": "code"}}],
        }
        metadata = {"name": name, "namespace": self.name}
        apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def log(self, pod: str) -> str:
        return self.kubectl("logs", pod, check=False)

    def phase(self, pod: str) -> str:
        return self.kubectl("get", "pod", pod, "--output", "jsonpath={.status.phase}", check=False)

    def wait_for_line(self, pod: str, line: str, timeout: float = 400) -> str:
        """The pod's log, once it has `line`."""
        eventually(lambda: line in self.log(pod), timeout, f"{line!r} in the log of {pod}")
        return self.log(pod)

    def wait_for_end(self, pod: str, timeout: float = 300) -> int:
        """The exit status of the pod's container."""
        eventually(lambda: self.phase(pod) in ("Failed", "Succeeded"), timeout, f"the end of {pod}")
        path = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"
        return int(self.kubectl("get", "pod", pod, "--output", path))


@pytest.fixture(scope="session")
def operator() -> None:
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster")
    found = ("get", "deployment", "dask-operator", "--output=jsonpath={.status.availableReplicas}")
    # the cluster may have one, which others may use at this moment
    if not kubectl("--namespace", "dask-operator", *found, check=False):
        install_operator(IMAGE)


def install_operator(image: str) -> None:
    subprocess.run(
        [str(ROOT / "deploy/operator/install.sh"), image],
        check=True,
        env={**os.environ, "PYTHON": sys.executable},
    )


# Helpers' pods name no requests, which the quota of namespace.yaml demands.
DEFAULT_REQUESTS = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "helpers"},
    "spec": {"limits": [{"type": "Container", "defaultRequest": {"cpu": "10m", "memory": "16Mi"}}]},
}
MISSING_IMAGE = "registry.invalid/flyte-ddp"  # no name below `invalid` ever exists
# The lists of the policy, as an operator edits them; the names "absent" are of starts that fail for
# another reason.
POLICY_LISTS = (
    (
        "'registry.example.com/flyte-ddp'",
        f"'{IMAGE.rpartition(':')[0]}', 'absent', '{MISSING_IMAGE}'",
    ),
    ("'default', 'flyte-ddp'", "'default', 'flyte-ddp', 'absent'"),
    ("'storage', 'registry'", "'storage', 'registry', 'absent'"),
    ("['filler']", "['filler', 'training']"),
)


def manifest(file: str, namespace: str) -> str:
    """Return a file of deploy/ for `namespace`, with the admission policy's lists edited for the
    tests.
    """
    text = (ROOT / "deploy" / file).read_text().replace("NAMESPACE", namespace)
    for old, new in POLICY_LISTS if file == "admission-policy.yaml" else ():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="session")
def namespace(operator: None) -> Iterator[Namespace]:
    """A namespace as the guide makes it: quota, Pod Security, rights, policies and the template of
    tasks' pods.
    """
    name = f"ddp-test-{uuid.uuid4().hex[:6]}"
    applied = ("namespace.yaml", "rbac.yaml", "admission-policy.yaml")
    for file in applied:
        kubectl("apply", "-f", "-", stdin=manifest(file, name))
    for file in ("networkpolicy.yaml", "pod-template.yaml"):
        kubectl("--namespace", name, "apply", "-f", str(ROOT / "deploy" / file))
    kubectl("--namespace", name, "apply", "-f", "-", stdin=json.dumps(DEFAULT_REQUESTS))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in CODE:
            tar.add(
                ROOT / path,
                path,
                filter=lambda member: None if "__pycache__" in member.name else member,
            )
    code = kubectl(
        *(
            "--namespace",
            name,
            "create",
            "configmap",
            "code",
            "--dry-run=client",
            "--output",
            "json",
        ),
        *("--from-file", "code.tar.gz=/dev/stdin"),
        stdin=archive.getvalue(),
    )
    kubectl("create", "-f", "-", stdin=code)
    namespace = Namespace(name)
    eventually(lambda: _is_counted(name), 120, "a quota of Dask clusters")
    yield namespace
    eventually(
        lambda: not namespace.left_of_clusters(), 300, "an end to everything of all Dask clusters"
    )
    # The command waits until nothing is left in the namespace.
    kubectl("delete", "namespace", name, "--timeout=300s")
    for file in applied:
        kubectl(
            "delete", "-f", "-", "--wait=false", "--ignore-not-found", stdin=manifest(file, name)
        )


def _is_counted(namespace: str) -> bool:
    """Return whether Kubernetes counts what the namespace's quota limits; make the quota again if
    it does not.

    Kubernetes looks for new kinds each 30 seconds, and until five minutes later it refuses Dask
    clusters where a quota that is older than that look counts them.
    """
    used = kubectl(
        "--namespace",
        namespace,
        "get",
        "resourcequota",
        "--output",
        "jsonpath={.items[*].status.used}",
    )
    if "count/daskclusters" in used:
        return True
    kubectl("--namespace", namespace, "delete", "resourcequota", "--all")
    kubectl("apply", "-f", "-", stdin=manifest("namespace.yaml", namespace))
    time.sleep(5)
    return False


@pytest.fixture(scope="session")
def store(namespace: Namespace) -> Iterator[Store]:
    store = Store(_own_address())
    apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "storage", "namespace": namespace.name},
            "stringData": {**store.keys, "AWS_ENDPOINT_URL": store.url},
        }
    )
    store.files.mkdir("runs")
    yield store
    store.stop()


def _own_address() -> str:
    """This machine's address as pods reach it: the one from which it would talk to the API server's
    own.
    """
    api_server = kubectl(
        *("--namespace", "default", "get", "endpoints", "kubernetes"),
        *("--output", "jsonpath={.subsets[0].addresses[0].ip}"),
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((api_server, 9))  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])


@pytest.fixture(autouse=True)
def nothing_left(namespace: Namespace) -> Iterator[None]:
    """Every test must leave its namespace without a cluster; the pods follow, and are waited for
    once, at the end.
    """
    yield
    kinds = ",".join(CLUSTER_KINDS)
    eventually(lambda: not namespace.items(kinds), 300, f"an end to all {kinds}")
