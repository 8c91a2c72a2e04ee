"""What is asked of Kubernetes, to the letter, without a cluster. Its life on a real one is in tests/kubernetes."""

import dataclasses
import re
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.config
import distributed  # noqa: F401 - adds its defaults to the configuration
import pytest
import yaml

from flyte_ddp.cluster.config import ClusterConfig, cluster_config, dask_config, parse_quantity
from flyte_ddp.cluster.kubernetes.lifecycle import duration
from flyte_ddp.cluster.kubernetes.manifest import (
    Driver,
    as_cluster_name,
    cluster_name,
    cluster_spec,
    merge_pod,
    network_policy,
)
from flyte_ddp.cluster.kubernetes.preflight import NEEDED_EVERYWHERE, requests_of, tolerates
from flyte_ddp.errors import ConfigError

DEPLOY = Path(__file__).parents[1] / "deploy"
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
TEMPORARY_MOUNT = {"name": "temporary", "mountPath": "/tmp"}
TEMPORARY_VOLUME = {"name": "temporary", "emptyDir": {}}
POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
GANG_SETTINGS = [
    {"name": "HOME", "value": "/tmp"},
    {"name": "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "value": "0"},
    {"name": "DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT", "value": "10s"},
    {"name": "DASK_DISTRIBUTED__WORKER__DAEMON", "value": "False"},
    {"name": "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED", "value": "False"},
    {"name": "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL", "value": "1s"},
    {"name": "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL", "value": "5s"},
    {"name": "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL", "value": "20s"},
]
ROUTES = (
    "['distributed.http.scheduler.api', 'distributed.http.scheduler.prometheus', 'distributed.http.scheduler.info', "
    "'distributed.http.scheduler.json', 'distributed.http.health', 'distributed.http.proxy', "
    "'distributed.http.statics']"
)


def test_the_whole_specification_of_a_gpu_cluster() -> None:
    config = ClusterConfig(
        num_nodes=4,
        gpus_per_node=2,
        image="registry.example.com/flyte-ddp:1",
        worker_cpus=7.5,
        worker_memory="56Gi",
        shared_memory="16Gi",
        scheduler_cpus=0.25,
        scheduler_memory="512Mi",
        node_selector={"gpu": "a100"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        service_account="reader",
        image_pull_policy="Always",
        image_pull_secrets=["registry"],
        labels={"team": "vision"},
        annotations={"cost-center": "7"},
        env={"NCCL_DEBUG": "INFO"},
        env_from_secrets=["storage"],
        pod_template={"priorityClassName": "batch"},
        idle_timeout=120,
    )
    owner = Driver("task-pod", "0a1b", "flytesnacks-development", "registry.example.com/flyte-ddp:1")
    worker_resources = {"cpu": "7500m", "memory": "56Gi", "nvidia.com/gpu": "2"}
    scheduler_resources = {"cpu": "250m", "memory": "512Mi"}
    assert cluster_spec(config, "ddp-x-00000000-0", owner) == {
        "apiVersion": "kubernetes.dask.org/v1",
        "kind": "DaskCluster",
        "metadata": {
            "name": "ddp-x-00000000-0",
            "labels": {
                "team": "vision",
                "app.kubernetes.io/name": "flyte-ddp",
                "app.kubernetes.io/managed-by": "flyte-ddp",
            },
            "annotations": {"cost-center": "7"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "task-pod", "uid": "0a1b"}],
        },
        "spec": {
            "idleTimeout": 120,
            "scheduler": {
                "spec": {
                    "automountServiceAccountToken": False,
                    "securityContext": POD_SECURITY,
                    "serviceAccountName": "reader",
                    "imagePullSecrets": [{"name": "registry"}],
                    "containers": [
                        {
                            "name": "scheduler",
                            "image": "registry.example.com/flyte-ddp:1",
                            "imagePullPolicy": "Always",
                            "args": ["dask", "scheduler", "--host", "0.0.0.0"],
                            "env": [
                                *GANG_SETTINGS,
                                {"name": "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES", "value": ROUTES},
                            ],
                            "resources": {"requests": scheduler_resources, "limits": scheduler_resources},
                            "securityContext": SECURITY,
                            "ports": [
                                {"name": "tcp-comm", "containerPort": 8786, "protocol": "TCP"},
                                {"name": "http-dashboard", "containerPort": 8787, "protocol": "TCP"},
                            ],
                            "readinessProbe": {
                                "httpGet": {"port": "http-dashboard", "path": "/health"},
                                "periodSeconds": 1,
                                "timeoutSeconds": 5,
                            },
                            "livenessProbe": {
                                "httpGet": {"port": "http-dashboard", "path": "/health"},
                                "initialDelaySeconds": 60,
                                "periodSeconds": 20,
                                "timeoutSeconds": 10,
                            },
                            "volumeMounts": [TEMPORARY_MOUNT],
                        }
                    ],
                    "volumes": [TEMPORARY_VOLUME],
                },
                "service": {
                    "type": "ClusterIP",
                    "selector": {
                        "dask.org/cluster-name": "ddp-x-00000000-0",
                        "dask.org/component": "scheduler",
                    },
                    "ports": [
                        {"name": "tcp-comm", "protocol": "TCP", "port": 8786, "targetPort": "tcp-comm"},
                        {"name": "http-dashboard", "protocol": "TCP", "port": 8787, "targetPort": "http-dashboard"},
                    ],
                },
            },
            "worker": {
                "replicas": 4,
                "spec": {
                    "automountServiceAccountToken": False,
                    "securityContext": POD_SECURITY,
                    "serviceAccountName": "reader",
                    "imagePullSecrets": [{"name": "registry"}],
                    "priorityClassName": "batch",
                    "nodeSelector": {"gpu": "a100"},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                    "containers": [
                        {
                            "name": "worker",
                            "image": "registry.example.com/flyte-ddp:1",
                            "imagePullPolicy": "Always",
                            "args": [
                                *("dask", "worker", "--name", "$(DASK_WORKER_NAME)"),
                                *("--nthreads", "1", "--memory-limit", "0"),
                            ],
                            "env": [*GANG_SETTINGS, {"name": "NCCL_DEBUG", "value": "INFO"}],
                            "envFrom": [{"secretRef": {"name": "storage"}}],
                            "resources": {"requests": worker_resources, "limits": worker_resources},
                            "securityContext": SECURITY,
                            "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}, TEMPORARY_MOUNT],
                        }
                    ],
                    "volumes": [
                        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
                        TEMPORARY_VOLUME,
                    ],
                    "topologySpreadConstraints": [
                        {
                            "maxSkew": 1,
                            "topologyKey": "kubernetes.io/hostname",
                            "whenUnsatisfiable": "ScheduleAnyway",
                            "labelSelector": {
                                "matchLabels": {
                                    "dask.org/cluster-name": "ddp-x-00000000-0",
                                    "dask.org/component": "worker",
                                }
                            },
                        }
                    ],
                },
            },
        },
    }


def test_a_plain_cluster_asks_for_nothing_that_was_not_set() -> None:
    spec = cluster_spec(ClusterConfig(image="image"), "ddp-x-00000000-0")
    assert "ownerReferences" not in spec["metadata"]
    worker = spec["spec"]["worker"]["spec"]
    container = worker["containers"][0]
    assert not {"nodeSelector", "tolerations", "serviceAccountName", "imagePullSecrets"} & worker.keys()
    assert "envFrom" not in container
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "8Gi"}


