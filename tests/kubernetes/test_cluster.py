"""A Dask cluster on a real Kubernetes: where its workers run, its errors at a failed start, and its
end.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import uuid
from collections.abc import Iterator

import pytest
import yaml

from flyte_ddp.__main__ import main as doctor
from flyte_ddp.cluster.connect import open_cluster, worker_end
from flyte_ddp.cluster.kubernetes import api as kube_api
from flyte_ddp.cluster.kubernetes import checks, lifecycle
from flyte_ddp.cluster.kubernetes.manifest import cluster_name, cluster_spec
from flyte_ddp.errors import ClusterError, PreflightError
from tests.kubernetes.conftest import (
    CONTAINER_SECURITY,
    IMAGE,
    POD_SECURITY,
    ROOT,
    Namespace,
    Store,
    apply,
    eventually,
    kubectl,
    small_cluster,
)

DRIVER = """
    import socket, time
    from flyte_ddp.cluster.config import cluster_config
    from flyte_ddp.cluster.connect import open_cluster

    config = cluster_config(%r)
    with open_cluster(config, socket.gethostname()) as client:
        print(sorted(client.run(socket.gethostname).values()), flush=True)
        print("the cluster is up", flush=True)
        %s
"""


HOG = "held = [bytearray(1 << 24) for _ in range(1000)]"  # more than a worker's pod may have
PRETEND_GPU = "flyte-ddp.test/gpu"  # a resource of its own, for a cluster may have real ones


@contextlib.contextmanager
def one_pretend_gpu() -> Iterator[None]:
    """Something that one node has one of, so that pods can ask for it."""
    node = kubectl("get", "nodes", "--output", "jsonpath={.items[0].metadata.name}")
    patch = ("patch", "node", node, "--subresource=status", "--type=json", "--patch")
    path = "/status/capacity/" + PRETEND_GPU.replace("/", "~1")
    kubectl(*patch, json.dumps([{"op": "add", "path": path, "value": "1"}]))
    try:
        allocatable = ("get", "node", node, "--output", "jsonpath={.status.allocatable}")
        eventually(lambda: PRETEND_GPU in kubectl(*allocatable), 180, "a node with a pretend GPU")
        yield
    finally:
        kubectl(*patch, json.dumps([{"op": "remove", "path": path}]))


@pytest.fixture
def run_name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def test_a_cluster_started_from_outside_uses_two_nodes_and_is_deleted(
    namespace: Namespace, run_name: str
) -> None:
    # local, so that it travels by value: the image has no tests
    def double_in_a_child(number: int) -> int:
        import multiprocessing

        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return int(pool.apply(abs, (-2 * number,)))

    config = namespace.config()
    with open_cluster(config, run_name) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        pods = namespace.pods(cluster_name(run_name), "worker")
        futures = [
            client.submit(
                double_in_a_child, index, workers=[address], allow_other_workers=False, pure=False
            )
            for index, address in enumerate(workers)
        ]
        doubles = client.gather(futures)
        log = worker_end(config, next(iter(workers.values()))["name"]).log
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    assert [worker["nthreads"] for worker in workers.values()] == [1, 1]
    assert doubles == [0, 2]
    assert "distributed.worker" in log
    assert namespace.clusters() == []


def test_a_driver_pod_needs_no_more_than_the_rbac_of_deploy_and_deletes_its_cluster_on_sigterm(
    namespace: Namespace,
) -> None:
    namespace.start_driver("driver", DRIVER % (small_cluster(image=""), "time.sleep(600)"))
    namespace.wait_for_line("driver", "the cluster is up")
    (cluster,) = namespace.items("daskclusters")
    policy = namespace.policy(cluster["metadata"]["name"])
    pods = namespace.items("pods", f"dask.org/cluster-name={cluster['metadata']['name']}")
    namespace.kubectl("exec", "driver", "--", "bash", "-c", "kill -TERM 1")
    assert namespace.wait_for_end("driver") == 128 + signal.SIGTERM, namespace.log("driver")
    assert namespace.clusters() == []
    uid = namespace.kubectl("get", "pod", "driver", "--output", "jsonpath={.metadata.uid}")
    assert [(owner["name"], owner["uid"]) for owner in cluster["metadata"]["ownerReferences"]] == [
        ("driver", uid)
    ]
    assert cluster["spec"]["worker"]["spec"]["containers"][0]["image"].endswith(IMAGE)
    (own,) = policy["spec"]["podSelector"]["matchLabels"].items()
    assert len(pods) == 3
    assert all(own in pod["metadata"]["labels"].items() for pod in pods)
    assert policy["metadata"]["ownerReferences"][0]["uid"] == cluster["metadata"]["uid"]
    eventually(
        lambda: len(namespace.items("networkpolicies")) == 1,
        180,
        "an end to the run's network policy",
    )


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
import socket, sys
for place in sys.argv[1:]:
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print(place, "open")
    except ConnectionRefusedError:
        print(place, "open")
    except OSError as error:
        print(place, "shut")
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
    rbac = (ROOT / "deploy/rbac.yaml").read_text()
    kubectl("apply", "-f", "-", stdin=rbac.replace("NAMESPACE", home.name))
    try:
        (binding,) = (
            each
            for each in yaml.safe_load_all(rbac.replace("NAMESPACE", namespace.name))
            if each["kind"] == "RoleBinding"
        )
        binding["metadata"]["name"] = "flyte-ddp-home"
        binding["subjects"][0]["namespace"] = home.name
        apply(binding)
        code = json.loads(namespace.kubectl("get", "configmap", "code", "--output", "json"))
        kubectl(
            "create",
            "-f",
            "-",
            stdin=json.dumps({**code, "metadata": {"name": "code", "namespace": home.name}}),
        )
        bucket = urllib.parse.urlsplit(store.url)
        script = ELSEWHERE % (
            small_cluster(namespace=namespace.name),
            (bucket.hostname, bucket.port),
        )
        home.start_driver("elsewhere", script)
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
        stranger = (
            "run",
            "stranger",
            f"--image={IMAGE}",
            "--image-pull-policy=IfNotPresent",
            "--restart=Never",
        )
        security = {
            "spec": {**POD_SECURITY, "containers": [{"name": "stranger", **CONTAINER_SECURITY}]}
        }
        stranger += (
            "--labels=execution-id=another",
            "--override-type=strategic",
            f"--overrides={json.dumps(security)}",
        )
        namespace.kubectl(*stranger, "--command", "--", "python", "-c", TRY, *places)
        assert namespace.wait_for_end("stranger") == 0
        assert namespace.log("stranger").splitlines() == [f"{place} shut" for place in places]
        url = f"http://{service}:8787/api/v1/check_idle"
        ask = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=9).status)"
        operator = ("--namespace", "dask-operator", "exec", "deploy/dask-operator", "--")
        assert kubectl(*operator, "python", "-c", ask).strip() == "200"
        home.kubectl("delete", "pod", "elsewhere", "--grace-period=20")
        eventually(lambda: not namespace.clusters(), 180, "the end of the cluster")
    finally:
        kubectl("delete", "-f", "-", "--wait=false", stdin=rbac.replace("NAMESPACE", home.name))
        kubectl("delete", "namespace", home.name, "--wait=false")


def test_the_remedies_of_the_doctor_make_a_new_namespace_fit(
    operator: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name = f"ddp-test-doctor-{uuid.uuid4().hex[:6]}"
    command = ["doctor", "--cluster", json.dumps(small_cluster(namespace=name))]
    assert doctor(command) == 1
    assert f"namespace {name} does not exist; create it with" in capsys.readouterr().out
    kubectl("create", "namespace", name)
    try:
        assert doctor(command) == 1
        findings = capsys.readouterr().out
        remedies = re.findall(
            r"^(?:FAILED|warning) .*?: ((?:sed|kubectl) .*)$", findings, re.MULTILINE
        )
        assert len(remedies) == 3, findings
        for remedy in remedies:
            subprocess.run(["bash", "-c", remedy], check=True, stdout=subprocess.DEVNULL)
        assert doctor(command) == 0
        findings = capsys.readouterr().out
        assert not re.search("^(FAILED|warning)", findings, re.MULTILINE), findings
        assert f"could start in namespace {name}" in findings
    finally:
        for kind in ("clusterrole", "clusterrolebinding"):
            kubectl("delete", kind, f"flyte-ddp-preflight-{name}", "--ignore-not-found")
        kubectl("delete", "namespace", name, "--wait=false")


def test_every_manifest_of_deploy_applies_cleanly(namespace: Namespace) -> None:
    served = kubectl("api-resources")
    for file in sorted((ROOT / "deploy").glob("*.yaml")):
        manifest = file.read_text().replace("NAMESPACE", namespace.name)
        if "monitoring.coreos.com" in manifest and "podmonitors" not in served:
            continue  # of the Prometheus operator
        told = kubectl(
            "--namespace",
            namespace.name,
            "apply",
            "--dry-run=server",
            "--validate=true",
            "-f",
            "-",
            stdin=manifest,
        )
        assert told.count("(server dry run)") == len(manifest.split("\n---\n")), (
            f"{file.name}: {told}"
        )


def test_the_api_server_accepts_the_examples_of_the_page_about_pods(namespace: Namespace) -> None:
    page = (ROOT / "docs/clusters.md").read_text()
    for example in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        config = namespace.config(**yaml.safe_load(example)["kubernetes"])
        spec = {**cluster_spec(config, "ddp-x-00000000"), "apiVersion": "kubernetes.dask.org/v1"}
        kubectl(
            "--namespace",
            namespace.name,
            "create",
            "--dry-run=server",
            "-f",
            "-",
            stdin=json.dumps(spec),
        )


def test_the_pod_template_pulls_no_image_that_is_present(namespace: Namespace) -> None:
    file = str(ROOT / "deploy/pod-template.yaml")
    policy = "jsonpath={.template.spec.containers[0].imagePullPolicy}"
    assert (
        namespace.kubectl("apply", "-f", file, "--dry-run=server", "--output", policy)
        == "IfNotPresent"
    )


@pytest.mark.parametrize(
    "right",
    [
        *(
            "get secrets",
            "list secrets",
            "create pods",
            "delete pods",
            "create pods/exec",
            "get configmaps",
        ),
        *(
            "patch daskclusters.kubernetes.dask.org",
            "list daskclusters.kubernetes.dask.org",
            "delete secrets",
        ),
        *("delete networkpolicies.networking.k8s.io", "create roles"),
    ],
)
def test_the_service_account_has_no_other_permission(namespace: Namespace, right: str) -> None:
    account = f"system:serviceaccount:{namespace.name}:flyte-ddp"
    assert (
        namespace.kubectl("auth", "can-i", *right.split(), "--as", account, check=False).strip()
        == "no"
    )
    needed = ("create", "networkpolicies.networking.k8s.io")
    assert namespace.kubectl("auth", "can-i", *needed, "--as", account).strip() == "yes"


def test_preflight_lists_each_missing_permission(namespace: Namespace) -> None:
    namespace.start_driver(
        "powerless", DRIVER % (small_cluster(), "pass"), service_account="default"
    )
    assert namespace.wait_for_end("powerless") != 0
    log = namespace.log("powerless")
    assert "PreflightError" in log
    (finding,) = [
        line for line in log.splitlines() if "this pod's service account may not " in line
    ]
    for right in (
        "create daskclusters.kubernetes.dask.org",
        "delete daskclusters",
        "create networkpolicies.networking.k8s.io",
        "create secrets",
        "list pods",
        "get pods/log",
    ):
        assert right in finding
    assert "deploy/rbac.yaml" in finding


def test_an_idle_driver_keeps_its_cluster_and_a_killed_one_loses_it(namespace: Namespace) -> None:
    # The killed driver's pod stays, failed: Kubernetes sees no reason to delete what it owns, only
    # the operator does.
    namespace.start_driver(
        "killed", DRIVER % (small_cluster(image="", idle_timeout=60), "time.sleep(600)")
    )
    namespace.wait_for_line("killed", "the cluster is up")
    time.sleep(80)
    assert len(namespace.clusters()) == 1, "gone with a driver that lives"
    namespace.kubectl(
        "exec", "killed", "--", "bash", "-c", "kill -KILL $(cat /proc/1/task/1/children)"
    )
    namespace.wait_for_end("killed")
    assert namespace.phase("killed") == "Failed"
    eventually(lambda: not namespace.clusters(), 180, "the deletion of an idle cluster")


def test_ctrl_c_outside_deletes_the_cluster(namespace: Namespace, run_name: str) -> None:
    script = (
        "import signal, time\n"
        "from flyte_ddp.cluster.config import ClusterConfig, KubernetesConfig\n"
        "from flyte_ddp.cluster.connect import open_cluster\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a background "
        "job of a shell\n"
        f"with open_cluster({namespace.config()!r}, {run_name!r}):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == b"up\n"
        driver.send_signal(signal.SIGINT)
        driver.wait(timeout=300)
    finally:
        driver.kill()
    assert namespace.clusters() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpus_per_node": 1, "gpu_resource": PRETEND_GPU}, f"Insufficient {PRETEND_GPU}"),
        ({"env_from_secrets": ["absent"]}, 'secret "absent" not found'),
        (
            {
                "pod_template": {
                    "containers": [{"name": "worker", "command": ["python", "-c", HOG]}]
                }
            },
            "OOMKilled",
        ),
    ],
)
def test_an_impossible_start_ends_at_its_deadline_with_the_reason(
    namespace: Namespace,
    run_name: str,
    changes: dict[str, object],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as in a pod, which may see none of it
    monkeypatch.setattr(lifecycle, "preflight", lambda *given: None)
    config = namespace.config(start_timeout=20, autoscaled_nodes=True, **changes)
    with pytest.raises(ClusterError, match=reason), open_cluster(config, run_name):
        raise AssertionError("the cluster came up")
    assert namespace.clusters() == []


def test_a_run_starts_with_the_nodes_that_came_where_min_nodes_allows(
    namespace: Namespace, run_name: str
) -> None:
    with one_pretend_gpu():
        config = namespace.config(
            min_nodes=1,
            start_timeout=45,
            gpus_per_node=1,
            gpu_resource=PRETEND_GPU,
            worker_cpus=0.1,
        )
        with open_cluster(config, run_name) as client:
            assert len(client.scheduler_info(n_workers=-1)["workers"]) == 1
            assert f"Insufficient {PRETEND_GPU}" in kube_api.explain(config, run_name)


def test_a_start_without_a_running_operator_ends_early(
    namespace: Namespace, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "OPERATOR_TIMEOUT", 5.0)
    kubectl("--namespace", "dask-operator", "scale", "deployment", "dask-operator", "--replicas=0")
    kubectl(
        *("--namespace", "dask-operator", "wait", "--for=delete", "pod", "--timeout=300s"),
        *("--selector", "app.kubernetes.io/name=dask-kubernetes-operator"),
    )
    try:
        with (
            pytest.raises(ClusterError, match="operator did not react"),
            open_cluster(namespace.config(), run_name),
        ):
            raise AssertionError("the cluster came up")
    finally:
        kubectl(
            "--namespace", "dask-operator", "scale", "deployment", "dask-operator", "--replicas=1"
        )
        kubectl(
            "--namespace",
            "dask-operator",
            "rollout",
            "status",
            "deployment/dask-operator",
            "--timeout=300s",
        )
    assert namespace.clusters() == []


def test_an_existing_name_is_refused_and_its_cluster_kept(
    namespace: Namespace, run_name: str
) -> None:
    with open_cluster(namespace.config(num_nodes=1), run_name) as client:
        with (
            pytest.raises(ClusterError, match="exists already"),
            open_cluster(namespace.config(num_nodes=1), run_name),
        ):
            raise AssertionError("connected to somebody else's cluster")
        assert client.submit(sum, [1, 2]).result(timeout=30) == 3


def test_preflight_collects_requests_that_never_fit(namespace: Namespace, run_name: str) -> None:
    apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "small", "namespace": namespace.name},
            "spec": {"hard": {"limits.memory": "1Gi", "requests.cpu": "100"}},
        }
    )
    try:
        config = namespace.config(
            worker_cpus=1000, pod_template={"nodeSelector": {"absent": "label"}}
        )
        with pytest.raises(PreflightError) as caught, open_cluster(config, run_name):
            raise AssertionError("the cluster came up")
    finally:
        namespace.kubectl("delete", "resourcequota", "small")
    message = str(caught.value)
    assert "quota small" in message
    assert "allows limits.memory up to 1Gi, and this run needs 2.5Gi" in message
    assert "allows requests.cpu up to 100, and this run needs 2000.5" in message
    assert "no node could ever run a worker pod" in message
    assert "without the label absent=label" in message
    assert "scheduler pod" not in message


def test_preflight_names_a_missing_namespace_and_a_missing_image(
    namespace: Namespace, run_name: str
) -> None:
    config = namespace.config(namespace="ddp-absent", image="")
    with pytest.raises(PreflightError) as caught, open_cluster(config, run_name):
        raise AssertionError("the cluster came up")
    assert len(caught.value.findings) == 2
    assert "no image is set" in caught.value.findings[0]
    assert "namespace ddp-absent does not exist" in caught.value.findings[1]


def test_preflight_finds_that_the_operator_is_not_installed(
    namespace: Namespace, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The API server is asked for a group that nobody has installed: its answer is the one before an
    # installation.
    monkeypatch.setattr(checks, "GROUP", "absent.dask.org")
    with (
        pytest.raises(PreflightError, match="the Dask operator is not installed"),
        open_cluster(namespace.config(), run_name),
    ):
        raise AssertionError("the cluster came up")
