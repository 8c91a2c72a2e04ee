"""The doctor as a test of a run: where it says ok a run starts, where it fails none does, and its
remedies mend it.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.__main__ import main
from flyte_ddp.cluster.config import cluster_config
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.cluster.kubernetes import lifecycle
from flyte_ddp.cluster.kubernetes.checks import NEEDED_OUTSIDE
from flyte_ddp.errors import ClusterError, ConfigError
from tests.kubernetes.conftest import ROOT, Namespace, kubectl, manifest, small_cluster

# with half a core each, for with less Python's start alone takes half a minute
ONE_WORKER = {"num_nodes": 1}
TASKS = {"driver": {"cpu": "100m", "memory": "256Mi"}}
PASTE = "paste"  # the commands that the findings end in
OPERATOR = "kubectl --namespace dask-operator"
NODES = "kubectl taint node --all"
OWN = "kubectl --namespace $NAMESPACE"


def quota(name: str, **hard: str) -> str:
    limits = ",".join(f"{key.replace('_', '.')}={value}" for key, value in hard.items())
    return f"{OWN} create quota {name} --hard={limits}"


def limit_range(**bounds: dict[str, str]) -> str:
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "bounds"}}
    text = json.dumps({**body, "spec": {"limits": [{"type": "Container", **bounds}]}})
    return f"echo {shlex.quote(text)} | {OWN} create -f -"


@dataclass
class Situation:
    """Something that keeps runs from starting."""

    finding: str  # pattern in a line of the doctor's that begins with FAILED
    break_: str = ""  # shell command
    # shell command, or PASTE; "": the configuration is at fault, and the one without `config` is
    # right
    mend: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # differs from ONE_WORKER
    reason: str = "PreflightError"  # pattern in the error of a run


SITUATIONS = {
    "an operator that is scaled to 0": Situation(
        "the Dask operator does not run: it is scaled to 0",
        (
            f"{OPERATOR} scale deployment dask-operator --replicas=0; {OPERATOR} wait --for=delete "
            "pod --all --timeout=60s"
        ),
        PASTE,
        reason="operator did not react",
    ),
    "a taint on all nodes": Situation(
        "with the taint upkeep=", f"{NODES} upkeep=:NoSchedule", f"{NODES} upkeep-"
    ),
    "a quota without room for the driver": Situation(
        "quota few of .* allows pods up to 1, and this run with its driver needs 3",
        quota("few", pods="1"),
        f"{OWN} delete quota few",
    ),
    "a limit range with a larger minimum": Situation(
        "refuse a worker's pod: .* minimum cpu usage per Container is 700m, but request is 600m",
        limit_range(min={"cpu": "700m"}),
        f"{OWN} delete limitrange bounds",
        reason="minimum cpu usage",
    ),
    "a limit range with a smaller maximum": Situation(
        "refuse a worker's pod: .* maximum memory usage per Container is 300Mi",
        limit_range(max={"memory": "300Mi"}),
        f"{OWN} delete limitrange bounds",
        reason="maximum memory usage",
    ),
    "a policy without the image": Situation(
        "refuse the DaskCluster: .* an image that is not in the list",
        (
            f"sed s/NAMESPACE/$NAMESPACE/g {ROOT}/deploy/admission-policy.yaml | kubectl apply -f "
            "- "
            "&& sleep 2"
        ),
        "policy",
    ),
    "pods larger than any node": Situation(
        "no node could ever run a worker pod", config={"worker_cpus": 1000}
    ),
    "more workers than the nodes have room for": Situation(
        "have room for . of 9 workers", config={"num_nodes": 9, "worker_cpus": 0.9}
    ),
    "a secret that is not there": Situation(
        "no secret absent", config={"env_from_secrets": ["absent"]}
    ),
    "a service account that is not there": Situation(
        "no service account absent", config={"service_account": "absent"}
    ),
    "a namespace that is not there": Situation(
        "namespace ddp-absent does not exist", config={"namespace": "ddp-absent"}
    ),
}


def shell(command: str, namespace: Namespace) -> None:
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.replace("$NAMESPACE", namespace.name)],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


def mend(situation: Situation, namespace: Namespace, told: str) -> None:
    command = situation.mend
    if command == PASTE:
        remedies = re.findall(r"^FAILED .*?: ((?:sed|kubectl) .*)$", told, re.MULTILINE)
        assert remedies, told
        command = "; ".join(remedies)
    if command == "policy":
        kubectl("apply", "-f", "-", stdin=manifest("admission-policy.yaml", namespace.name))
        command = "sleep 2"  # until the API server has it
    shell(command, namespace)


def starts(values: dict[str, Any], start_timeout: float) -> str:
    """Start a run's cluster, and return the reason why it did not; "" if its workers connected."""
    config = cluster_config({**values, "start_timeout": start_timeout})
    try:
        with open_cluster(config, f"doctor-{uuid.uuid4().hex[:8]}") as client:
            assert client.submit(sum, [1, 2]).result(timeout=30) == 3
    except (ClusterError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_run_starts_where_the_doctor_fails_and_one_does_where_it_is_mended(
    name: str,
    namespace: Namespace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    situation = SITUATIONS[name]
    monkeypatch.setattr(lifecycle, "OPERATOR_TIMEOUT", 8.0)

    def doctor(values: dict[str, Any]) -> tuple[int, str]:
        tasks = json.dumps(TASKS)
        status = main(
            [
                "doctor",
                "--cluster",
                json.dumps(values),
                "--tasks",
                tasks,
                "--pod-template",
                "flyte-ddp",
            ]
        )
        return status, capsys.readouterr().out

    right = small_cluster(**{"namespace": namespace.name, **ONE_WORKER})
    wrong = small_cluster(**{"namespace": namespace.name, **ONE_WORKER, **situation.config})
    told = ""
    if situation.break_:
        shell(situation.break_, namespace)
    try:
        status, told = doctor(wrong)
        assert status == 1, told
        assert re.search(f"^FAILED .*{situation.finding}", told, re.MULTILINE), told
        assert re.search(situation.reason, starts(wrong, start_timeout=12)), told
    finally:
        if situation.mend:
            mend(situation, namespace, told)
    if situation.mend == PASTE:
        kubectl(
            "--namespace",
            "dask-operator",
            "rollout",
            "status",
            "deployment/dask-operator",
            "--timeout=300s",
        )
    status, told = doctor(right)
    assert status == 0, told
    assert f"a run of 1 nodes could start in namespace {namespace.name}" in told
    # in the others a command that this test made itself is undone
    if situation.mend in (PASTE, "policy"):
        assert starts(right, start_timeout=120) == "", told


def test_rights_that_are_missing_are_given_by_the_doctors_command(
    namespace: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = small_cluster(**{"namespace": namespace.name, **ONE_WORKER})
    command = ["doctor", "--cluster", json.dumps(values), "--pod-template", "flyte-ddp"]
    # The runs have the rights of the tasks' service account, and what a driver outside the cluster
    # needs besides.
    access = json.loads(
        kubectl("config", "view", "--raw", "--minify", "--flatten", "--output", "json")
    )
    token = namespace.kubectl("create", "token", "flyte-ddp").strip()
    access["users"] = [{"name": each["name"], "user": {"token": token}} for each in access["users"]]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(access))
    for number, (verb, _, resource, subresource) in enumerate(NEEDED_OUTSIDE):
        name = f"outside-{number}"
        what = f"--resource={resource}/{subresource}".rstrip("/")
        namespace.kubectl("create", "role", name, f"--verb={verb}", what)
        namespace.kubectl(
            "create",
            "rolebinding",
            name,
            f"--role={name}",
            f"--serviceaccount={namespace.name}:flyte-ddp",
        )

    def starts_as_account() -> str:
        program = f"from tests.kubernetes.test_doctor import starts; print(starts({values!r}, 120))"
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        run = (sys.executable, "-c", program)
        return subprocess.run(
            run, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    namespace.kubectl("delete", "rolebinding", "flyte-ddp")
    try:
        assert main(command) == 1
        told = capsys.readouterr().out
        missing = (
            "may not create daskclusters.kubernetes.dask.org, get "
            "daskclusters.kubernetes.dask.org, .*"
        )
        assert re.search(
            f"^FAILED .*service account flyte-ddp {missing}create secrets", told, re.MULTILINE
        ), told
        assert re.search(
            f"PreflightError: .*\n- the kubeconfig's user {missing}", starts_as_account()
        )
        (remedy,) = re.findall(r"^FAILED .*?: (sed .*)$", told, re.MULTILINE)
        shell(remedy, namespace)
        assert main(command) == 0, capsys.readouterr().out
        assert starts_as_account() == "\n"
    finally:
        kubectl("apply", "-f", "-", stdin=manifest("rbac.yaml", namespace.name))


def test_a_restricted_namespace_needs_flytes_setting(
    namespace: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "doctor",
        "--cluster",
        json.dumps(small_cluster(**{"namespace": namespace.name, **ONE_WORKER})),
    ]
    try:
        assert main(command) == 1
        told = capsys.readouterr().out
        assert re.search(
            "^FAILED .*refuse a task's pod .*violates PodSecurity.*default-pod-template-name",
            told,
            re.M,
        )
        assert "a worker's pod" not in told
        assert main([*command, "--pod-template", "flyte-ddp"]) == 0, capsys.readouterr().out
        # as Flyte's chart has it
        setting = "plugins: {k8s: {default-pod-template-name: flyte-ddp}}"
        namespace.kubectl(
            "create", "configmap", "flyte", f"--from-literal=100-inline-config.yaml={setting}"
        )
        assert main(command) == 0, capsys.readouterr().out
    finally:
        namespace.kubectl("delete", "configmap", "flyte", "--ignore-not-found")
