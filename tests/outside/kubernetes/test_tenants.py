"""What a pod of one namespace can reach of a run in another: nothing. `-s` prints the table of the
attempts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.outside.kubernetes.conftest import (
    ROOT,
    SCRIPT,
    Namespace,
    Store,
    kubectl,
    manifest,
)
from tests.outside.kubernetes.test_policy import with_pod
from tests.outside.kubernetes.test_training import (  # noqa: F401 - a fixture
    CONFIGS,
    WITHOUT_DROPOUT,
    Driver,
    start,
)

METRICS_PORT = 9464
# the run lasts until the test ends it
CONFIGS["owner"] = {"epochs": 1000}
SERVE = f"""
    from http.server import HTTPServer, SimpleHTTPRequestHandler
    server = HTTPServer(("", {METRICS_PORT}), SimpleHTTPRequestHandler)
    print("serves", flush=True)
    server.serve_forever()
"""
# This prints the ports on which a pod listens: of its worker, its agent and the rendezvous.
PORTS = """
import glob, json
lines = [line.split() for file in glob.glob("/proc/net/tcp*") for line in open(file)]
local = [words[1].split(":") for words in lines if words[3] == "0A"]
print(json.dumps(sorted({int(port, 16) for address, port in local if address != "0100007F"})))
"""
ATTACK = """
    import json, socket, ssl, sys, urllib.error, urllib.request
    from concurrent.futures import ThreadPoolExecutor
    import fsspec
    from flyte_ddp.cluster.config import cluster_config
    from flyte_ddp.cluster.kubernetes.api import POD_IDENTITY, own_namespace
    from flyte_ddp.errors import ConfigError
    from flyte_ddp.project.admission import Allowed, check_allowed
    from flyte_ddp.storage.limits import check_places

    plan = json.loads(%r)

    def connect(host, port):
        try:
            socket.create_connection((host, port), timeout=3).close()
        except ConnectionRefusedError:
            return ""
        except OSError as error:
            return f"no answer: {error}"
        return ""

    def ask(method, path, body):
        headers = {"Authorization": "Bearer " + (POD_IDENTITY / "token").read_text()}
        headers["Content-Type"] = "application/json"
        url, data = "https://kubernetes.default.svc" + path, body and json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        context = ssl.create_default_context(cafile=str(POD_IDENTITY / "ca.crt"))
        try:
            urllib.request.urlopen(request, timeout=10, context=context)
        except urllib.error.HTTPError as error:
            answer = json.loads(error.read())
            return f"{error.code} {answer['message']}" if error.code in (403, 422) else ""
        return ""

    def launch(**cluster):
        try:
            check_allowed(cluster_config(cluster), Allowed(), own_namespace())
        except ConfigError as error:
            return str(error)
        return ""

    def open_place(field, url):
        try:
            check_places([(field, url)], plan["urls"])
        except ConfigError as error:
            return str(error)
        return ""

    def read(url):
        store = fsspec.filesystem("s3", endpoint_url=plan["store"], anon=True)
        try:
            store.ls(url)
        except PermissionError as error:
            return f"403 {error}"
        return ""

    kinds = {"connect": connect, "ask": ask, "open_place": open_place, "read": read}

    def attempt(name, kind, arguments):
        if kind == "launch":
            refusal = launch(**arguments)
        else:
            refusal = kinds[kind](*arguments)
        return {"attempt": name, "refusal": refusal}

    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda each: attempt(*each), plan["attempts"]):
            print(json.dumps(found), flush=True)
"""
Attempt = tuple[str, str, Any]


@pytest.fixture
def neighbour(namespace: Namespace) -> Iterator[Namespace]:
    """Another team's namespace, as the guide makes it."""
    other = Namespace(f"{namespace.name}-b")
    files = ("namespace.yaml", "rbac.yaml", "admission-policy.yaml")
    for file in files:
        kubectl("apply", "-f", "-", stdin=manifest(file, other.name))
    other.kubectl("delete", "resourcequota", "--all")  # a new quota refuses clusters for minutes
    other.kubectl("apply", "-f", str(ROOT / "deploy/networkpolicy.yaml"))
    other.copy_code(namespace)
    yield other
    kubectl("delete", "namespace", other.name, "--wait=false")
    for file in files:
        text = manifest(file, other.name)
        kubectl("delete", "-f", "-", "--wait=false", "--ignore-not-found", stdin=text)


