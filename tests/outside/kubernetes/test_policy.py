"""deploy/admission-policy.yaml, enforced by the API server: what it refuses, and what it admits.

That the garbage collector may take finalizers off is seen by every other test: its cluster goes.
"""

import json
import subprocess
from typing import Any

import pytest

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.manifest import GROUP, VERSION, cluster_spec
from tests.outside.kubernetes.conftest import IMAGE, Namespace, eventually

OWN = IMAGE.rpartition(":")[0]  # the image that the tests' policy allows


def run(name: str = "ddp-x-00000000", **fields: Any) -> dict[str, Any]:
    """The DaskCluster of a run with what the policy's lists allow, and `fields`."""
    allowed = {
        "image": f"{OWN}:7",
        "service_account": "flyte-ddp",
        "env_from_secrets": ["storage"],
        "pod_template": {"imagePullSecrets": [{"name": "registry"}]},
    }
    config = ClusterConfig(kind="kubernetes", kubernetes={**allowed, **fields})
    return cluster_spec(config, name)


def with_pod(**fields: Any) -> dict[str, Any]:
    """A run whose workers' pod specification was changed by hand."""
    manifest = run()
    manifest["spec"]["worker"]["spec"].update(fields)
    return manifest


def with_service(**fields: Any) -> dict[str, Any]:
    """A run whose scheduler's Service was changed by hand."""
    manifest = run()
    manifest["spec"]["scheduler"]["service"].update(fields)
    return manifest


INIT = {"name": "i", "image": f"{OWN}:7"}
TOKEN = {"name": "e", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api_key"}}}
REFUSED = [
    (run(image="evil:1"), "an image"),
    (run(image=f"{OWN}-evil:1"), "an image"),
    (with_pod(initContainers=[{**INIT, "image": "evil"}]), "an image"),
    (run(service_account="admin"), "a service account"),
    # the deprecated name of the same field
    (with_pod(serviceAccount="admin"), "a service account"),
    (with_pod(automountServiceAccountToken=True), "automountServiceAccountToken"),
    (run(env_from_secrets=["wandb"]), "a secret in the environment"),
    (with_pod(initContainers=[{**INIT, "env": [TOKEN]}]), "a secret in the environment"),
    (with_pod(imagePullSecrets=[{"name": "other"}]), "a secret in a volume"),
    (with_pod(volumes=[{"name": "v", "secret": {"secretName": "wandb"}}]), "a secret in a volume"),
    (run("wandb"), "a secret in a volume"),  # a cluster named after the secret that it mounts
    (with_pod(volumes=[{"name": "h", "hostPath": {"path": "/"}}]), "a volume"),
    (with_pod(volumes=[{"name": "v", "projected": {"sources": []}}]), "a volume"),
    (with_pod(hostNetwork=True), "a pod with the node's"),
    (with_service(type="LoadBalancer"), "a scheduler's Service"),
    (with_service(type="NodePort"), "a scheduler's Service"),
    (with_service(externalIPs=["192.0.2.1"]), "a scheduler's Service"),
    (
        with_pod(initContainers=[{**INIT, "securityContext": {"privileged": True}}]),
        "a pod with the node's",
    ),
]


def group(cluster: dict[str, Any]) -> dict[str, Any]:
    """The further workers of a cluster with a queue, as its run makes them."""
    meta = cluster["metadata"]
    worker = {"replicas": 1, "spec": cluster["spec"]["worker"]["spec"]}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DaskWorkerGroup",
        "metadata": {"name": f"{meta['name']}-further"},
        "spec": {"cluster": meta["name"], "worker": worker},
    }


def refusal(namespace: Namespace, manifest: dict[str, Any]) -> str:
    """Return the API server's message about a manifest that the tasks' service account creates; ""
    if it admits it.
    """
    account = f"system:serviceaccount:{namespace.name}:flyte-ddp"
    command = ("kubectl", "--namespace", namespace.name, "create", "--dry-run=server")
    return subprocess.run(
        [*command, "--as", account, "-f", "-"],
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        check=False,
    ).stderr


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
    for admitted in (run(), run(tls=False), run(image=f"{OWN}@sha256:0")):
        assert refusal(namespace, admitted) == ""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "stolen"}}
    annotations = {"kubernetes.io/service-account.name": "default"}
    token = {**secret, "type": "kubernetes.io/service-account-token"}
    token["metadata"] = {"name": "stolen", "annotations": annotations}
    assert "a service account's token" in refusal(namespace, token)
    assert refusal(namespace, secret) == ""
    assert refusal(namespace, group(run())) == ""
    assert "an image" in refusal(namespace, group(run(image="evil:1")))
    foreign = {**group(run()), "spec": {**group(run())["spec"], "cluster": "ddp-y-00000000"}}
    assert "a secret in a volume" in refusal(namespace, foreign)
    job = {"cluster": {"spec": run()["spec"]}, "job": {"spec": {"containers": []}}}
    kind = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "DaskJob", "metadata": {"name": "own"}}
    # An administrator is bound as well: only the operator makes DaskJobs.
    with pytest.raises(AssertionError, match="only the operator"):
        namespace.kubectl(
            "create", "--dry-run=server", "-f", "-", stdin=json.dumps({**kind, "spec": job})
        )
