"""Requests to Kubernetes, to the letter, without a cluster. tests/kubernetes has a real one."""

import contextlib
import dataclasses
import datetime
import http.server
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.config
import distributed  # noqa: F401 - adds its defaults to the configuration
import pytest
import yaml

from flyte_ddp.__main__ import main
from flyte_ddp.cluster.config import ClusterConfig, KubernetesConfig, cluster_config, dask_config
from flyte_ddp.cluster.connect import worker_end
from flyte_ddp.cluster.kubernetes import api, checks, lifecycle, preflight
from flyte_ddp.cluster.kubernetes.checks import INSTALLED_VERSION, NEEDED_EVERYWHERE, tolerates
from flyte_ddp.cluster.kubernetes.manifest import (
    Driver,
    certificate_secret,
    cluster_name,
    cluster_spec,
    merge_pod,
    network_policy,
)
from flyte_ddp.cluster.kubernetes.resources import sum_requests
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import parse_duration
from flyte_ddp.errors import ClusterError, ConfigError, OutOfMemory, PreflightError
from flyte_ddp.launch import driver
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.programs import Job, recipe_program
from tasks.train import pod_failure

DEPLOY = Path(__file__).parents[1] / "deploy"
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

KEEP_IN_PLACE = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
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
        labels={"team": "vision"},
        annotations={"cost-center": "7"},
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
            "annotations": {**KEEP_IN_PLACE, "cost-center": "7"},
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
                                {
                                    "name": "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES",
                                    "value": ROUTES,
                                },
                                *TLS_SETTINGS,
                                {"name": "FLYTE_DDP_TERMINATION_GRACE", "value": "60"},
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
                                {
                                    "name": "DASK_SCHEDULER_ADDRESS",
                                    "value": "tls://ddp-x-00000000-0-scheduler:8786",
                                },
                                {"name": "FLYTE_DDP_TERMINATION_GRACE", "value": "60"},
                                {"name": "NCCL_DEBUG", "value": "INFO"},
                                {
                                    "name": "DASK_WORKER_NAME",
                                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                                },
                            ],
                            "envFrom": [{"secretRef": {"name": "storage"}}],
                            "resources": {"requests": worker_resources, "limits": worker_resources},
                            "securityContext": SECURITY,
                            "volumeMounts": [
                                {"name": "shared-memory", "mountPath": "/dev/shm"},
                                TEMPORARY_MOUNT,
                                CERTIFICATE_MOUNT,
                            ],
                        }
                    ],
                    "volumes": [
                        {
                            "name": "shared-memory",
                            "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"},
                        },
                        TEMPORARY_VOLUME,
                        CERTIFICATE_VOLUME,
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


def test_the_certificate_goes_with_its_cluster() -> None:
    secret = certificate_secret("ddp-x-00000000-0", "2c3d", "certificate", "key")
    assert secret["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "kubernetes.dask.org/v1",
            "kind": "DaskCluster",
            "name": "ddp-x-00000000-0",
            "uid": "2c3d",
        }
    ]
    assert secret["stringData"] == {"tls.crt": "certificate", "tls.key": "key"}


def test_a_plain_cluster_sets_no_optional_field() -> None:
    spec = cluster_spec(kubernetes(image="image"), "ddp-x-00000000-0")
    assert "ownerReferences" not in spec["metadata"]
    worker = spec["spec"]["worker"]["spec"]
    container = worker["containers"][0]
    assert (
        not {"nodeSelector", "tolerations", "serviceAccountName", "imagePullSecrets"}
        & worker.keys()
    )
    assert "envFrom" not in container
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "8Gi"}


