"""Requests to Kubernetes, to the letter, without a cluster. tests/outside/kubernetes has one."""

import dataclasses
import datetime
import http.server
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.config
import distributed  # noqa: F401 - adds its defaults to the configuration
import pytest
import yaml
from kubernetes import client

from flyte_ddp.__main__ import main
from flyte_ddp.cluster.config import ClusterConfig, KubernetesConfig, cluster_config, dask_config
from flyte_ddp.cluster.kubernetes import api, checks, lifecycle
from flyte_ddp.cluster.kubernetes.checks import (
    INSTALLED_VERSION,
    NEEDED_EVERYWHERE,
    NEEDED_FOR_QUEUES,
    tolerates,
)
from flyte_ddp.cluster.kubernetes.manifest import (
    Driver,
    avoid_nodes,
    cluster_name,
    cluster_spec,
    further_workers,
    network_policy,
)
from flyte_ddp.cluster.kubernetes.resources import sum_requests
from flyte_ddp.code import source_code
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import parse_duration
from flyte_ddp.errors import (
    ClusterError,
    ConfigError,
    NodeLost,
    OutOfMemory,
    PreflightError,
)
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask import nodes as nodes_of_dask
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.project.admission import Allowed, check_allowed, with_filler_class
from flyte_ddp.task_run.training import pod_failure

DEPLOY = Path(__file__).parents[2] / "deploy"
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
    {"name": "DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING", "value": "False"},
    {"name": "DASK_DISTRIBUTED__ADMIN__LOW_LEVEL_LOG_LENGTH", "value": "50"},
    {"name": "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL", "value": "20s"},
]
TLS_SETTINGS = [
    {"name": "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION", "value": "True"},
    {"name": "DASK_DISTRIBUTED__COMM__TLS__CA_FILE", "value": "/etc/flyte-ddp-tls/tls.crt"},
    *(
        {
            "name": f"DASK_DISTRIBUTED__COMM__TLS__{role}__{part}",
            "value": f"/etc/flyte-ddp-tls/tls.{suffix}",
        }
        for role in ("SCHEDULER", "WORKER", "CLIENT")
        for part, suffix in (("CERT", "crt"), ("KEY", "key"))
    ),
]
CERTIFICATE_MOUNT = {"name": "certificate", "mountPath": "/etc/flyte-ddp-tls", "readOnly": True}
CERTIFICATE_VOLUME = {"name": "certificate", "secret": {"secretName": "ddp-x-00000000-0"}}
ROUTES = (
    "['distributed.http.scheduler.api', 'distributed.http.scheduler.prometheus', "
    "'distributed.http.scheduler.info', "
    "'distributed.http.scheduler.json', 'distributed.http.health', 'distributed.http.proxy', "
    "'distributed.http.statics']"
)


def kubernetes(**fields: Any) -> ClusterConfig:
    return ClusterConfig(kubernetes=KubernetesConfig(**fields))


def test_workers_prefer_nodes_that_were_not_slow_and_the_users_own_preference_wins():
    config = ClusterConfig(kind="kubernetes", num_nodes=2)
    assert avoid_nodes(config, []) == config
    spec = cluster_spec(avoid_nodes(config, ["node-1", "node-7"]), "ddp-x-00000000")["spec"]
    others = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-1", "node-7"]}
    assert spec["worker"]["spec"]["affinity"] == {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "preference": {"matchExpressions": [others]}}
            ]
        }
    }
    assert "affinity" not in spec["scheduler"]["spec"]
    own = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    given = config.with_pods(pod_template={"affinity": own, "priorityClassName": "high"})
    pod = cluster_spec(avoid_nodes(given, ["node-1"]), "ddp-x-00000000")["spec"]["worker"]["spec"]
    assert pod["affinity"] == own
    assert pod["priorityClassName"] == "high"


