"""deploy/admission-policy.yaml, enforced by the API server: what it refuses, and what it admits."""

import json
import subprocess
from typing import Any

import pytest

from flyte_ddp.cluster.kubernetes.manifest import GROUP, VERSION
from tests.kubernetes.conftest import IMAGE, Namespace, eventually, kubectl
from tests.test_admission import REFUSED, run

POLICIES = ("flyte-ddp", "flyte-ddp-operator", "flyte-ddp-secrets")


def refusal(namespace: Namespace, manifest: dict[str, Any]) -> str:
    """Return the API server's message about a manifest that the tasks' service account creates; ""
    if it admits it.
    """
    # The tests' own image is the one that their policy allows.
    text = json.dumps(manifest).replace("registry.example.com/flyte-ddp", IMAGE.rpartition(":")[0])
    account = f"system:serviceaccount:{namespace.name}:flyte-ddp"
    command = (
        "kubectl",
        "--namespace",
        namespace.name,
        "create",
        "--dry-run=server",
        "--as",
        account,
        "-f",
        "-",
    )
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False).stderr


def test_the_api_server_refuses_what_is_in_no_list_and_admits_the_rest(
    namespace: Namespace,
) -> None:
    eventually(
        lambda: "an image" in refusal(namespace, run(image="evil:1")), 60, "an enforced policy"
    )
    for manifest, message in REFUSED:
        told = refusal(namespace, manifest)
        assert "denied request" in told, f"{message}: {told}"
        assert message in told, told
    assert refusal(namespace, run()) == ""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "stolen"}}
    annotations = {"kubernetes.io/service-account.name": "default"}
    token = {**secret, "type": "kubernetes.io/service-account-token"}
    token["metadata"] = {"name": "stolen", "annotations": annotations}
    assert "a service account's token" in refusal(namespace, token)
    assert refusal(namespace, secret) == ""
    # An administrator is bound as well: only the operator makes worker groups.
    group = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DaskWorkerGroup",
        "metadata": {"name": "own"},
    }
    group["spec"] = {"cluster": "x", "worker": {"replicas": 1, "spec": {"containers": []}}}  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="only the operator"):
        namespace.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(group))


def test_the_api_server_finds_no_mistake_in_the_policies_types(namespace: Namespace) -> None:
    for name in POLICIES:
        checked = (
            "get",
            "validatingadmissionpolicy",
            f"{name}-{namespace.name}",
            "--output",
            "json",
        )
        status = eventually(
            lambda checked=checked: json.loads(kubectl(*checked)).get("status"),
            60,
            "a checked policy",
        )
        assert status["typeChecking"].get("expressionWarnings", []) == []