def test_only_a_runs_own_pods_its_driver_and_the_operator_reach_its_cluster() -> None:
    labels = {"execution-id": "f3a9", "node-id": "n1"}
    driver = Driver("task-pod", "0a1b", "flytesnacks-development", "image", labels)
    policy = network_policy("ddp-x-00000000-0", "2c3d", driver)
    own = {"podSelector": {"matchLabels": {"dask.org/cluster-name": "ddp-x-00000000-0"}}}
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "dask-operator"}}}
    ports = [{"protocol": "TCP", "port": 8786}, {"protocol": "TCP", "port": 8787}]
    assert policy["spec"] == {
        **own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [own]}, {"from": [operator, {"podSelector": {"matchLabels": labels}}], "ports": ports}],
    }
    assert policy["metadata"]["ownerReferences"] == [
        {"apiVersion": "kubernetes.dask.org/v1", "kind": "DaskCluster", "name": "ddp-x-00000000-0", "uid": "2c3d"}
    ]
    unlabelled = network_policy("ddp-x-00000000-0", "2c3d", dataclasses.replace(driver, labels={}))
    assert unlabelled["spec"]["ingress"][1]["from"] == [operator, {"podSelector": {}}]
    assert network_policy("ddp-x-00000000-0", "2c3d")["spec"]["ingress"][1]["from"] == [operator]