def test_the_whole_specification_of_a_gpu_cluster() -> None:
    pods = KubernetesConfig(
        image="registry.example.com/flyte-ddp:1",
        worker_cpus=7.5,
        worker_memory="56Gi",
        shared_memory="16Gi",
        scheduler_cpus=0.25,
        scheduler_memory="512Mi",
        service_account="reader",
        image_pull_policy="Always",
        labels={"team": "vision", "app.kubernetes.io/managed-by": "me"},
        annotations={"cost-center": "7", "karpenter.sh/do-not-disrupt": "false"},
        env={"NCCL_DEBUG": "INFO"},
        env_from_secrets=["storage"],
        pod_template={
            "priorityClassName": "batch",
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"gpu": "a100"},
            "tolerations": [
                {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
            ],
        },
        scheduler_pod_template={
            "tolerations": [{"key": "small", "operator": "Exists", "tolerationSeconds": 60}]
        },
        idle_timeout=120,
    )
    config = ClusterConfig(num_nodes=4, gpus_per_node=2, kubernetes=pods)
    owner = Driver(
        "task-pod", "0a1b", "flytesnacks-development", "registry.example.com/flyte-ddp:1"
    )
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
            "annotations": {
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                "karpenter.sh/do-not-disrupt": "false",
                "cost-center": "7",
            },
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "task-pod", "uid": "0a1b"}
            ],
        },
        "spec": {
            "idleTimeout": 120,
            "scheduler": {
                "spec": {
                    "tolerations": [
                        {"key": "small", "operator": "Exists", "tolerationSeconds": 60}
                    ],
                    "automountServiceAccountToken": False,
                    "securityContext": POD_SECURITY,
                    "serviceAccountName": "reader",
                    "containers": [
                        {
                            "name": "scheduler",
                            "image": "registry.example.com/flyte-ddp:1",
                            "imagePullPolicy": "Always",
                            "args": ["dask", "scheduler", "--host", "0.0.0.0", "--protocol", "tls"],
                            "env": [
                                *GANG_SETTINGS,
                                *TLS_SETTINGS,
                                {"name": "FLYTE_DDP_TERMINATION_GRACE", "value": "60"},
                                {
                                    "name": "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES",
                                    "value": ROUTES,
                                },
                            ],
                            "resources": {
                                "requests": scheduler_resources,
                                "limits": scheduler_resources,
                            },
                            "securityContext": SECURITY,
                            "ports": [
                                {"name": "tcp-comm", "containerPort": 8786, "protocol": "TCP"},
                                {
                                    "name": "http-dashboard",
                                    "containerPort": 8787,
                                    "protocol": "TCP",
                                },
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
                            "volumeMounts": [TEMPORARY_MOUNT, CERTIFICATE_MOUNT],
                        }
                    ],
                    "volumes": [TEMPORARY_VOLUME, CERTIFICATE_VOLUME],
                    "terminationGracePeriodSeconds": 60,
                },
                "service": {
                    "type": "ClusterIP",
                    "selector": {
                        "dask.org/cluster-name": "ddp-x-00000000-0",
                        "dask.org/component": "scheduler",
                    },
                    "ports": [
                        {
                            "name": "tcp-comm",
                            "protocol": "TCP",
                            "port": 8786,
                            "targetPort": "tcp-comm",
                        },
                        {
                            "name": "http-dashboard",
                            "protocol": "TCP",
                            "port": 8787,
                            "targetPort": "http-dashboard",
                        },
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
                    "tolerations": [
                        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
                    ],
                    "containers": [
                        {
                            "name": "worker",
                            "image": "registry.example.com/flyte-ddp:1",
                            "imagePullPolicy": "Always",
                            "args": [
                                *("dask", "worker", "--name", "$(DASK_WORKER_NAME)"),
                                *("--nthreads", "1", "--memory-limit", "0"),
                            ],
                            "env": [
                                *GANG_SETTINGS,
                                *TLS_SETTINGS,
                                {"name": "FLYTE_DDP_TERMINATION_GRACE", "value": "60"},
                                {
                                    "name": "DASK_SCHEDULER_ADDRESS",
                                    "value": "tls://ddp-x-00000000-0-scheduler:8786",
                                },
                                {"name": "NCCL_DEBUG", "value": "INFO"},
                                {
                                    "name": "DASK_WORKER_NAME",
                                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                                },
                                {
                                    "name": "FLYTE_DDP_NODE",
                                    "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
                                },
                            ],
                            "envFrom": [{"secretRef": {"name": "storage"}}],
                            "resources": {"requests": worker_resources, "limits": worker_resources},
                            "securityContext": SECURITY,
                            "volumeMounts": [
                                TEMPORARY_MOUNT,
                                CERTIFICATE_MOUNT,
                                {"name": "shared-memory", "mountPath": "/dev/shm"},
                            ],
                        }
                    ],
                    "volumes": [
                        TEMPORARY_VOLUME,
                        CERTIFICATE_VOLUME,
                        {
                            "name": "shared-memory",
                            "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"},
                        },
                    ],
                    "terminationGracePeriodSeconds": 60,
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


def test_without_tls_nothing_of_it_is_asked_for() -> None:
    spec = cluster_spec(kubernetes(image="image", tls=False), "ddp-x-00000000-0")["spec"]
    assert not re.search("tls|certificate|DASK_SCHEDULER_ADDRESS", json.dumps(spec), re.IGNORECASE)


def test_only_a_runs_own_pods_its_driver_and_the_operator_reach_its_cluster() -> None:
    driver = Driver("task-pod", "0a1b", "flytesnacks-development", "image", {"node-id": "n1"})
    place = ("ddp-x-00000000-0", "2c3d", "platform")
    policy = network_policy(*place, driver)
    own = {"podSelector": {"matchLabels": {"dask.org/cluster-name": "ddp-x-00000000-0"}}}
    operator, home = (
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        for name in ("platform", "flytesnacks-development")
    )
    task = {"podSelector": {"matchLabels": {"node-id": "n1"}}, **home}
    ports = [{"protocol": "TCP", "port": 8786}, {"protocol": "TCP", "port": 8787}]
    assert policy["spec"] == {
        **own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [own]}, {"from": [operator, task], "ports": ports}],
    }
    assert policy["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "kubernetes.dask.org/v1",
            "kind": "DaskCluster",
            "name": "ddp-x-00000000-0",
            "uid": "2c3d",
        }
    ]
    unlabelled = network_policy(*place, dataclasses.replace(driver, labels={}))
    assert unlabelled["spec"]["ingress"][1]["from"] == [operator, {"podSelector": {}, **home}]
    assert network_policy(*place)["spec"]["ingress"][1]["from"] == [operator]


def test_a_policy_that_is_not_enforced_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed_port = probe.getsockname()[1]
    lifecycle.warn_if_unenforced("127.0.0.1", closed_port)
    assert "seems not to enforce NetworkPolicies" in caplog.text


def test_a_queue_admits_the_smallest_gang_as_a_whole_and_further_workers_one_by_one() -> None:
    pods = KubernetesConfig(image="image", queue="team", labels={"team": "red"})
    config = ClusterConfig(num_nodes=4, min_nodes=2, kubernetes=pods)
    cluster = cluster_spec(config, "ddp-x")
    # The operator copies the cluster's metadata to all pods.
    assert "kueue" not in json.dumps(cluster["metadata"])
    worker = cluster["spec"]["worker"]
    assert worker["replicas"] == 2
    assert worker["metadata"] == cluster["spec"]["scheduler"]["metadata"]
    assert worker["metadata"] == {
        "labels": {
            "kueue.x-k8s.io/queue-name": "team",
            "kueue.x-k8s.io/pod-group-name": "ddp-x",
        },
        "annotations": {
            "kueue.x-k8s.io/pod-group-total-count": "3",  # two workers and the scheduler
            "kueue.x-k8s.io/pod-group-serving": "true",
        },
    }
    cluster["metadata"]["uid"] = "0a1b"
    group = further_workers(config, cluster)
    assert group is not None
    assert group["kind"] == "DaskWorkerGroup"
    assert group["metadata"]["labels"]["team"] == "red"
    assert group["metadata"]["ownerReferences"][0]["uid"] == "0a1b"
    further = {"labels": {"kueue.x-k8s.io/queue-name": "team"}}
    expected = {"replicas": 2, "metadata": further, "spec": worker["spec"]}
    assert group["spec"] == {"cluster": "ddp-x", "worker": expected}


@pytest.mark.parametrize(("queue", "min_nodes"), [("", 2), ("team", 0), ("team", 4)])
def test_no_workers_follow_a_cluster_that_has_all_of_them(queue: str, min_nodes: int) -> None:
    pods = KubernetesConfig(image="image", queue=queue)
    config = ClusterConfig(num_nodes=4, min_nodes=min_nodes, kubernetes=pods)
    cluster = cluster_spec(config, "ddp-x")
    assert cluster["spec"]["worker"]["replicas"] == 4
    assert further_workers(config, cluster) is None


FILLER = {"kind": "kubernetes", "preset": "filler", "num_nodes": 4}


def test_a_filler_runs_on_any_number_of_nodes_with_the_priority_that_settings_toml_names(
    settings: Callable[[str], None],
) -> None:
    settings('filler_priority_class = "low"')
    given = cluster_config({**FILLER, "grow_delay": 60, "kubernetes": {"image": "image"}})
    assert (given.min_nodes, given.grow_delay, given.grow_interval) == (1, 60, 60)
    assert dataclasses.replace(given, min_nodes=2).min_nodes == 2
    cluster = cluster_spec(with_filler_class(given), "ddp-x")
    for role in ("scheduler", "worker"):
        assert cluster["spec"][role]["spec"]["priorityClassName"] == "low"
    annotations = cluster["metadata"]["annotations"]
    assert annotations == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
    other = dataclasses.replace(given, preset="")
    assert with_filler_class(other) == other


@pytest.mark.parametrize(
    ("text", "pods", "expected"),
    [
        ("", {}, "cluster.preset: expected '' while settings.toml names no filler_priority_class"),
        (
            'filler_priority_class = "low"',
            {"labels": {"kueue.x-k8s.io/priority-class": "high"}},
            "cluster.kubernetes.labels: expected none called kueue.x-k8s.io/priority-class",
        ),
        (
            'filler_priority_class = "low"',
            {"pod_template": {"priorityClassName": "high"}},
            "cluster.kubernetes.pod_template: expected one of allowed.pod_template",
        ),
    ],
)
def test_no_launch_chooses_the_priority_of_a_filler(
    text: str, pods: dict[str, Any], expected: str, settings: Callable[[str], None]
) -> None:
    settings(text)
    config = cluster_config({**FILLER, "kubernetes": pods})
    labels = ("kueue.x-k8s.io/*",)
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        check_allowed(config, Allowed(labels=labels), "team")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """settings(text): a project whose settings.toml has this text."""

    def write(text: str) -> None:
        (tmp_path / "settings.toml").write_text(f"recipes = []\n{text}\n")
        monkeypatch.setattr(source_code, "_project", tmp_path)

    return write


@pytest.mark.parametrize(
    ("preset", "num_waiting"),
    [("", 1), ("filler", 2)],  # other runs need a pod that fits nowhere now
)
def test_pods_without_room_are_not_waited_for_if_a_queue_or_a_filler_can_do_without_them(
    preset: str, num_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pod(gates: bool, reason: str, deletion_timestamp: str | None = None) -> SimpleNamespace:
        scheduled = SimpleNamespace(type="PodScheduled", status="False", reason=reason)
        return SimpleNamespace(
            metadata=SimpleNamespace(deletion_timestamp=deletion_timestamp),
            spec=SimpleNamespace(scheduling_gates=["kueue"] if gates else None),
            status=SimpleNamespace(conditions=[scheduled]),
        )

    running = pod(False, "")
    running.status.conditions[0].status = "True"
    gated = pod(True, "SchedulingGated")
    deleted = pod(True, "SchedulingGated", "2026-01-01T00:00:00Z")
    pods = [running, gated, deleted, pod(False, "Unschedulable")]
    monkeypatch.setattr(api, "pods_of", lambda name, namespace: pods)
    named = KubernetesConfig(namespace="team", queue="red")
    config = ClusterConfig(kind="kubernetes", preset=preset, kubernetes=named)
    assert api.count_waiting(config, "run") == num_waiting
    alone = dataclasses.replace(config, kind="auto")
    assert api.count_waiting(alone, "run") == 0


@pytest.mark.parametrize(
    ("registered", "annotations", "image"),
    [
        ("task:1", {}, "task:1"),
        ("unknown:1", {"primary_container_name": "main"}, "other:1"),
        ("", {}, "task:1"),  # Flyte names the container after the pod
    ],
)
def test_the_image_is_that_of_the_tasks_container_where_a_sidecar_is_first(
    registered: str, annotations: dict[str, str], image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_IMAGE", registered)
    names = {"istio-proxy": "proxy:1", "f1-n0-0": "task:1", "main": "other:1"}
    containers = [SimpleNamespace(name=name, image=image) for name, image in names.items()]
    metadata = SimpleNamespace(name="f1-n0-0", annotations=annotations)
    pod = SimpleNamespace(metadata=metadata, spec=SimpleNamespace(containers=containers))
    assert api.own_image(pod) == image


def test_dask_parses_its_variables_back_to_their_types() -> None:
    config = ClusterConfig(node_timeout=7)
    container = cluster_spec(config, "ddp-x-00000000-0")["spec"]["scheduler"]["spec"]["containers"][
        0
    ]
    read = dask.config.collect_env({each["name"]: each["value"] for each in container["env"]})
    for key, value in dask_config(config).items():
        assert dask.config.get(key, config=read) == value
    assert "distributed.http.scheduler.api" in dask.config.get(
        "distributed.scheduler.http.routes", config=read
    )


def test_a_pod_template_is_merged_by_name() -> None:
    config = kubernetes(
        tls=False,
        pod_template={
            "topologySpreadConstraints": None,
            "terminationGracePeriodSeconds": 45,
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
        },
    )
    pod = cluster_spec(config, "ddp-x-00000000-0")["spec"]["worker"]["spec"]
    worker, sidecar = pod["containers"]
    assert "topologySpreadConstraints" not in pod
    assert pod["securityContext"] == {**POD_SECURITY, "fsGroup": 1000}
    assert {"name": "DASK_DISTRIBUTED__WORKER__DAEMON", "value": "True"} in worker["env"]
    assert pod["terminationGracePeriodSeconds"] == 45
    assert {"name": "FLYTE_DDP_TERMINATION_GRACE", "value": "45"} in worker["env"]
    assert [mount["mountPath"] for mount in worker["volumeMounts"]] == [
        "/tmp",
        "/dev/shm",
        "/scratch",
    ]
    assert sidecar == {"name": "sidecar", "image": "sidecar"}
    assert [volume["name"] for volume in pod["volumes"]] == [
        "temporary",
        "shared-memory",
        "scratch",
    ]


@pytest.mark.parametrize(
    "execution_id",
    [
        "f3a9",
        "a" * 200,
        "Ünïcode_and/Slashes!",
        "-",
        "",
        "9starts-with-a-digit",
        "x" * 39,
        "x-" * 30,
    ],
)
def test_cluster_names_are_labels_that_leave_room_for_the_operator(execution_id: str) -> None:
    name = cluster_name(execution_id)
    assert name not in (cluster_name(f"{execution_id}-0"), cluster_name(f"{execution_id}X"))
    assert DNS_1035.fullmatch(name)
    assert len(name) <= 53
    assert name == cluster_name(execution_id) == cluster_name(name)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"min_nodes": 3}, "min_nodes: expected at most num_nodes (2), got 3"),
        (
            {"gpus_per_node": 2, "processes_per_node": 3},
            "processes_per_node: expected at most gpus_per_node (2), got 3",
        ),
        (
            {"kubernetes": {"worker_memory": "8 GB"}},
            "kubernetes.worker_memory: expected a Kubernetes quantity such as 8Gi or 500M, got "
            "'8 GB'",
        ),
        (
            {"kubernetes": {"queue": "Team A"}},
            "kubernetes.queue: expected the name of a LocalQueue, got 'Team A'",
        ),
        ({"preset": "fast"}, "preset: expected filler or '', got 'fast'"),
        (
            {"preset": "filler", "kind": "existing"},
            "preset: expected '' with kind existing, whose nodes no run can return, got 'filler'",
        ),
        (
            {"kubernetes": {"env": {"DEBUG": 1}}},
            "kubernetes.env['DEBUG']: expected a string, got 1",
        ),
    ],
)
def test_an_invalid_cluster_is_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        cluster_config(values)


