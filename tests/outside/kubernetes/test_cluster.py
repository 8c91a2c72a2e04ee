"""A Dask cluster on a real Kubernetes: where its workers run, its errors at a failed start, and its
end.
"""

import json
import re
import signal
import subprocess
import sys
import urllib.parse
import uuid

import pytest
import yaml

from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.cluster.kubernetes.api import pod_end
from flyte_ddp.cluster.kubernetes.manifest import avoid_nodes, cluster_name, cluster_spec
from flyte_ddp.errors import ClusterError
from tests.outside.kubernetes.conftest import (
    KILL_UNANNOUNCED,
    ROOT,
    SCRIPT,
    Namespace,
    Store,
    apply,
    eventually,
    kubectl,
    manifest,
    small_cluster,
)

IDLE = """
    import socket, time
    from flyte_ddp.cluster.config import cluster_config
    from flyte_ddp.cluster.connect import open_cluster

    with open_cluster(cluster_config(%r), socket.gethostname()):
        print("the cluster is up", flush=True)
        time.sleep(600)
"""
# This takes more memory than a pod may have.
HOG = "held = [bytearray(1 << 24) for _ in range(1000)]"
PRETEND_GPU = "flyte-ddp.test/gpu"  # a resource that no node has


@pytest.fixture
def run_name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


OUTSIDE = """
import json, multiprocessing, signal, time
from flyte_ddp.cluster.config import ClusterConfig, KubernetesConfig
from flyte_ddp.cluster.connect import open_cluster

def double_in_a_child(number):  # of the main module: it travels by value
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(abs, (-2 * number,))

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's background job
with open_cluster(%r, %r) as client:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    options = {"allow_other_workers": False, "pure": False}
    doubles = [client.submit(double_in_a_child, 3, workers=[each], **options) for each in workers]
    print(json.dumps(client.gather(doubles)), flush=True)
    time.sleep(600)
"""


def test_a_cluster_from_outside_uses_two_nodes_is_nobody_elses_and_goes_with_ctrl_c(
    namespace: Namespace, run_name: str
) -> None:
    config = namespace.config()
    command = (sys.executable, "-c", OUTSIDE % (config, run_name))
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert driver.stdout is not None
    try:
        assert json.loads(driver.stdout.readline()) == [6, 6]
        pods = namespace.pods(cluster_name(run_name), "worker")
        assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
        assert "distributed.worker" in pod_end(config, pods[0]["metadata"]["name"], 0.0, 20).log
        with (
            pytest.raises(ClusterError, match="exists already"),
            open_cluster(config, run_name),
        ):
            raise AssertionError("connected to somebody else's cluster")
        assert namespace.clusters() == [cluster_name(run_name)]
        driver.send_signal(signal.SIGINT)
        driver.wait()
    finally:
        driver.kill()
    assert namespace.clusters() == []


ELSEWHERE = """
    import dataclasses, logging, socket, sys, time
    from flyte_ddp.cluster.config import cluster_config
    from flyte_ddp.cluster.connect import open_cluster

    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    with open_cluster(cluster_config(%r), socket.gethostname()) as client:
        def look(address, port):
            with socket.create_connection((address, port), timeout=10):
                return socket.getaddrinfo("kubernetes.default.svc", 443)[0][4][0]

        print("workers reach", client.run(look, *%r), flush=True)
        print("the cluster is up", flush=True)
        time.sleep(600)
"""
TRY = """
import socket
from concurrent.futures import ThreadPoolExecutor

def look(place):
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        return "open"
    except ConnectionRefusedError:
        return "open"
    except OSError as error:
        return "shut"

places = %r
with ThreadPoolExecutor(len(places)) as threads:
    for place, found in zip(places, threads.map(look, places)):
        print(place, found)
"""