def test_no_attempt_from_another_namespace_reaches_a_run(
    namespace: Namespace,
    neighbour: Namespace,
    store: Store,
    start: Callable[..., Driver],  # noqa: F811
) -> None:
    namespace.start_driver("metrics", SCRIPT, SERVE)
    owner = start("owner", "owner", recipe=WITHOUT_DROPOUT, num_nodes=1, alone_seconds="0.4")
    owner.wait_for_step("owner", 2)
    namespace.wait_for_line("metrics", "serves")
    (cluster,) = namespace.clusters()
    attempts = [
        *list_connections(namespace, cluster),
        *list_requests(namespace, neighbour, cluster),
        *list_launches(namespace, cluster),
    ]
    assert len(attempts) >= 20
    plan = {"attempts": attempts, "urls": ["s3://runs/own/*"], "store": store.url}
    neighbour.start_driver("attacker", SCRIPT, ATTACK % json.dumps(plan))
    # The labels of the run's own pods do not help.
    own = (f"dask.org/cluster-name={cluster}", "app.kubernetes.io/managed-by=flyte-ddp")
    neighbour.kubectl("label", "pod", "attacker", *own)
    # Within its namespace the port of metrics is open, so only the policy keeps it shut.
    address = pod_address(namespace, "metrics")
    command = f"import socket; socket.create_connection(({address!r}, {METRICS_PORT}), 5)"
    namespace.kubectl("exec", owner.pod, "--", "python", "-c", command)
    assert neighbour.wait_for_end("attacker") == 0, neighbour.log("attacker")
    found = [json.loads(line) for line in neighbour.log("attacker").splitlines()]
    print("\n| attempt | refused by |\n|---|---|")
    for each in found:
        print(f"| {each['attempt']} | {each['refusal']} |")
    assert [each["attempt"] for each in found] == [name for name, *_ in attempts]
    assert [each["attempt"] for each in found if not each["refusal"]] == []
    assert namespace.clusters() == [cluster]
    namespace.kubectl("delete", "pod", "metrics", owner.pod, "--wait=false")


def pod_address(namespace: Namespace, name: str) -> str:
    return namespace.kubectl("get", "pod", name, "--output", "jsonpath={.status.podIP}")


def list_connections(namespace: Namespace, cluster: str) -> list[Attempt]:
    """Return attempts to reach ports of the run's pods."""
    service = f"{cluster}-scheduler.{namespace.name}"
    (scheduler,) = namespace.pods(cluster, "scheduler")
    (worker,) = namespace.pods(cluster, "worker")
    name, address = worker["metadata"]["name"], worker["status"]["podIP"]
    ports = json.loads(namespace.kubectl("exec", name, "--", "python", "-c", PORTS))
    assert len(ports) >= 2
    metrics = pod_address(namespace, "metrics")
    return [
        ("the scheduler's port, by its Service", "connect", (service, 8786)),
        ("the scheduler's dashboard", "connect", (service, 8787)),
        ("the scheduler's port, by its pod", "connect", (scheduler["status"]["podIP"], 8786)),
        *((f"port {port} of the worker's pod", "connect", (address, port)) for port in ports),
        ("the metrics of a task", "connect", (metrics, METRICS_PORT)),
    ]


def list_requests(namespace: Namespace, neighbour: Namespace, cluster: str) -> list[Attempt]:
    """Return requests to the API server."""
    core = f"/api/v1/namespaces/{namespace.name}"
    dask = f"/apis/kubernetes.dask.org/v1/namespaces/{namespace.name}"
    own = f"/apis/kubernetes.dask.org/v1/namespaces/{neighbour.name}/daskclusters"
    networking = f"/apis/networking.k8s.io/v1/namespaces/{namespace.name}/networkpolicies"
    group = {
        "apiVersion": "kubernetes.dask.org/v1",
        "kind": "DaskWorkerGroup",
        "metadata": {"name": "more"},
        "spec": {"cluster": cluster, "worker": {"replicas": 1, "spec": {"containers": []}}},
    }
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "open"},
        "spec": {"podSelector": {}, "ingress": [{}]},
    }
    host = {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}
    return [
        ("the storage keys in its Secret", "ask", ("GET", f"{core}/secrets/storage", None)),
        ("its certificate", "ask", ("GET", f"{core}/secrets/{cluster}", None)),
        ("its pods", "ask", ("GET", f"{core}/pods", None)),
        ("its driver's log", "ask", ("GET", f"{core}/pods/owner/log", None)),
        ("its events", "ask", ("GET", f"{core}/events", None)),
        ("a shell", "ask", ("POST", f"{core}/pods/owner/exec?command=sh", None)),
        ("a DaskCluster there", "ask", ("POST", f"{dask}/daskclusters", with_pod())),
        ("a worker for its cluster", "ask", ("POST", f"{dask}/daskworkergroups", group)),
        ("its end", "ask", ("DELETE", f"{dask}/daskclusters/{cluster}", None)),
        ("an open NetworkPolicy", "ask", ("POST", networking, policy)),
        ("the node's files, by an own cluster", "ask", ("POST", own, with_pod(**host))),
        (
            "a priority, by an own cluster",
            "ask",
            ("POST", own, with_pod(priorityClassName="system-node-critical")),
        ),
    ]


def list_launches(namespace: Namespace, cluster: str) -> list[Attempt]:
    """Return launches that name what only a registration may name, and places of the run."""
    address = f"tls://{cluster}-scheduler.{namespace.name}:8786"
    kubernetes = {"kind": "kubernetes"}
    priority = {"pod_template": {"priorityClassName": "system-node-critical"}}
    return [
        (
            "a launch into its namespace",
            "launch",
            {**kubernetes, "kubernetes": {"namespace": namespace.name}},
        ),
        (
            "a launch on its scheduler",
            "launch",
            {"kind": "existing", "scheduler_address": address},
        ),
        ("a launch with a priority", "launch", {**kubernetes, "kubernetes": priority}),
        ("its checkpoints, by a launch", "open_place", ("checkpoints", "s3://runs/owner")),
        ("its results, by a launch", "open_place", ("output", "s3://runs/own/../owner/results")),
        ("its champion, by a launch", "open_place", ("champion", "s3://runs/champions/owner")),
        ("its checkpoints, without its keys", "read", ("runs/owner",)),
    ]