def from_console(values: dict[str, Any]) -> ClusterConfig:
    """The task's input, as Flyte's console gives it: a protobuf Struct. All of its numbers are
    floats.
    """
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine
    from flytekit.models.literals import Literal, Scalar
    from google.protobuf.json_format import ParseDict
    from google.protobuf.struct_pb2 import Struct

    from flyte_ddp.flyte.inputs import ClusterInput

    literal = Literal(scalar=Scalar(generic=ParseDict(values, Struct())))
    config = TypeEngine.to_python_value(
        FlyteContextManager.current_context(), literal, ClusterInput
    )
    assert isinstance(config, ClusterInput)
    return config


def test_whole_numbers_from_flytes_console_stay_whole_everywhere() -> None:
    template = {
        "terminationGracePeriodSeconds": 60,
        "tolerations": [{"key": "k", "operator": "Exists", "tolerationSeconds": 30}],
        "containers": [
            {
                "name": "worker",
                "ports": [{"containerPort": 9000}],
                "resources": {"limits": {"x/y": 1}},
            }
        ],
    }
    config = from_console(
        {"num_nodes": 3, "kubernetes": {"worker_cpus": 1.5, "pod_template": template}}
    )
    assert json.dumps(config.kubernetes.pod_template, sort_keys=True) == json.dumps(
        template, sort_keys=True
    )
    assert repr((config.num_nodes, config.kubernetes.worker_cpus)) == "(3, 1.5)"


