"""Kueue on the test cluster, built from its Go module, with the integrations `pod` and `deployment`
and certificates of its own making.

The program stays in $KUBE_CACHE. FLYTE_DDP_TEST_BUILDER names a command that takes the arguments of
`docker build` and gives the image to the cluster's nodes.
"""

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.outside.kubernetes.conftest import eventually, kubectl

VERSION = "0.17.0"
MODULE = f"sigs.k8s.io/kueue@v{VERSION}"
IMAGE = f"flyte-ddp-kueue:{VERSION}"
CACHE = Path(os.environ.get("KUBE_CACHE", "/var/cache/kube")) / "kueue" / VERSION
BUILDER = os.environ.get("FLYTE_DDP_TEST_BUILDER", "")
NAMESPACE = ("--namespace", "kueue-system")
LABEL = "--selector=app.kubernetes.io/name=kueue"
MANAGER = ("deployment", "kueue-controller-manager")

# The base is an image that the test cluster's builder has.
DOCKERFILE = """
FROM debian:bookworm-slim
COPY manager /manager
USER 65532
"""
# The image comes from no registry, and the nodes are small.
CONTAINER = {
    "image": IMAGE,
    "imagePullPolicy": "IfNotPresent",
    "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
}
PATCH = [
    {"op": "replace", "path": f"/spec/template/spec/containers/0/{name}", "value": value}
    for name, value in CONTAINER.items()
]
KUSTOMIZATION = {
    "resources": ["config/default"],
    "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(PATCH)}],
}


def install_kueue() -> bool:
    """Install Kueue where it is missing, and return whether it was. Skip the test without Go, the
    module or a builder.
    """
    if kubectl(*NAMESPACE, "get", *MANAGER, "--output=name", "--ignore-not-found"):
        return False
    if not BUILDER:
        pytest.skip("FLYTE_DDP_TEST_BUILDER names no command that builds images")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        module = _find_module()
        shutil.copy(_build_manager(directory), directory / "manager")
        (directory / "Dockerfile").write_text(DOCKERFILE)
        subprocess.run([*shlex.split(BUILDER), "-t", IMAGE, name], check=True)
        shutil.copytree(module / "config", directory / "config")
        (directory / "kustomization.yaml").write_text(json.dumps(KUSTOMIZATION))
        # Client-side applying would exceed the limit of annotations.
        kubectl("apply", "--server-side", "--force-conflicts", "--kustomize", name)
    # Its API of pending workloads is not used. While it is away, no namespace can be deleted.
    kubectl("delete", "apiservices", LABEL)
    kubectl(*NAMESPACE, "wait", "--for=condition=Available", *MANAGER, "--timeout=180s")
    flavor = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ResourceFlavor",
        "metadata": {"name": "any"},
    }
    probe = ("create", "--dry-run=server", "--filename=-", "--output=name")
    eventually(
        lambda: kubectl(*probe, stdin=json.dumps(flavor), check=False), 60, "Kueue's webhooks"
    )
    return True


def switch_off_kueue() -> None:
    """Delete the parts of Kueue without which no pod could be made while its node is away."""
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations,deployments"
    kubectl(*NAMESPACE, "delete", kinds, LABEL)


def _find_module() -> Path:
    """Return the directory of Kueue's module."""
    if not shutil.which("go"):
        pytest.skip("Go is not installed, with which Kueue is built")
    command = ["go", "mod", "download", "-json", MODULE]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no module proxy serves {MODULE}: {done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])


def _build_manager(directory: Path) -> Path:
    """Return Kueue's program, which is built once (some five minutes on two cores)."""
    manager = CACHE / "kueue"
    if not manager.exists():
        source = directory / "source"
        source.mkdir()
        (source / "go.mod").write_text("module kueue\n\ngo 1.24\n")
        package = MODULE.replace("@", "/cmd/kueue@")
        environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod"}
        for command in (
            ["go", "get", package],
            ["go", "build", "-trimpath", "-o", str(directory / "built"), package.split("@")[0]],
        ):
            subprocess.run(command, cwd=source, env=environment, check=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.move(directory / "built", manager)
    return manager
