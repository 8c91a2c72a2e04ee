"""The doctor as a test of a run: where it says ok a run starts, where it fails none does, and its
remedies mend it.
"""

import json
import re
import shlex
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from flyte_ddp.__main__ import main
from flyte_ddp.cluster.config import cluster_config
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import ClusterError, ConfigError
from tests.outside.kubernetes.conftest import (
    ROOT,
    Namespace,
    eventually,
    kubectl,
    manifest,
    small_cluster,
)

OPERATOR = "kubectl --namespace dask-operator"
START = f"{OPERATOR} scale deployment dask-operator --replicas=1"
OWN = "kubectl --namespace $NAMESPACE"
POLICY = "admission-policy.yaml"


def limit_range(**bounds: dict[str, str]) -> str:
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "bounds"}}
    text = json.dumps({**body, "spec": {"limits": [{"type": "Container", **bounds}]}})
    return f"echo {shlex.quote(text)} | {OWN} create -f -"


@dataclass
class Situation:
    """Something that keeps runs from starting."""

    finding: str  # pattern in a line of the doctor's that begins with FAILED
    # shell command; "": the configuration is at fault, and the one without `config` is right
    break_: str = ""
    mend: str = ""  # shell command
    config: dict[str, Any] = field(default_factory=dict)
    reason: str = "PreflightError"  # pattern in the error of a run


SITUATIONS = {
    "an operator that is scaled to 0": Situation(
        f"the Dask operator does not run: .* has no available pod of 0, .*: {START}$",
        f"{OPERATOR} scale deployment dask-operator --replicas=0; {OPERATOR} wait --for=delete "
        "pod --all --timeout=60s",
        START,
        reason="operator did not react",
    ),
    "a limit range with a larger minimum": Situation(
        "refuse a worker's pod: .* minimum cpu usage per Container is 700m, but request is 600m",
        limit_range(min={"cpu": "700m"}),
        f"{OWN} delete limitrange bounds",
        reason="minimum cpu usage",
    ),
    "a policy without the image": Situation(
        "refuse the DaskCluster: .* an image that is not in the list",
        f"sed s/NAMESPACE/$NAMESPACE/g deploy/{POLICY} | kubectl apply -f -",
        f"echo {shlex.quote(manifest(POLICY, '$NAMESPACE'))} | kubectl apply -f -",
    ),
}


def shell(command: str, namespace: str) -> None:
    command = command.replace("$NAMESPACE", namespace)
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], check=True, cwd=ROOT)


def remedies(findings: str) -> list[str]:
    """Return the commands in which the findings end."""
    return re.findall(r"^(?:FAILED|warning) .*?: ((?:sed|kubectl) .*)$", findings, re.MULTILINE)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """doctor(values, status): what it prints of this cluster when it ends with this status."""

    def doctor(values: dict[str, Any], status: int) -> str:
        def ends() -> str:  # the API server needs a moment for a change
            ended = main(["doctor", "--cluster", json.dumps(values)])
            told = capsys.readouterr().out
            return told if ended == status else ""

        return str(eventually(ends, 60, f"a doctor that ends with {status}"))

    return doctor


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
    doctor: Callable[..., str],
) -> None:
    situation = SITUATIONS[name]
    right = small_cluster(namespace=namespace.name, num_nodes=1)
    wrong = small_cluster(namespace=namespace.name, num_nodes=1, **situation.config)
    shell(situation.break_, namespace.name)
    try:
        told = doctor(wrong, 1)
        assert re.search(f"^FAILED .*{situation.finding}", told, re.MULTILINE)
        assert re.search(situation.reason, starts(wrong, start_timeout=12))
        assert namespace.clusters() == []  # The list also works while the operator is away.
    finally:
        shell(situation.mend, namespace.name)
    shell(f"{OPERATOR} rollout status deployment/dask-operator --timeout=300s", namespace.name)
    assert f"could start in namespace {namespace.name}" in doctor(right, 0)
    if situation.mend == START:  # The test undoes its own command in the other situations.
        assert starts(right, start_timeout=120) == ""


def test_the_remedies_of_the_doctor_make_a_new_namespace_fit(
    operator: None, doctor: Callable[..., str]
) -> None:
    name = f"ddp-test-doctor-{uuid.uuid4().hex[:6]}"
    values = small_cluster(namespace=name)
    assert f"namespace {name} does not exist; create it with" in doctor(values, 1)
    kubectl("create", "namespace", name)
    try:
        commands = remedies(doctor(values, 1))
        assert len(commands) == 3, commands
        shell("; ".join(commands), name)
        assert not re.search("^(FAILED|warning)", doctor(values, 0), re.MULTILINE)
    finally:
        for kind in ("clusterrole", "clusterrolebinding"):
            kubectl("delete", kind, f"flyte-ddp-preflight-{name}", "--ignore-not-found")
        kubectl("delete", "namespace", name, "--wait=false")