@pytest.mark.parametrize("values", [{"gpus": 1}, {"kubernetes": {"gpus": 1}}])
def test_an_unknown_field_from_flytes_console_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected one of the fields .*, got 'gpus'"):
        from_console(values)


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
def test_tolerations_as_the_scheduler_reads_them(
    toleration: dict[str, str], expected: bool
) -> None:
    assert (
        tolerates(toleration, SimpleNamespace(key="gpu", value="yes", effect="NoSchedule"))
        is expected
    )


def test_the_requests_of_a_pod_count_its_sidecars() -> None:
    pod = {
        "containers": [
            {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}},
            {"resources": {"requests": {"cpu": "500m"}}},
            {},
        ]
    }
    assert sum_requests(pod) == {"pods": 1, "cpu": Decimal("1.5"), "memory": Decimal(1 << 30)}


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("90m", 5400), ("1.5h", 5400), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("--max-age", text) == seconds


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
    needed = {*NEEDED_EVERYWHERE, *NEEDED_FOR_QUEUES}
    assert needed <= granted
    assert {verb for verb, *_ in granted - needed} <= {"get", "list"}


def test_the_operators_image_has_the_version_of_its_pinned_package() -> None:
    values = yaml.safe_load((DEPLOY / "operator/values.yaml").read_text())
    assert values["image"]["tag"] == version("dask-kubernetes")
    label = f'{INSTALLED_VERSION}: "{version("dask-kubernetes")}"'
    assert label in (DEPLOY / "operator/operator.yaml").read_text()


def operator(
    image: str = "registry.example.com/operator:7",
    replicas: int = 1,
    available: int = 1,
    **labels: str,
) -> dict[str, Any]:
    """Deployments, including one that runs the operator under a user's own labels."""
    container = {
        "name": "operator",
        "image": image,
        "args": ["kopf", "run", "-m", "dask_kubernetes.operator.controller"],
    }
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": replicas, "selector": {}, "template": template}
    metadata = {"name": "dask-operator", "namespace": "dask-operator"}
    return {
        "items": [{"metadata": metadata, "spec": spec, "status": {"availableReplicas": available}}]
    }


def quota(**hard: str) -> dict[str, Any]:
    return {"items": [{"metadata": {"name": "small"}, "spec": {"hard": hard}}]}