def test_users_cannot_take_the_labels_by_which_orphans_are_found() -> None:
    spec = cluster_spec(ClusterConfig(labels={"app.kubernetes.io/managed-by": "me"}), "ddp-x-00000000-0")
    assert spec["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "flyte-ddp"


def test_dask_reads_the_variables_as_what_they_were() -> None:
    config = ClusterConfig(node_timeout=7)
    container = cluster_spec(config, "ddp-x-00000000-0")["spec"]["scheduler"]["spec"]["containers"][0]
    read = dask.config.collect_env({each["name"]: each["value"] for each in container["env"]})
    for key, value in dask_config(config).items():
        assert dask.config.get(key, config=read) == value
    assert "distributed.http.scheduler.api" in dask.config.get("distributed.scheduler.http.routes", config=read)
    assert set(dask.config.get("distributed.scheduler.http.routes")) < set(
        dask.config.get("distributed.scheduler.http.routes", config=read)
    )


def test_a_pod_template_is_merged_by_name() -> None:
    config = ClusterConfig(
        pod_template={
            "topologySpreadConstraints": None,
            "securityContext": {"fsGroup": 1000},
            "containers": [
                {
                    "name": "worker",
                    "env": [{"name": "DASK_DISTRIBUTED__WORKER__DAEMON", "value": "True"}],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                },
                {"name": "sidecar", "image": "sidecar"},
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        }
    )
    pod = cluster_spec(config, "ddp-x-00000000-0")["spec"]["worker"]["spec"]
    worker, sidecar = pod["containers"]
    assert "topologySpreadConstraints" not in pod
    assert pod["securityContext"] == {**POD_SECURITY, "fsGroup": 1000}
    assert [each["value"] for each in worker["env"] if each["name"] == "DASK_DISTRIBUTED__WORKER__DAEMON"] == ["True"]
    assert len(worker["env"]) == len(GANG_SETTINGS)
    assert worker["args"][:2] == ["dask", "worker"]
    assert [mount["mountPath"] for mount in worker["volumeMounts"]] == ["/dev/shm", "/tmp", "/scratch"]
    assert sidecar == {"name": "sidecar", "image": "sidecar"}
    assert [volume["name"] for volume in pod["volumes"]] == ["shared-memory", "temporary", "scratch"]


def test_merging_changes_neither_side() -> None:
    base: dict[str, Any] = {"a": {"b": 1}, "list": [{"name": "x", "v": 1}]}
    override: dict[str, Any] = {"a": {"b": None, "c": 2}, "list": [{"name": "x", "v": 2}], "args": ["new"]}
    assert merge_pod(base, override) == {"a": {"c": 2}, "list": [{"name": "x", "v": 2}], "args": ["new"]}
    assert base == {"a": {"b": 1}, "list": [{"name": "x", "v": 1}]}
    assert override == {"a": {"b": None, "c": 2}, "list": [{"name": "x", "v": 2}], "args": ["new"]}


@pytest.mark.parametrize(
    "execution_id", ["f3a9", "a" * 200, "Ünïcode_and/Slashes!", "-", "", "9starts-with-a-digit", "x" * 39, "x-" * 30]
)
@pytest.mark.parametrize("attempt", [0, 12])
def test_cluster_names_are_labels_that_leave_room_for_the_operator(execution_id: str, attempt: int) -> None:
    name = cluster_name(execution_id, attempt)
    assert DNS_1035.fullmatch(name)
    assert len(name) <= 53
    assert name == cluster_name(execution_id, attempt) == as_cluster_name(name)


def test_cluster_names_differ_where_anything_differs() -> None:
    arguments = [("a" * 80 + "b", 0), ("a" * 80 + "c", 0), ("a", 0), ("A", 0), ("a", 1), ("a/1", 0), ("a-1", 0)]
    assert len({cluster_name(*each) for each in arguments}) == len(arguments)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("kind", "k8s", "one of auto, local, kubernetes, existing"),
        ("num_nodes", 0, "at least 1"),
        ("num_nodes", "2", "a whole number"),
        ("gpus_per_node", -1, "at least 0"),
        ("min_nodes", 3, r"from 0 to num_nodes \(2\)"),
        ("worker_memory", "8 GB", "a Kubernetes quantity such as 8Gi"),
        ("worker_memory", "1Gi", "at most worker_memory"),
        ("shared_memory", "9Gi", r"at most worker_memory \(8Gi\)"),
        ("worker_cpus", 0, "above 0"),
        ("worker_cpus", float("nan"), "above 0"),
        ("start_timeout", float("inf"), "finite"),
        ("idle_timeout", 5, "at least 60"),
        ("image_pull_policy", "Sometimes", "one of IfNotPresent, Always, Never"),
        ("node_selector", ["gpu"], "a mapping from strings"),
        ("env", {"DEBUG": 1}, "a string"),
        ("env_from_secrets", "storage", "a list"),
        ("tolerations", [{"key": True}], "a string"),
        ("pod_template", {1: "x"}, "a mapping from strings"),
        ("autoscaled_nodes", "yes", "true or false"),
    ],
)
def test_what_cannot_be_run_is_named_with_what_is_accepted(field: str, value: object, accepted: str) -> None:
    with pytest.raises(ConfigError, match=accepted) as caught:
        cluster_config({field: value})
    assert re.match(rf"{field}\b|shared_memory", str(caught.value))


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"processes_per_node: 3 .* at most gpus_per_node \(2\)"):
        ClusterConfig(gpus_per_node=2, processes_per_node=3)