def test_only_a_runs_own_pods_its_driver_and_the_operator_reach_its_cluster() -> None:
    labels = {"execution-id": "f3a9", "node-id": "n1"}
    driver = Driver("task-pod", "0a1b", "flytesnacks-development", "image", labels)
    place = ("ddp-x-00000000-0", "2c3d", "flytesnacks-development", "dask-operator")
    policy = network_policy(*place, driver)
    own = {"podSelector": {"matchLabels": {"dask.org/cluster-name": "ddp-x-00000000-0"}}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "dask-operator"}}
    }
    ports = [{"protocol": "TCP", "port": 8786}, {"protocol": "TCP", "port": 8787}]
    assert policy["spec"] == {
        **own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [own]},
            {"from": [operator, {"podSelector": {"matchLabels": labels}}], "ports": ports},
        ],
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
    assert unlabelled["spec"]["ingress"][1]["from"] == [operator, {"podSelector": {}}]
    assert network_policy(*place)["spec"]["ingress"][1]["from"] == [operator]
    # A driver in another namespace is let in from there, and an operator from where it is.
    elsewhere = network_policy("ddp-x-00000000-0", "2c3d", "gpus", "platform", driver)["spec"][
        "ingress"
    ][1]["from"]
    operator["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] = "platform"
    home = {"matchLabels": {"kubernetes.io/metadata.name": "flytesnacks-development"}}
    assert elsewhere == [
        operator,
        {"podSelector": {"matchLabels": labels}, "namespaceSelector": home},
    ]


def test_a_policy_that_is_not_enforced_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed_port = probe.getsockname()[1]
    with caplog.at_level("DEBUG", "flyte_ddp"):
        preflight.warn_if_unenforced("127.0.0.1", closed_port).join(10)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "seems not to enforce NetworkPolicies" in caplog.text
        caplog.clear()
        with socket.socket() as full:  # whose queue is full: another connection gets no answer
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            with contextlib.ExitStack() as waiting:
                for _ in range(4):
                    client = waiting.enter_context(socket.socket())
                    client.setblocking(False)
                    client.connect_ex(full.getsockname())
                preflight.warn_if_unenforced(*full.getsockname()).join(10)
        assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_the_annotations_for_autoscalers_can_be_replaced() -> None:
    spec = cluster_spec(
        kubernetes(annotations={"karpenter.sh/do-not-disrupt": "false"}), "ddp-x-00000000-0"
    )
    assert spec["metadata"]["annotations"] == {
        **KEEP_IN_PLACE,
        "karpenter.sh/do-not-disrupt": "false",
    }


def test_every_pod_that_the_operator_makes_is_in_one_group_of_the_queue() -> None:
    from dask_kubernetes.operator.controller import controller as operator

    config = ClusterConfig(
        num_nodes=4, kubernetes=KubernetesConfig(image="image", queue="team", labels={"a": "b"})
    )
    spec = cluster_spec(config, "ddp-x-00000000-0")
    meta = spec["metadata"]["annotations"], spec["metadata"]["labels"]
    scheduler = operator.build_scheduler_deployment_spec(
        "ddp-x-00000000-0", {"containers": []}, *meta
    )
    names = ("ddp-x-00000000-0-default", "space", "ddp-x-00000000-0", "1a2b")
    worker = operator.build_worker_deployment_spec(*names, {"containers": []}, *meta)
    for deployment in (scheduler, worker):
        pod = deployment["spec"]["template"]["metadata"]
        # Kueue reads the queue from either
        for labels in (deployment["metadata"]["labels"], pod["labels"]):
            assert labels["kueue.x-k8s.io/queue-name"] == "team"
        assert pod["labels"]["kueue.x-k8s.io/pod-group-name"] == "ddp-x-00000000-0"
        # four workers and the scheduler
        assert pod["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "5"
    assert "kueue" not in json.dumps(cluster_spec(kubernetes(image="image"), "ddp-x-00000000-0"))


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
    assert (
        api._own_image(
            SimpleNamespace(metadata=metadata, spec=SimpleNamespace(containers=containers))
        )
        == image
    )


def test_users_cannot_take_the_labels_by_which_orphans_are_found() -> None:
    spec = cluster_spec(
        kubernetes(labels={"app.kubernetes.io/managed-by": "me"}), "ddp-x-00000000-0"
    )
    assert spec["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "flyte-ddp"


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
    assert set(dask.config.get("distributed.scheduler.http.routes")) < set(
        dask.config.get("distributed.scheduler.http.routes", config=read)
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
    assert [
        each["value"]
        for each in worker["env"]
        if each["name"] == "DASK_DISTRIBUTED__WORKER__DAEMON"
    ] == ["True"]
    assert pod["terminationGracePeriodSeconds"] == 45
    assert worker["env"][len(GANG_SETTINGS)] == {
        "name": "FLYTE_DDP_TERMINATION_GRACE",
        "value": "45",
    }
    assert worker["args"][:2] == ["dask", "worker"]
    assert [mount["mountPath"] for mount in worker["volumeMounts"]] == [
        "/dev/shm",
        "/tmp",
        "/scratch",
    ]
    assert sidecar == {"name": "sidecar", "image": "sidecar"}
    assert [volume["name"] for volume in pod["volumes"]] == [
        "shared-memory",
        "temporary",
        "scratch",
    ]


def test_merging_changes_neither_side() -> None:
    base: dict[str, Any] = {"a": {"b": 1}, "list": [{"name": "x", "v": 1}]}
    override: dict[str, Any] = {
        "a": {"b": None, "c": 2},
        "list": [{"name": "x", "v": 2}],
        "args": ["new"],
    }
    assert merge_pod(base, override) == {
        "a": {"c": 2},
        "list": [{"name": "x", "v": 2}],
        "args": ["new"],
    }
    assert base == {"a": {"b": 1}, "list": [{"name": "x", "v": 1}]}
    assert override == {"a": {"b": None, "c": 2}, "list": [{"name": "x", "v": 2}], "args": ["new"]}


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
    assert DNS_1035.fullmatch(name)
    assert len(name) <= 53
    assert name == cluster_name(execution_id) == cluster_name(name)


def test_cluster_names_differ_where_anything_differs() -> None:
    names = ["a" * 80 + "b", "a" * 80 + "c", "a", "A", "a/1", "a-1", "a-1-0"]
    assert len({cluster_name(each) for each in names}) == len(names)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("kind", "k8s", "kind: expected one of auto, local, kubernetes, existing, got 'k8s'"),
        ("num_nodes", 0, "num_nodes: expected a whole number of at least 1, got 0"),
        ("num_nodes", "2", "num_nodes: expected a whole number of at least 1, got '2'"),
        ("gpus_per_node", -1, "gpus_per_node: expected a whole number of at least 0, got -1"),
        ("min_nodes", 3, "min_nodes: expected at most num_nodes (2), got 3"),
        (
            "start_timeout",
            float("inf"),
            "start_timeout: expected a finite number above 0 (seconds), got inf",
        ),
        ("kubernetes", "small", "kubernetes: expected an object with fields, got 'small'"),
    ],
)
def test_an_invalid_value_is_refused_with_the_expected_one(
    field: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster_config({field: value})
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("worker_memory", "8 GB", "a Kubernetes quantity such as 8Gi or 500M, got '8 GB'"),
        ("scheduler_memory", "-1", "a Kubernetes quantity such as 8Gi or 500M, got '-1'"),
        ("worker_cpus", 0, "a finite number above 0 (cores), got 0"),
        ("worker_cpus", float("nan"), "a finite number above 0 (cores), got nan"),
        ("idle_timeout", 5, "a finite number of at least 60 (seconds), got 5"),
        ("termination_grace", 5, "a finite number of at least 10 (seconds), got 5"),
        ("image_pull_policy", "Sometimes", "one of IfNotPresent, Always, Never, got 'Sometimes'"),
        ("gpu_resource", "", "a resource name such as nvidia.com/gpu, got ''"),
        ("labels", ["gpu"], "an object with strings as keys, got ['gpu']"),
        ("env_from_secrets", "storage", "a list, got 'storage'"),
        ("pod_template", {1: "x"}, "an object with strings as keys, got {1: 'x'}"),
        ("autoscaled_nodes", "yes", "true or false, got 'yes'"),
        ("queue", "Team A", "the name of a LocalQueue, got 'Team A'"),
    ],
)
def test_an_invalid_value_of_the_pods_is_refused(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster_config({"kubernetes": {field: value}})
    assert str(caught.value) == f"kubernetes.{field}: expected {expected}"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("env", {"DEBUG": 1}, "kubernetes.env['DEBUG']: expected a string, got 1"),
    ],
)
def test_an_invalid_nested_value_is_named_by_its_path(
    field: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster_config({"kubernetes": {field: value}})
    assert str(caught.value) == expected


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^processes_per_node: expected at most gpus_per_node "
            r"\(2\), got 3$"
        ),
    ):
        ClusterConfig(gpus_per_node=2, processes_per_node=3)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"gpus": 1},
            (
                r"^cluster: expected one of the fields kind, num_nodes, .*kubernetes, got "
                r"'gpus'$"
            ),
        ),
        (
            {"kubernetes": {"gpus": 1}},
            (
                r"^kubernetes: expected one of the fields image, .*, got "
                r"'gpus'$"
            ),
        ),
        ({"kubernetes": {"kind": "local"}}, r"^kubernetes: .*, got 'kind'$"),
        ({"image": "a"}, r"^cluster: .*, got 'image'$"),
    ],
)
def test_an_unknown_field_is_named_with_the_known_ones(
    values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        cluster_config(values)


@pytest.mark.parametrize(
    ("values", "ranks"),
    [({}, 1), ({"gpus_per_node": 4}, 4), ({"gpus_per_node": 4, "processes_per_node": 2}, 2)],
)
def test_ranks_per_node(values: dict[str, int], ranks: int) -> None:
    assert ClusterConfig(**values).ranks_per_node == ranks


def test_a_config_is_a_flyte_input() -> None:
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    from tasks.inputs import ClusterInput

    pods = KubernetesConfig(
        labels={"a": "b"},
        env_from_secrets=["s"],
        pod_template={"containers": [{"name": "worker", "stdin": True}], "hostNetwork": None},
    )
    config = ClusterInput(kind="kubernetes", kubernetes=pods)
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(
        context, config, ClusterInput, TypeEngine.to_literal_type(ClusterInput)
    )
    assert TypeEngine.to_python_value(context, literal, ClusterInput) == config


def from_console(values: dict[str, Any]) -> ClusterConfig:
    """The task's input, as Flyte's console gives it: a protobuf Struct, whose numbers are all
    floats.
    """
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine
    from flytekit.models.literals import Literal, Scalar
    from google.protobuf.json_format import ParseDict
    from google.protobuf.struct_pb2 import Struct

    from tasks.inputs import ClusterInput

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


def test_every_field_is_read_by_something() -> None:
    code = "".join(
        path.read_text() for path in (Path(__file__).parents[1] / "flyte_ddp").rglob("*.py")
    )
    for kind, owners in (
        (ClusterConfig, "config|self"),
        (KubernetesConfig, "kubernetes|pods|self"),
    ):
        names = [each.name for each in dataclasses.fields(kind)]
        assert [name for name in names if not re.search(rf"({owners})\.{name}\b", code)] == []


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
    assert sum_requests(pod) == {"cpu": Decimal("1.5"), "memory": Decimal(1 << 30)}


def test_the_requests_of_a_drivers_own_pod_are_read_as_the_client_has_them() -> None:
    from kubernetes.client import ApiClient, V1Container, V1PodSpec, V1ResourceRequirements

    resources = [
        None,
        V1ResourceRequirements(requests={"cpu": "10m"}),
        V1ResourceRequirements(limits={"cpu": "1"}),
    ]
    pod = V1PodSpec(containers=[V1Container(name="c", resources=each) for each in resources])
    assert sum_requests(ApiClient().sanitize_for_serialization(pod)) == {"cpu": Decimal("1.010")}


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("90m", 5400), ("1.5h", 5400), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("--older-than", text) == seconds


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
    values = yaml.safe_load((DEPLOY / "operator/values.yaml").read_text())
    assert values["image"]["tag"] == pinned
    account, *_ = yaml.safe_load_all((DEPLOY / "operator/operator.yaml").read_text())
    assert values["serviceAccount"]["name"] == account["metadata"]["name"]
    name = f"system:serviceaccount:{account['metadata']['namespace']}:{account['metadata']['name']}"
    assert name in (DEPLOY / "admission-policy.yaml").read_text()
    *_, deployment = yaml.safe_load_all((DEPLOY / "operator/operator.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert (
        values["podSecurityContext"]["seccompProfile"] == pod["securityContext"]["seccompProfile"]
    )
    assert f"{INSTALLED_VERSION}: VERSION\n" in (DEPLOY / "operator/operator.yaml").read_text()
    assert 's|VERSION\\$|\\"$version\\"|' in (DEPLOY / "operator/install.sh").read_text()


def operator(
    image: str = "registry.example.com/operator:7",
    replicas: int = 1,
    available: int = 1,
    **labels: str,
) -> dict[str, Any]:
    """Deployments, of which one runs the operator under labels of somebody's own."""
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


def one_kind() -> dict[str, Any]:
    kind = {
        "name": "daskclusters",
        "kind": "DaskCluster",
        "namespaced": True,
        "singularName": "",
        "verbs": [],
    }
    return {"groupVersion": "kubernetes.dask.org/v1", "resources": [kind]}


AUTOSCALED = '{"num_nodes": 1, "kubernetes": {"autoscaled_nodes": true, "worker_memory": "4Gi"}}'
TASKS = '{"training": {"cpu": "4", "memory": "16Gi"}, "driver": {"cpu": "1", "memory": "3Gi"}}'
UPSTREAM = "ghcr.io/dask/dask-kubernetes-operator"
OPERATOR_KINDS = ("daskclusters", "daskworkergroups", "daskjobs", "daskautoscalers")


class ApiServer:
    """An API server that answers preflight and creation, with faults to switch on."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        # what the next requests end with: an HTTP status, or 0 for a cut connection
        self.faults: list[int] = []
        self.cluster: dict[str, Any] | None = None
        # Instead of its own, by the end of the path.
        self.answers: dict[str, Any] = {"/deployments": operator(), "/daskclusters": {"items": []}}
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
        for end, answer in self.answers.items():
            if method == "GET" and place.endswith(end):
                return 200, answer
        if "subjectaccessreviews" in path:
            return 201, {"spec": body["spec"], "status": {"allowed": True}}
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
        if path.startswith("/version"):
            names = (
                "buildDate",
                "compiler",
                "gitCommit",
                "gitTreeState",
                "gitVersion",
                "goVersion",
            )
            return 200, dict.fromkeys([*names, "major", "minor", "platform"], "1")
        if path.startswith("/apis/kubernetes.dask.org"):
            kinds = [
                {"name": name, "kind": name, "namespaced": True, "singularName": "", "verbs": []}
                for name in OPERATOR_KINDS
            ]
            return 200, {"groupVersion": "kubernetes.dask.org/v1", "resources": kinds}
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
    monkeypatch.setattr(api, "MAX_RETRY_DELAY", 0.1)
    monkeypatch.setattr(lifecycle, "OPERATOR_TIMEOUT", 0.5)
    api._api.cache_clear()
    yield server
    api._api.cache_clear()
    server.http.shutdown()
    server.http.server_close()


PODS = KubernetesConfig(image="image", autoscaled_nodes=True)


def start(timeout: float = 20) -> None:
    with lifecycle.kube_cluster(ClusterConfig(kubernetes=PODS), "run", time.monotonic() + timeout):
        raise AssertionError("started")


def test_a_pod_that_its_queue_holds_back_is_explained(api_server: ApiServer) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "vision", "kueue.x-k8s.io/pod-group-name": "ddp-run"}
    gated = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "non-empty gates",
    }
    pod = {
        "metadata": {"name": "ddp-run-scheduler", "namespace": "team", "labels": labels},
        "spec": {"containers": []},
        "status": {"phase": "Pending", "conditions": [gated]},
    }
    api_server.answers = {"/pods": {"items": [pod]}}
    assert api.explain(ClusterConfig(kubernetes=PODS), "run") == (
        "ddp-run-scheduler: waits in Kueue's queue vision (kubectl --namespace team describe "
        "workload ddp-run)."
    )
    del labels["kueue.x-k8s.io/queue-name"]
    assert "cannot be placed on a node: non-empty gates" in api.explain(
        ClusterConfig(kubernetes=PODS), "run"
    )


@pytest.mark.parametrize("fault", [0, 429, 500, 503])
def test_requests_are_repeated_while_the_api_server_is_away(
    api_server: ApiServer, fault: int
) -> None:
    api_server.faults = [fault, fault]
    # so preflight and creation succeeded
    with pytest.raises(ClusterError, match="the Dask operator did not react"):
        start()
    assert (
        "POST",
        "/apis/kubernetes.dask.org/v1/namespaces/team/daskclusters",
    ) in api_server.requests
    assert api_server.requests[-1][0] == "DELETE"


def test_an_operator_that_ends_after_its_first_look_is_not_waited_for(
    api_server: ApiServer,
) -> None:
    reply = api_server.reply

    def touch(method: str, path: str, body: Any) -> tuple[int, Any]:
        status, answer = reply(method, path, body)
        if method == "GET" and "daskclusters/" in path and api_server.cluster:
            answer = {**answer, "status": {"phase": "Created"}}
        return status, answer

    api_server.reply = touch  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match="the Dask operator did not react") as caught:
        start(timeout=60)
    assert not isinstance(caught.value, ConfigError)
    # A quota that admits no pod is another reason, which is waited for.
    event = {
        "metadata": {"name": "e", "resourceVersion": "1"},
        "reason": "FailedCreate",
        "message": "exceeded quota",
    }
    event["involvedObject"] = {"kind": "ReplicaSet", "name": f"{cluster_name('run')}-scheduler-1"}
    api_server.cluster = None
    api_server.answers["/events"] = {"items": [event]}
    with pytest.raises(ClusterError, match="did not start within .* exceeded quota"):
        start(timeout=2)


def test_a_creation_with_a_lost_answer_is_recognized(api_server: ApiServer) -> None:
    reply = api_server.reply

    def lose_the_first(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "POST" and "daskclusters" in path and api_server.cluster is None:
            api_server.faults.append(0)
        return reply(method, path, body)

    api_server.reply = lose_the_first  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match="the Dask operator did not react"):
        start()
    created = [
        path for method, path in api_server.requests if method == "POST" and "daskclusters" in path
    ]
    assert len(created) == 2
    assert api_server.requests[-1][0] == "DELETE"


def test_an_api_server_that_stays_away_is_recoverable(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "API_PATIENCE", 1.0)
    monkeypatch.setitem(api.call.__kwdefaults__, "patience", 1.0)
    api_server.faults = [503] * 100
    with pytest.raises(
        ClusterError, match="the Kubernetes API server does not answer: not now"
    ) as caught:
        start()
    assert not isinstance(caught.value, ConfigError)
    api_server.http.server_close()
    with pytest.raises(ClusterError, match="the Kubernetes API server does not answer"):
        start()


@pytest.mark.parametrize("status", [400, 422])
def test_refused_pods_are_a_user_error(api_server: ApiServer, status: int) -> None:
    reply = api_server.reply
    invalid = (status, {"message": "spec.worker.spec.containers[0].ports: Invalid value"})
    api_server.reply = lambda method, path, body: (  # type: ignore[method-assign]
        invalid if method == "POST" and "daskclusters" in path else reply(method, path, body)
    )
    with pytest.raises(PreflightError, match=r"ports: Invalid value; correct `pod_template`"):
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
        (
            {"shared_memory": "9Gi"},
            (
                r"shared_memory \(9Gi\) is a part of worker_memory, which is "
                r"8Gi only; raise"
            ),
        ),
        (
            {
                "pod_template": {
                    "containers": [{"name": "worker", "resources": {"limits": {"x/y": "much"}}}]
                }
            },
            "much; correct the resources in `pod_template`",
        ),
    ],
)
def test_impossible_sizes_are_preflight_findings(
    api_server: ApiServer, changes: dict[str, Any], finding: str
) -> None:
    config = ClusterConfig(kubernetes=dataclasses.replace(PODS, autoscaled_nodes=False, **changes))
    with (
        pytest.raises(PreflightError, match=finding),
        lifecycle.kube_cluster(config, "run", time.monotonic() + 20),
    ):
        raise AssertionError("started")


def test_the_choice_of_credentials_is_not_printed(
    api_server: ApiServer, capfd: pytest.CaptureFixture[str]
) -> None:
    api.call("VersionApi", "get_code")
    assert capfd.readouterr() == ("", "")


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
        # an earlier failure's
        (worker_pod({"reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z"}), ""),
        (worker_pod(None), ""),
        (worker_pod(None, deletionTimestamp="2026-01-01T00:00:00Z"), ""),  # evicted
        (None, ""),
    ],
)
def test_a_lost_workers_end_is_read_from_its_pods_status(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch, pod: dict[str, Any] | None, reason: str
) -> None:
    monkeypatch.setattr(api, "END_TIMEOUT", 0.5)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    read = json.loads(json.dumps(pod).replace('"now"', f'"{now}"'))
    answers = {
        "/log": (200, None),
        f"/{WORKER}": (200, read) if pod else (404, {"message": "not found"}),
    }
    api_server.reply = lambda method, path, body: next(  # type: ignore[method-assign]
        answer for end, answer in answers.items() if path.split("?")[0].endswith(end)
    )
    end = worker_end(ClusterConfig(kind="kubernetes", kubernetes=PODS), WORKER)
    assert (end.reason, end.is_out_of_memory) == (reason, reason == "OOMKilled")
    assert str(end).endswith("raise kubernetes.worker_memory") is end.is_out_of_memory


def test_the_end_of_a_deleted_pod_is_not_waited_for(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.answers |= {
        "/log": "a line",
        f"/{WORKER}": worker_pod(None, deletionTimestamp="2026-01-01T00:00:00Z"),
    }
    # to sleep is an error
    monkeypatch.setattr(api, "time", SimpleNamespace(monotonic=time.monotonic))
    end = worker_end(ClusterConfig(kind="kubernetes", kubernetes=PODS), WORKER)
    assert "a line" in end.log


def test_a_task_whose_pod_was_killed_for_its_memory_twice_at_the_same_step_ends(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kubernetes kills the whole container, so the attempt after it has to look at the pod of the
    one before.
    """
    ended: dict[str, str] = {}
    status = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0}

    def reply(method: str, path: str, body: object) -> tuple[int, object]:
        name = path.split("?")[0].rpartition("/")[2]
        state = {"terminated": {"exitCode": 137, "reason": ended.get(name, "Error")}}
        found = {"metadata": {"name": name}, "spec": {"containers": [{"name": "main"}]}}
        return 200, {
            **found,
            "status": {"phase": "Failed", "containerStatuses": [{**status, "state": state}]},
        }

    api_server.reply = reply  # type: ignore[method-assign]
    job = Job(recipe_program("digits", TrainingConfig()), str(tmp_path), 0.0)
    monkeypatch.setattr(driver._Driver, "drive", lambda self: None)

    def begin(pod: str) -> None:
        driver.run(job, LocalPlace(1), earlier_failure=pod_failure(pod))

    begin("")  # the first attempt
    ended |= {"e-n1-0": "OOMKilled", "e-n1-2": "OOMKilled", "e-n1-3": "OOMKilled"}
    begin("e-n1-0")
    (tmp_path / "step-0000000020.json").touch()
    begin("e-n1-1")  # ended otherwise
    begin("e-n1-2")  # it came further than the first
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
            "the operator has version 2024.1.0",
        ),
        (
            {"/deployments": operator(**{INSTALLED_VERSION: "2024.1.0"})},
            "warning",
            "the operator has version 2024.1.0",
        ),
        (
            {"/deployments": operator(replicas=0, available=0)},
            "FAILED",
            "scaled to 0, so nothing makes pods",
        ),
        ({"/deployments": operator(available=0)}, "FAILED", "installed but not running"),
        (
            {"/deployments": {"items": []}},
            "FAILED",
            "the Dask operator does not run: no Deployment",
        ),
        ({"/apis/kubernetes.dask.org/v1": one_kind()}, "FAILED", "does not know daskautoscalers, "),
        (
            {"/resourcequotas": quota(**{"limits.memory": "9Gi"})},
            "FAILED",
            (
                "quota small of namespace team allows limits.memory up to 9Gi, and a task "
                "(training) "
                "needs 16Gi; request"
            ),
        ),
        # A worker with 4Gi, a scheduler with 1Gi, and the task that drives them with 3Gi.
        (
            {"/resourcequotas": quota(**{"limits.memory": "7Gi"})},
            "FAILED",
            "allows limits.memory up to 7Gi, and this run with its driver needs 8Gi",
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
    assert main(["doctor", "--cluster", AUTOSCALED, "--tasks", TASKS]) == (level == "FAILED")
    told = capsys.readouterr().out
    assert any(expected in line for line in told.splitlines() if line.startswith(level)), told
    assert ("could start" in told) is (level != "FAILED")


@pytest.mark.parametrize(
    ("found", "level", "expected"),
    [
        # Each fits on a node, and the driver does not beside them.
        (
            (node(), node("node-1")),
            "FAILED",
            "a scheduler and the task's own pod: they have 4 cpu of 4.5",
        ),
        (
            (node(cpu="8", taint="new"), node("node-1")),
            "FAILED",
            "have room for 1 of 2 workers of 1.5 cpu, 4Gi memory",
        ),
        ((node(cpu="8"),), "ok", "could start in namespace team if its image can be pulled"),
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
    tasks = '{"driver": {"cpu": "1", "memory": "2Gi"}}'
    assert main(["doctor", "--cluster", json.dumps(FIXED), "--tasks", tasks]) == (level == "FAILED")
    told = capsys.readouterr().out
    assert any(expected in line for line in told.splitlines() if line.startswith(level)), told


def test_nodes_that_fit_no_pod_end_a_first_attempt_for_good_and_a_retry_recoverably(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an attempt ran before, the configuration fits: the taints are somebody's
    maintenance.
    """
    api_server.answers |= nodes(node(cpu="8", taint="maintenance"))
    config = ClusterConfig(kubernetes=dataclasses.replace(PODS, autoscaled_nodes=False))

    def begin() -> None:
        with lifecycle.kube_cluster(config, "run", time.monotonic() + 20):
            raise AssertionError("started")

    with pytest.raises(PreflightError, match="with the taint maintenance=:NoSchedule"):
        begin()
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
    with pytest.raises(ClusterError, match="with the taint maintenance=:NoSchedule") as caught:
        begin()
    assert not isinstance(caught.value, ConfigError)
    api_server.answers["/resourcequotas"] = quota(pods="1")  # and what does not pass ends it
    with pytest.raises(PreflightError, match="quota small"):
        begin()


def test_the_doctor_asks_the_api_server_for_a_tasks_pod_as_flyte_makes_it(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    reply = api_server.reply

    def refuse_root(method: str, path: str, body: Any) -> tuple[int, Any]:
        if "dryRun=All" in path and path.startswith("/api/v1/namespaces/team/pods"):
            asked.append(body["spec"])
            if not body["spec"].get("securityContext"):
                return 403, {
                    "message": 'pods is forbidden: violates PodSecurity "restricted:latest"'
                }
        return reply(method, path, body)

    api_server.reply = refuse_root  # type: ignore[method-assign]
    template = {
        "spec": {
            "securityContext": {"runAsUser": 1},
            "containers": [{"name": "default", "tty": True}],
        }
    }
    api_server.answers["/podtemplates/own"] = {"metadata": {"name": "own"}, "template": template}
    command = ["doctor", "--cluster", AUTOSCALED, "--tasks", TASKS]
    assert main(command) == 1
    assert (
        "set Flyte's `plugins.k8s.default-pod-template-name: flyte-ddp`" in capsys.readouterr().out
    )
    assert main([*command, "--pod-template", "own"]) == 0
    setting = {"inline.yaml": "plugins:\n  k8s:\n    default-pod-template-name: own\n"}
    api_server.answers["/configmaps"] = {
        "items": [{"metadata": {"name": "flyte"}, "data": setting}]
    }
    assert main(command) == 0
    (container,) = asked[-1]["containers"]
    assert (container["tty"], container["name"]) == (True, "task")
    assert {"cpu": "1", "memory": "3Gi"} in [
        each["containers"][0].get("resources", {}).get("limits") for each in asked
    ]


def test_the_doctor_names_the_namespace_that_it_checks(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["doctor", "--cluster", AUTOSCALED]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(
        "ok       namespace team is checked, that of the kubeconfig's context"
    )
    monkeypatch.setattr("flyte_ddp.cluster.kubernetes.doctor.context_namespace", lambda: "")
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("ok       namespace default is checked")
    assert main([*command, "--namespace", "b"]) == 0
    assert capsys.readouterr().out.startswith("ok       namespace b is checked, which is named\n")


def test_the_remedy_for_another_service_account_names_that(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = api_server.reply
    api_server.reply = lambda method, path, body: (  # type: ignore[method-assign]
        (201, {"spec": body["spec"], "status": {"allowed": False}})
        if "subjectaccessreviews" in path
        else reply(method, path, body)
    )
    assert main(["doctor", "--cluster", AUTOSCALED, "--service-account", "trainer"]) == 1
    (remedy,) = re.findall(r"apply it: sed '(.*)' deploy/rbac.yaml", capsys.readouterr().out)
    text = (DEPLOY / "rbac.yaml").read_text()
    for rule in remedy.split("; "):
        _, old, new, _ = rule.split("/")
        text = text.replace(old, new)
    documents = list(yaml.safe_load_all(text))
    assert documents[0]["metadata"] == {"name": "trainer", "namespace": "team"}
    subjects = [each["subjects"][0] for each in documents if "subjects" in each]
    assert {(each["name"], each["namespace"]) for each in subjects} == {("trainer", "team")}


def test_the_doctor_knows_what_settings_toml_allows(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"  # as the guide has it
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
    api_server.forbidden = "/limitranges"  # which nothing asks for
    assert main(["doctor", "--cluster", AUTOSCALED]) == 0
    told = capsys.readouterr().out
    assert (
        "unknown  the tasks' own pods were not checked; pass --tasks \"$(python -m tasks "
        'requests --json)"'
    ) in told
    assert (
        "unknown  the version of the operator registry.example.com/operator:7 in namespace "
        "dask-operator"
    ) in told
    api_server.forbidden = (
        "/deployments",
        "/resourcequotas",
        "/nodes",
        "reviews",
        "/pods",
        "/networkpolicies",
    )
    assert main(["doctor", "--cluster", json.dumps(FIXED)]) == 2
    told = capsys.readouterr().out
    assert "FAILED" not in told
    assert "could start in" not in told
    (line,) = [line for line in told.splitlines() if "may not see" in line]
    for what in (
        "the operator",
        "the rights of tasks",
        "quotas",
        "nodes",
        "what the API server admits",
    ):
        assert what in line
    assert "administrator" in line
    assert main(["doctor", "--cluster", "nowhere.json"]) == 2
    assert (
        "--cluster: expected a JSON object or the name of a JSON or YAML file, got 'nowhere.json'"
        in capsys.readouterr().err
    )


def test_the_doctor_waits_for_a_dead_api_server_once(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.http.server_close()
    # to sleep is an error
    monkeypatch.setattr(api, "time", SimpleNamespace(monotonic=time.monotonic))
    assert main(["doctor", "--cluster", AUTOSCALED]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "error: the Kubernetes API server does not answer" in told.err


def test_the_line_about_a_scheduler_that_has_no_pod_gives_that_as_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[list[str]] = [[], [], ["pod"]]
    monkeypatch.setattr(lifecycle, "REPORT_INTERVAL", -1)
    monkeypatch.setattr(lifecycle, "POLL_INTERVAL", 0)
    monkeypatch.setattr(
        lifecycle, "read_cluster", lambda *_, **__: {"status": {"phase": "Created"}}
    )
    monkeypatch.setattr(lifecycle, "pods_of", lambda *_: answers.pop(0))
    monkeypatch.setattr(lifecycle, "is_scheduler", lambda pod: True)
    monkeypatch.setattr(lifecycle, "is_ready", lambda pod: True)
    monkeypatch.setattr(lifecycle, "explain", lambda *_: "")
    with caplog.at_level("INFO"):
        assert (
            lifecycle._wait_for_scheduler(
                ClusterConfig(), "ddp-run", "team", time.monotonic() + 600
            )
            == "pod"
        )
    assert "Dask cluster ddp-run: waiting for its scheduler. It has no pod yet." in caplog.messages


def test_the_doctor_finds_clusters_that_outlived_their_driver(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)

    def cluster(name: str, owner: str = "", hours: float = 1, **metadata: Any) -> dict[str, Any]:
        owners = {"ownerReferences": [{"name": owner, "uid": owner}]} if owner else {}
        created = (now - datetime.timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")
        known = {
            "name": name,
            "namespace": "other",
            "creationTimestamp": created,
            **owners,
            **metadata,
        }
        return {"metadata": known}

    def pod(uid: str, phase: str) -> dict[str, Any]:
        return {
            "metadata": {"name": "p", "uid": uid},
            "spec": {"containers": []},
            "status": {"phase": phase},
        }

    clusters = [
        cluster("in-use", "runs", hours=99),
        cluster("ended", "failed"),
        cluster("replaced", "reborn"),
        cluster("young"),
        cluster("old", hours=49),
        cluster("going", "failed", deletionTimestamp="2026-01-01T00:00:00Z"),
    ]
    pods = {
        "runs": pod("runs", "Running"),
        "failed": pod("failed", "Failed"),
        "reborn": pod("0a1b", "Running"),
    }
    api_server.answers |= {
        "/daskclusters": {"items": clusters},
        **{f"/pods/{n}": each for n, each in pods.items()},
    }
    assert main(["doctor", "--cluster", AUTOSCALED]) == 0
    delete = "delete it: kubectl --namespace other delete daskcluster"
    assert [line for line in capsys.readouterr().out.splitlines() if "Dask cluster " in line] == [
        (
            f"warning  Dask cluster {name} of namespace other {reason}; {delete} {name} "
            "--cascade=foreground"
        )
        for name, reason in [
            ("ended", "outlived its driver, pod failed"),
            ("replaced", "outlived its driver, pod reborn"),
            ("old", "has no driver's pod and has been there for 48 h"),
        ]
    ]
    api_server.forbidden = "/daskclusters"
    assert main(["doctor", "--cluster", AUTOSCALED]) == 2