AUTOSCALED = '{"num_nodes": 1, "kubernetes": {"autoscaled_nodes": true, "worker_memory": "4Gi"}}'
UPSTREAM = "ghcr.io/dask/dask-kubernetes-operator"
VERSION = dict.fromkeys(
    [
        *("buildDate", "compiler", "gitCommit", "gitTreeState", "gitVersion", "goVersion"),
        *("major", "minor", "platform"),
    ],
    "1",
)
KINDS: dict[str, Any] = {
    "groupVersion": "kubernetes.dask.org/v1",
    "resources": [
        {"name": name, "kind": name, "namespaced": True, "singularName": "", "verbs": []}
        for name in ("daskclusters", "daskworkergroups")
    ],
}
NO_KIND: dict[str, Any] = {"groupVersion": "kubernetes.dask.org/v1", "resources": []}


class ApiServer:
    """An API server that answers preflight and creation, with faults to switch on."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        # results of the next requests: an HTTP status, or 0 for a cut connection
        self.faults: list[int] = []
        self.cluster: dict[str, Any] | None = None
        # Answers by the end of the path: an object, or a status with an object.
        self.answers: dict[str, Any] = {
            "/deployments": operator(),
            "/daskclusters": {"items": []},
            "/version/": VERSION,
            "/apis/kubernetes.dask.org/v1": KINDS,
        }
        self.posts: dict[str, tuple[int, Any]] = {
            "subjectaccessreviews": (201, {"spec": {}, "status": {"allowed": True}})
        }
        self.forbidden: str | tuple[str, ...] = "/nothing"  # the end of a path
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null"
                )
                server.requests.append((self.command, self.path.partition("?")[0]))
                status, reply = server.reply(self.command, self.path, body)
                fault = server.faults.pop(0) if server.faults else None
                if fault == 0:
                    self.connection.close()
                    return
                status, reply = (fault, {"message": "not now"}) if fault else (status, reply)
                text = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def reply(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        place = path.partition("?")[0]
        if place.endswith(self.forbidden):
            return 403, {"message": 'pods is forbidden: User "u" cannot list resource'}
        for end, answer in (self.posts if method == "POST" else self.answers).items():
            if place.endswith(end) and method != "DELETE":
                return answer if isinstance(answer, tuple) else (200, answer)
        if "dryRun=All" in path:
            return 201, body
        if method == "POST" and "daskclusters" in path:
            if self.cluster is not None:
                return 409, {"message": "already exists"}
            self.cluster = {**body, "metadata": {**body["metadata"], "uid": "0a1b"}}
            return 201, self.cluster
        if "daskclusters/" in path:
            return (200, self.cluster) if self.cluster else (404, {"message": "not found"})
        if method == "POST":
            return 201, body
        return 200, {"items": [], "metadata": {"name": "team"}}


@pytest.fixture
def api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    kubeconfig = {
        "current-context": "test",
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "team"}}
        ],
        "clusters": [
            {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.http.server_port}"}}
        ],
        "users": [{"name": "test", "user": {"token": "test"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig")
    )
    monkeypatch.setattr(api, "BEAT_INTERVAL", 0.1)
    monkeypatch.setattr(lifecycle, "API_PATIENCE", 0.5)
    monkeypatch.setattr(lifecycle, "LINE_INTERVAL", 0.1)
    api._api.cache_clear()
    yield server
    api._api.cache_clear()
    server.http.shutdown()
    server.http.server_close()


PODS = KubernetesConfig(image="image", autoscaled_nodes=True)
CLUSTER = ClusterConfig(kind="kubernetes", kubernetes=PODS)


CREATION = ("POST", "/apis/kubernetes.dask.org/v1/namespaces/team/daskclusters")


def start(config: ClusterConfig = CLUSTER) -> None:
    with lifecycle.kube_cluster(config, "run", time.monotonic() + config.start_timeout):
        raise AssertionError("started")


@pytest.mark.parametrize("fault", [0, 429, 500, 503])
def test_requests_are_repeated_while_the_api_server_is_away(
    api_server: ApiServer, fault: int
) -> None:
    api_server.faults = [fault, fault]
    # This error shows that preflight and creation succeeded.
    with pytest.raises(ClusterError, match="the Dask operator did not react"):
        start()
    assert CREATION in api_server.requests
    assert api_server.requests[-1][0] == "DELETE"


def test_a_creation_with_a_lost_answer_is_recognized(api_server: ApiServer) -> None:
    reply = api_server.reply

    def lose_the_first(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "POST" and "daskclusters" in path and api_server.cluster is None:
            api_server.faults.append(0)
        return reply(method, path, body)

    api_server.reply = lose_the_first  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match="the Dask operator did not react"):
        start()
    assert api_server.requests.count(CREATION) == 2
    assert api_server.requests[-1][0] == "DELETE"


def test_an_api_server_that_stays_away_is_recoverable(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "API_PATIENCE", 1.0)
    monkeypatch.setitem(api.call.__kwdefaults__, "patience", 1.0)
    api_server.faults = [503] * 100
    with pytest.raises(ClusterError, match="API server does not answer: not now") as caught:
        start()
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("status", [400, 422])
def test_refused_pods_are_a_user_error(api_server: ApiServer, status: int) -> None:
    message = "spec.worker.spec.containers[0].ports: Invalid value"
    api_server.posts["/daskclusters"] = (status, {"message": message})
    with pytest.raises(PreflightError, match="ports: Invalid value; correct it in `cluster"):
        start()


def test_a_refused_token_is_a_user_error(api_server: ApiServer) -> None:
    api_server.faults = [401]
    with pytest.raises(
        PreflightError, match="this process has no access to a Kubernetes API server"
    ):
        start()


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"image": ""}, "no image is set, and this process runs in no pod"),
        (
            {
                "pod_template": {
                    "containers": [{"name": "worker", "resources": {"limits": {"x/y": "much"}}}]
                },
                "autoscaled_nodes": False,
            },
            "much; correct the resources in `pod_template`",
        ),
    ],
)
def test_mistakes_in_the_pods_are_preflight_findings(
    api_server: ApiServer, changes: dict[str, Any], finding: str
) -> None:
    with pytest.raises(PreflightError, match=finding):
        start(dataclasses.replace(CLUSTER, kubernetes=dataclasses.replace(PODS, **changes)))


WORKER = "ddp-x-00000000-0-default-worker-3f2a-6b7c"


def worker_pod(last_end: dict[str, Any] | None, **metadata: Any) -> dict[str, Any]:
    status = {
        "name": "worker",
        "ready": True,
        "restartCount": 1,
        "image": "",
        "imageID": "",
        "state": {"running": {}},
    }
    status["lastState"] = {} if last_end is None else {"terminated": {"exitCode": 137, **last_end}}
    return {
        "metadata": {"name": WORKER, **metadata},
        "spec": {"containers": [{"name": "worker"}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (worker_pod({"reason": "OOMKilled", "finishedAt": "now"}), "OOMKilled"),
        (worker_pod({"reason": "Error", "finishedAt": "now"}), "Error"),
        # An earlier container ended in this way, for example because it found no scheduler yet.
        (worker_pod({"reason": "Error", "finishedAt": "earlier"}), ""),
        (worker_pod(None), ""),
        (worker_pod(None, deletionTimestamp="2026-01-01T00:00:00Z"), ""),  # evicted
        (None, ""),
    ],
)
def test_a_lost_workers_end_is_read_from_its_pods_status(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch, pod: dict[str, Any] | None, reason: str
) -> None:
    monkeypatch.setattr(api, "ANSWER_TIMEOUT", 0.5)
    began_at = datetime.datetime.now(datetime.timezone.utc)
    earlier = began_at - datetime.timedelta(seconds=3)
    text = json.dumps(pod).replace('"now"', began_at.strftime('"%Y-%m-%dT%H:%M:%SZ"'))
    read = json.loads(text.replace('"earlier"', earlier.strftime('"%Y-%m-%dT%H:%M:%SZ"')))
    api_server.answers |= {
        "/log": (200, None),
        f"/{WORKER}": read if pod else (404, {"message": "not found"}),
    }
    end = api.pod_end(CLUSTER, WORKER, began_at=began_at.timestamp())
    assert (end.reason, end.is_out_of_memory) == (reason, reason == "OOMKilled")
    assert str(end).endswith("raise kubernetes.worker_memory") is end.is_out_of_memory


def test_the_end_of_a_lost_worker_is_looked_for_from_its_attempts_beginning_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempt = object.__new__(nodes_of_dask.DaskNodes)
    vars(attempt).update(client=None, scheduler_id="one", config=CLUSTER, _began_at=7.0)
    monkeypatch.setattr(nodes_of_dask, "scheduler_id", lambda client: "one")
    monkeypatch.setattr(
        nodes_of_dask, "pod_end", lambda config, name, began_at, lines: api.PodEnd(f"{began_at:g}")
    )
    assert "its container ended (7)" in str(attempt.explain(NodeLost("it was lost", WORKER)))


def test_a_task_whose_pod_was_killed_for_its_memory_twice_at_the_same_step_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kubernetes kills the whole container, so the attempt after it has to look at the pod of the
    one before.
    """
    ended: dict[str, str] = {}
    monkeypatch.setattr(
        api, "pod_end", lambda config, pod, began_at: api.PodEnd(ended.get(pod, "Error"))
    )
    job = Job(recipe_program("digits", TrainingConfig()), str(tmp_path), 0.0)

    def look_back(run: driver.Run) -> None:
        if run.job.earlier_failure:
            run.restarts.look_back(run.job.earlier_failure)

    monkeypatch.setattr(driver.Run, "drive", look_back)

    def begin(pod: str) -> None:
        driver.run(dataclasses.replace(job, earlier_failure=pod_failure(pod)), LocalPlace(1))

    begin("")  # the first attempt
    ended |= {"e-n1-0": "OOMKilled", "e-n1-2": "OOMKilled", "e-n1-3": "OOMKilled"}
    begin("e-n1-0")
    (tmp_path / "step-0000000020.json").touch()
    begin("e-n1-1")  # ended otherwise
    begin("e-n1-2")  # This attempt made more progress than the first one.
    with pytest.raises(
        OutOfMemory,
        match=(
            r"memory: expected a larger limit .* The pod of the "
            r"attempt before, e-n1-3"
        ),
    ):
        begin("e-n1-3")


