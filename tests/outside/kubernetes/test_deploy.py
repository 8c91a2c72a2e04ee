"""`kubectl apply -k deploy` on a cluster: a second installation changes nothing, and an upgrade
changes what `kubectl diff -k deploy` has shown.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outside.kubernetes.conftest import IMAGE, POLICY_LISTS, ROOT, Namespace, kubectl

# Kinds of the Prometheus operator, by their plurals. No controller is needed for their objects.
MONITORING = {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"}
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition(plural: str, kind: str) -> dict[str, object]:
    """Return a CRD that accepts every object."""
    group = "monitoring.coreos.com"
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": ANYTHING},
    }
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [version]},
    }


@pytest.fixture
def monitoring() -> Iterator[None]:
    """The kinds of the Prometheus operator, in a cluster that may lack them."""
    missing = [
        definition(plural, kind)
        for plural, kind in MONITORING.items()
        if plural not in kubectl("api-resources", "--output=name")
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": missing})
    if missing:
        kubectl("apply", "-f", "-", stdin=text)
        kubectl("wait", "--for=condition=Established", "-f", "-", "--timeout=60s", stdin=text)
    yield
    if missing:
        kubectl("delete", "-f", "-", stdin=text)


def copy_manifests(directory: Path, namespace: str) -> Path:
    """Return a copy of deploy/ with the values of the tests' namespace."""
    copy = shutil.copytree(ROOT / "deploy", directory / "deploy")
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([copy / "operator/crds.sh"], check=True, env=environment)
    file = copy / "kustomization.yaml"
    text = file.read_text()
    values = (
        ("flytesnacks-development", namespace),
        ("registry.example.com/flyte-ddp:1", IMAGE),
        *POLICY_LISTS,
    )
    for old, new in values:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return copy


def diff(directory: Path) -> tuple[int, str]:
    """Return the exit status of `kubectl diff -k`, 1 if anything would change, and its output."""
    command = ["kubectl", "diff", "-k", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def test_a_second_installation_changes_nothing_and_an_upgrade_what_the_diff_shows(
    monitoring: None, namespace: Namespace, tmp_path: Path
) -> None:
    directory = copy_manifests(tmp_path, namespace.name)
    kubectl("apply", "-k", str(directory))
    assert diff(directory) == (0, "")
    again = kubectl("apply", "-k", str(directory)).splitlines()
    assert len(again) == 26
    assert [line for line in again if not line.endswith(" unchanged")] == []
    # A new version takes a right away, and adds an alert.
    rights = directory / "rbac.yaml"
    rights.write_text(rights.read_text().replace("verbs: [create, get, delete]", "verbs: [get]"))
    alerts = directory / "alerts.yaml"
    alerts.write_text(alerts.read_text().replace("> 1800", "> 900"))
    status, shown = diff(directory)
    assert status == 1
    changes = re.findall(r"^[-+] .*", shown, re.MULTILINE)
    removed = {line[1:].strip() for line in changes if line.startswith("-")}
    assert {"- create", "- delete"} <= removed
    assert any("> 900" in line for line in changes)
    upgraded = kubectl("apply", "-k", str(directory)).splitlines()
    changed = sorted(line for line in upgraded if not line.endswith(" unchanged"))
    assert changed == [
        "prometheusrule.monitoring.coreos.com/flyte-ddp configured",
        "role.rbac.authorization.k8s.io/flyte-ddp configured",
    ]
    # Back to the version before.
    kubectl("apply", "-k", str(copy_manifests(tmp_path / "before", namespace.name)))
    assert diff(tmp_path / "before/deploy") == (0, "")