def test_an_unknown_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown field 'gpus'; accepted are kind, num_nodes, gpus_per_node"):
        cluster_config({"gpus": 1})


@pytest.mark.parametrize(
    ("values", "ranks"), [({}, 1), ({"gpus_per_node": 4}, 4), ({"gpus_per_node": 4, "processes_per_node": 2}, 2)]
)
def test_ranks_per_node(values: dict[str, int], ranks: int) -> None:
    assert ClusterConfig(**values).ranks_per_node == ranks


def test_a_config_is_a_flyte_input() -> None:
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    config = ClusterConfig(
        kind="kubernetes",
        node_selector={"a": "b"},
        tolerations=[{"key": "k"}],
        env_from_secrets=["s"],
        pod_template={"containers": [{"name": "worker", "stdin": True}], "hostNetwork": None},
    )
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, config, ClusterConfig, TypeEngine.to_literal_type(ClusterConfig))
    assert TypeEngine.to_python_value(context, literal, ClusterConfig) == config


def test_every_field_is_read_by_something() -> None:
    code = "".join(path.read_text() for path in (Path(__file__).parents[1] / "flyte_ddp").rglob("*.py"))
    unread = [
        each.name for each in dataclasses.fields(ClusterConfig) if not re.search(rf"(config|self)\.{each.name}\b", code)
    ]
    assert not {*unread} - {"max_restarts"}  # the gang launcher's


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", "0.5"), ("2", "2"), ("1.5", "1.5"), ("8Gi", str(8 << 30)), ("3k", "3000"), ("1M", "1e6")],
)
def test_quantities(text: str, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "8GB", "-1", "1e3x", "Gi"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no Kubernetes quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("toleration", "expected"),
    [
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "value": "yes", "effect": "NoSchedule"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_tolerations_as_the_scheduler_reads_them(toleration: dict[str, str], expected: bool) -> None:
    assert tolerates(toleration, SimpleNamespace(key="gpu", value="yes", effect="NoSchedule")) is expected


def test_the_requests_of_a_pod_count_its_sidecars() -> None:
    pod = {
        "containers": [
            {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}},
            {"resources": {"requests": {"cpu": "500m"}}},
            {},
        ]
    }
    assert requests_of(pod) == {"cpu": Decimal("1.5"), "memory": Decimal(1 << 30)}


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("90m", 5400), ("1.5h", 5400), ("1d", 86400)])
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


def test_the_rbac_of_deploy_grants_what_is_needed_and_only_reading_besides() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text()))
    (role,) = [document for document in documents if document["kind"] == "Role"]
    granted = {
        (verb, group, *(resource.split("/") if "/" in resource else (resource, "")))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert set(NEEDED_EVERYWHERE) <= granted
    assert {verb for verb, *_ in granted - set(NEEDED_EVERYWHERE)} <= {"get", "list"}


def test_the_operators_image_has_the_version_of_its_pinned_package() -> None:
    requirements = (DEPLOY.parent / "requirements.txt").read_text()
    (pinned,) = re.findall(r"^dask-kubernetes==(\S+)", requirements, re.MULTILINE)
    assert yaml.safe_load((DEPLOY / "operator/values.yaml").read_text())["image"]["tag"] == pinned