def node(name: str = "node-0", cpu: str = "2", taint: str = "") -> dict[str, Any]:
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    return {
        "metadata": {"name": name},
        "spec": {"taints": taints},
        "status": {"allocatable": {"cpu": cpu, "memory": "64Gi", "pods": "110"}},
    }


def nodes(*found: dict[str, Any]) -> dict[str, Any]:
    return {"/nodes": {"items": list(found)}}


FIXED = {
    "num_nodes": 2,
    "kubernetes": {"image": "train:1", "worker_cpus": 1.5, "worker_memory": "4Gi"},
}


@pytest.mark.parametrize(
    ("answers", "level", "expected"),
    [
        (
            {"/deployments": operator(f"{UPSTREAM}:2024.1.0")},
            "warning",
            "has version 2024.1.0, and this package pins",
        ),
        (
            {"/deployments": operator(**{INSTALLED_VERSION: "2024.1.0"})},
            "warning",
            "has version 2024.1.0, and this package pins",
        ),
        (
            {"/deployments": operator(replicas=0, available=0)},
            "FAILED",
            "kubectl --namespace dask-operator scale deployment dask-operator --replicas=1",
        ),
        (
            {"/deployments": operator(available=0)},
            "FAILED",
            "kubectl --namespace dask-operator describe deployment dask-operator",
        ),
        (
            {"/deployments": {"items": []}},
            "FAILED",
            "the Dask operator does not run: no Deployment",
        ),
        (
            {"/apis/kubernetes.dask.org/v1": NO_KIND},
            "FAILED",
            "the Dask operator is not installed, or too old: this Kubernetes cluster does not know "
            "daskclusters, daskworkergroups",
        ),
        # a worker with 4Gi, and a scheduler with 1Gi
        (
            {"/resourcequotas": quota(**{"limits.memory": "4Gi"})},
            "FAILED",
            "allows limits.memory up to 4Gi, and this run with its driver needs 5Gi",
        ),
        (
            {"/resourcequotas": quota(pods="2")},
            "FAILED",
            "allows pods up to 2, and this run with its driver needs 3",
        ),
    ],
)
def test_the_doctor_names_what_keeps_a_run_from_starting(
    answers: dict[str, Any],
    level: str,
    expected: str,
    api_server: ApiServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api_server.answers |= answers
    assert main(["doctor", "--cluster", AUTOSCALED]) == (level == "FAILED")
    told = capsys.readouterr().out
    assert any(expected in line for line in told.splitlines() if line.startswith(level)), told
    assert ("could start" in told) is (level != "FAILED")


def local_queue(active: bool = True) -> dict[str, Any]:
    status = {"type": "Active", "status": str(active), "message": "clusterQueue is stopped"}
    return {
        "metadata": {"name": "red"},
        "spec": {"clusterQueue": "all"},
        "status": {"conditions": [status]},
    }


def cluster_queue(memory: str, **spec: Any) -> dict[str, Any]:
    """A ClusterQueue of two flavors, each with this quota of memory."""
    quotas = [{"name": "cpu", "nominalQuota": "8"}, {"name": "memory", "nominalQuota": memory}]
    flavors = [{"name": name, "resources": quotas} for name in ("old", "new")]
    group = {"coveredResources": ["cpu", "memory"], "flavors": flavors}
    return {"metadata": {"name": "all"}, "spec": {"resourceGroups": [group], **spec}}


@pytest.mark.parametrize(
    ("queues", "found", "expected"),
    [
        ((404, {"message": "not found"}), {}, "cluster without Kueue, got 'red'"),
        ({"items": []}, {}, "a LocalQueue of namespace team (it has none), got 'red'"),
        ({"items": [local_queue(False)]}, {}, "admits nothing: clusterQueue is stopped"),
        # a worker with 4Gi, and a scheduler with 1Gi
        (
            {"items": [local_queue()]},
            cluster_queue("2Gi"),
            "ClusterQueue all allows memory up to 4Gi, and a scheduler with 1 workers (min_nodes) "
            "needs 5Gi",
        ),
        ({"items": [local_queue()]}, cluster_queue("4Gi"), ""),
        ({"items": [local_queue()]}, cluster_queue("2Gi", cohortName="lab"), ""),  # borrows
    ],
)
def test_a_queue_that_never_admits_the_gang_is_a_finding_before_anything_waits(
    queues: Any,
    found: dict[str, Any],
    expected: str,
    api_server: ApiServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api_server.answers |= {"/localqueues": queues, "/clusterqueues/all": found or (404, {})}
    config = cluster_config({**json.loads(AUTOSCALED), "kind": "kubernetes"})
    config = config.with_pods(queue="red", image="image")
    cluster = json.dumps({"kubernetes": {"queue": "red", "worker_memory": "4Gi"}, "num_nodes": 1})
    main(["doctor", "--cluster", cluster])
    told = capsys.readouterr().out
    if expected:
        assert expected in told
        with pytest.raises(PreflightError, match=re.escape(expected)):
            start(config)
        assert CREATION not in api_server.requests
    else:
        assert "ok       the queue\n" in told
        with pytest.raises(ClusterError, match="the Dask operator did not react"):
            start(config)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((404, {"message": "not found"}), "expected a PriorityClass of this cluster, got 'low'"),
        ({"metadata": {"name": "low"}, "value": 0}, "PriorityClass low: expected a value below 0"),
        ({"metadata": {"name": "low"}, "value": -1}, ""),
    ],
)
def test_a_priority_that_cannot_be_a_fillers_is_a_finding_before_anything_waits(
    answer: Any,
    expected: str,
    api_server: ApiServer,
    settings: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings('filler_priority_class = "low"')
    api_server.answers["/priorityclasses/low"] = answer
    pods = {"autoscaled_nodes": True, "image": "image"}
    if expected:
        with pytest.raises(PreflightError, match=re.escape(expected)):
            start(cluster_config({**FILLER, "kubernetes": pods}))
        assert CREATION not in api_server.requests
    main(["doctor", "--cluster", json.dumps({**FILLER, "kubernetes": pods})])
    assert (expected or "ok       priorities\n") in capsys.readouterr().out


def test_a_priority_in_the_queue_that_does_not_exist_is_a_finding(api_server: ApiServer) -> None:
    api_server.answers |= {
        "/localqueues": {"items": [local_queue()]},
        "/clusterqueues/all": cluster_queue("64Gi"),
        "/workloadpriorityclasses/high": (404, {"message": "not found"}),
    }
    labels = {"kueue.x-k8s.io/priority-class": "high"}
    with pytest.raises(PreflightError, match="a WorkloadPriorityClass of this cluster, got 'high'"):
        start(CLUSTER.with_pods(queue="red", labels=labels))


def test_a_pod_in_a_queue_waits_for_what_kueue_says_of_its_quota(api_server: ApiServer) -> None:
    quota = {"type": "QuotaReserved", "status": "False", "message": "2 more needed"}
    # Kueue sets this one after an eviction.
    admitted = {"type": "Admitted", "status": "False", "message": "The workload has no reservation"}
    runs = {"type": "QuotaReserved", "status": "True", "message": "Quota reserved"}
    api_server.answers["/workloads"] = {
        "items": [
            {"metadata": {"ownerReferences": [{"name": owner}]}, "status": {"conditions": found}}
            for owner, found in (("waits", [quota, admitted]), ("runs", [runs]))
        ]
    }
    assert api.queue_verdicts("team") == {"waits": "waits in Kueue's queue: 2 more needed"}
    api_server.answers["/workloads"] = (404, {"message": "not found"})
    assert api.queue_verdicts("team") == {}


@pytest.mark.parametrize(
    ("found", "level", "expected"),
    [
        (
            (node(cpu="8", taint="new"), node("node-1")),
            "FAILED",
            "have room for 1 of 2 workers of 1.5 cpu, 4Gi memory",
        ),
        ((node(cpu="8"),), "ok", "could start in namespace team if its image"),
    ],
)
def test_the_doctor_looks_for_room_on_the_nodes(
    found: tuple[Any, ...],
    level: str,
    expected: str,
    api_server: ApiServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api_server.answers |= nodes(*found)
    assert main(["doctor", "--cluster", json.dumps(FIXED)]) == (level == "FAILED")
    told = capsys.readouterr().out
    assert any(expected in line for line in told.splitlines() if line.startswith(level)), told


def test_nodes_that_fit_no_pod_end_a_first_attempt_for_good_and_a_retry_recoverably(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an attempt ran before, the configuration fits: the taints are somebody's
    maintenance.
    """
    api_server.answers |= nodes(node(cpu="8", taint="maintenance"))
    pods = dataclasses.replace(PODS, autoscaled_nodes=False)
    config = dataclasses.replace(CLUSTER, kubernetes=pods)
    with pytest.raises(PreflightError, match="with the taint maintenance=:NoSchedule"):
        start(config)
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
    with pytest.raises(ClusterError, match="with the taint maintenance=:NoSchedule") as caught:
        start(config)
    assert not isinstance(caught.value, ConfigError)
    # A pod that the quota rejects ends the attempt.
    api_server.answers["/resourcequotas"] = quota(pods="1")
    with pytest.raises(PreflightError, match="quota small"):
        start(config)


def test_the_remedy_for_another_service_account_names_that(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = {"spec": {}, "status": {"allowed": False}}
    api_server.posts["subjectaccessreviews"] = (201, refusal)
    assert main(["doctor", "--cluster", AUTOSCALED, "--service-account", "trainer"]) == 1
    remedy = "apply it: sed 's/NAMESPACE/team/g; s/flyte-ddp/trainer/g' deploy/rbac.yaml | kubectl"
    assert remedy in capsys.readouterr().out


def test_the_doctor_knows_what_settings_toml_allows(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"  # The guide describes this file.
    file.write_text(
        "num_nodes: 1\nkubernetes: {autoscaled_nodes: true, env_from_secrets: [storage]}\n"
    )
    assert main(["doctor", "--cluster", str(file)]) == 1
    told = capsys.readouterr().out
    assert (
        "the tasks would refuse this cluster: cluster.kubernetes.env_from_secrets: expected "
        "none, because"
    ) in told


def test_the_doctor_has_one_line_for_what_it_may_not_see(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.forbidden = ("/deployments", "/resourcequotas", "/nodes", "reviews", "/pods")
    assert main(["doctor", "--cluster", json.dumps(FIXED)]) == 2
    told = capsys.readouterr().out
    assert told.startswith("ok       namespace team is checked (--namespace)\n")
    assert "FAILED" not in told
    assert "could start in" not in told
    assert (
        "may not see the operator, the rights of tasks, quotas, nodes, what the API server admits, "
    ) in told


def test_the_doctor_waits_for_a_dead_api_server_once(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.http.server_close()
    # A call of sleep is an error here.
    monkeypatch.setattr(api, "time", SimpleNamespace(monotonic=time.monotonic))
    assert main(["doctor", "--cluster", AUTOSCALED]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "error: the Kubernetes API server does not answer" in told.err


def test_the_doctor_finds_clusters_that_outlived_their_driver(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def cluster(name: str, owner: str, **metadata: Any) -> dict[str, Any]:
        owners = [{"name": owner, "uid": owner}]
        known = {"name": name, "namespace": "other", "ownerReferences": owners, **metadata}
        return {"metadata": known}

    def pod(uid: str, phase: str) -> dict[str, Any]:
        return {
            "metadata": {"name": "p", "uid": uid},
            "spec": {"containers": []},
            "status": {"phase": phase},
        }

    api_server.answers |= {
        "/daskclusters": {
            "items": [
                cluster("in-use", "runs"),
                cluster("ended", "failed"),
                cluster("replaced", "reborn"),
                cluster("going", "failed", deletionTimestamp="2026-01-01T00:00:00Z"),
                {"metadata": {"name": "from-outside", "namespace": "other"}},
            ]
        },
        "/pods/runs": pod("runs", "Running"),
        "/pods/failed": pod("failed", "Failed"),
        "/pods/reborn": pod("0a1b", "Running"),
    }
    assert main(["doctor", "--cluster", AUTOSCALED]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "Dask cluster " in line] == [
        f"warning  Dask cluster {name} of namespace other outlived its driver, pod {pod}; delete "
        f"it: kubectl --namespace other delete daskcluster {name} --cascade=foreground"
        for name, pod in [("ended", "failed"), ("replaced", "reborn")]
    ]


def test_the_labels_of_nodes_and_the_starts_of_pods_are_those_of_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = datetime.datetime(2026, 11, 29, tzinfo=datetime.timezone.utc)
    nodes = [
        client.V1Node(metadata=client.V1ObjectMeta(name=name, labels={"zone": name[-1]}))
        for name in ("node-a", "node-b")
    ]
    places = {"worker-0": "node-b", "worker-1": "node-c", "of-another-run": "node-a"}  # c is gone
    pods = {
        name: client.V1Pod(
            metadata=client.V1ObjectMeta(name=name),
            spec=client.V1PodSpec(containers=[], node_name=node),
            status=client.V1PodStatus(start_time=begun),
        )
        for name, node in places.items()
    }
    asked = []

    def call(_: str, method: str, *args: str, patience: float, label_selector: str = "") -> Any:
        asked.append(method)
        if method == "list_node":
            return client.V1NodeList(items=nodes)
        if method == "read_namespaced_pod":
            assert args[1] == "team"
            return pods[args[0]]
        assert (method, args, label_selector) == (
            "list_namespaced_pod",
            ("team",),
            "dask.org/component=worker",
        )
        return client.V1PodList(items=list(pods.values()))

    monkeypatch.setattr(api, "call", call)
    found = api.locate_nodes(["worker-0", "worker-1"], "team")
    assert found == [({"zone": "b"}, begun.timestamp()), ({}, begun.timestamp())]
    assert len(asked) == 2  # the number of pods does not matter
    assert api.locate_nodes(["worker-0"], "team") == found[:1]
    with pytest.raises(ClusterError, match="there is no pod worker-9"):
        api.locate_nodes(["worker-0", "worker-9"], "team")
    host = {"kubernetes.io/hostname": socket.gethostname()}
    assert api.locate_nodes(["0", "1"], "") == [(host, 0.0)] * 2