def test_a_pod_of_another_run_reaches_nothing_of_a_cluster_whose_driver_may_live_elsewhere(
    namespace: Namespace, store: Store
) -> None:
    """Its driver in another namespace, its workers, DNS, the object store and the operator work
    meanwhile.
    """
    home = Namespace(f"{namespace.name}-home")
    kubectl("create", "namespace", home.name)
    kubectl("label", "namespace", home.name, "pod-security.kubernetes.io/enforce=restricted")
    rbac = manifest("rbac.yaml", home.name)
    kubectl("apply", "-f", "-", stdin=rbac)
    account = f"--serviceaccount={home.name}:flyte-ddp"
    namespace.kubectl("create", "rolebinding", "home", "--role=flyte-ddp", account)
    try:
        home.copy_code(namespace)
        bucket = urllib.parse.urlsplit(store.url)
        script = ELSEWHERE % (
            small_cluster(namespace=namespace.name),
            (bucket.hostname, bucket.port),
        )
        home.start_driver("elsewhere", SCRIPT, script)
        log = home.wait_for_line("elsewhere", "the cluster is up")
        assert "seems not to enforce" not in log
        (cluster,) = namespace.clusters()
        service = f"{cluster}-scheduler.{namespace.name}"
        addresses = [
            pod["status"]["podIP"]
            for pod in namespace.items("pods", f"dask.org/cluster-name={cluster}")
        ]
        places = [
            f"{service}:8786",
            f"{service}:8787",
            *(f"{address}:{port}" for address in addresses for port in (8786, 40000)),
        ]
        namespace.start_driver("stranger", SCRIPT, TRY % places)
        assert namespace.wait_for_end("stranger") == 0
        assert namespace.log("stranger").splitlines() == [f"{place} shut" for place in places]
        url = f"http://{service}:8787/api/v1/check_idle"
        ask = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=9).status)"
        operator = ("--namespace", "dask-operator", "exec", "deploy/dask-operator", "--")
        assert kubectl(*operator, "python", "-c", ask).strip() == "200"
        home.kubectl("delete", "pod", "elsewhere", "--grace-period=20")
        eventually(lambda: not namespace.clusters(), 180, "the end of the cluster")
    finally:
        kubectl("delete", "-f", "-", "--wait=false", stdin=rbac)
        kubectl("delete", "namespace", home.name, "--wait=false")


def test_the_api_server_accepts_every_manifest_of_deploy_and_the_examples_of_the_page_about_pods(
    namespace: Namespace,
) -> None:
    texts = [
        file.read_text().replace("NAMESPACE", namespace.name)
        for file in sorted((ROOT / "deploy").glob("*.yaml"))
        if file.name != "kustomization.yaml"
    ]
    for example in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/clusters.md").read_text(), re.S):
        config = namespace.config(**yaml.safe_load(example)["kubernetes"])
        texts.append(json.dumps(cluster_spec(config, "ddp-x-00000000")))
    served = kubectl("api-resources")
    for text in texts:
        # A PodMonitor needs the Prometheus operator, and a queue needs Kueue.
        kinds = {"monitoring.coreos.com": "podmonitors", "kueue.x-k8s.io/v": "localqueues"}
        if all(kind in served for group, kind in kinds.items() if group in text):
            command = ("apply", "--dry-run=server", "--validate=true", "-f", "-")
            told = namespace.kubectl(*command, stdin=text)
            assert told.count("(server dry run)") == len(text.split("\n---\n")), told


def test_a_killed_driver_whose_pod_stays_loses_its_cluster(namespace: Namespace) -> None:
    # Kubernetes sees no reason to delete what a failed pod owns, only the operator does.
    namespace.start_driver("killed", SCRIPT, IDLE % (small_cluster(image="", num_nodes=1),))
    namespace.wait_for_line("killed", "the cluster is up")
    namespace.kubectl("exec", "killed", "--", "bash", "-c", KILL_UNANNOUNCED)
    namespace.wait_for_end("killed")
    assert namespace.phase("killed") == "Failed"
    (cluster,) = namespace.clusters()
    soon = ("--type=merge", "--patch", '{"spec": {"idleTimeout": 5}}')  # the least is a minute
    namespace.kubectl("patch", "daskcluster", cluster, *soon)
    eventually(lambda: not namespace.clusters(), 180, "the deletion of an idle cluster")


def test_an_impossible_start_ends_at_its_deadline_with_the_reasons(
    namespace: Namespace, run_name: str
) -> None:
    hog = {"containers": [{"name": "scheduler", "command": ["python", "-c", HOG]}]}
    config = namespace.config(
        start_timeout=20,
        autoscaled_nodes=True,
        gpus_per_node=1,
        gpu_resource=PRETEND_GPU,
        scheduler_pod_template=hog,
    )
    with pytest.raises(ClusterError) as caught, open_cluster(config, run_name):
        raise AssertionError("the cluster came up")
    assert "OOMKilled" in str(caught.value)
    assert f"Insufficient {PRETEND_GPU}" in str(caught.value)
    assert namespace.clusters() == []


def test_workers_prefer_nodes_that_were_not_slow_and_start_where_all_were(
    namespace: Namespace,
) -> None:
    nodes = [
        each["metadata"]["name"]
        for each in json.loads(kubectl("get", "nodes", "--output", "json"))["items"]
    ]

    def find_node(name: str, slow: list[str]) -> str:
        config = avoid_nodes(namespace.config(worker_cpus=0.1), slow)
        spec = cluster_spec(config, name)["spec"]["worker"]["spec"] | {"restartPolicy": "Never"}
        metadata = {"name": name, "namespace": namespace.name}
        apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        place = ("get", "pod", name, "--output", "jsonpath={.spec.nodeName}")
        found = eventually(lambda: namespace.kubectl(*place), 60, f"a node for {name}")
        namespace.kubectl("delete", "pod", name, "--force", "--grace-period=0")
        return str(found)

    for number in range(4):
        assert find_node(f"retry-{number}", [nodes[0]]) != nodes[0]
    assert find_node("anywhere", nodes) in nodes
