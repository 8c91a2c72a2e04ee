"""`kubectl apply -k deploy`: the objects that it installs, with the values of one namespace."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flyte_ddp.project.new import manifests

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGE = "host:5000/team/mine:7"

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not on the path")


def build(tmp_path, *edits):
    """Return the objects of a copy of deploy/ in which `edits`, pairs of texts, were made."""
    directory = shutil.copytree(DEPLOY, tmp_path / "deploy")
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([directory / "operator/crds.sh"], check=True, env=environment)
    file = directory / "kustomization.yaml"
    text = file.read_text()
    for old, new in (
        ("flytesnacks-development", "team-x-1"),
        ("registry.example.com/flyte-ddp:1", IMAGE),
        ("registry.example.com/flyte-ddp'", f"{IMAGE.rpartition(':')[0]}'"),
        *edits,
    ):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    done = subprocess.run(
        ["kubectl", "kustomize", directory], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(r"NAMESPACE|IMAGE\b", done.stdout)
    found = {}
    for each in yaml.safe_load_all(done.stdout):
        found[each["kind"], each["metadata"]["name"]] = each
    return found


@pytest.mark.long
def test_operator_rights_policies_alerts_and_dashboard_are_those_of_their_files(tmp_path):
    found = build(tmp_path)
    # The same objects as `flyte-ddp deploy` prints, from the same files.
    rights = list(yaml.safe_load_all(manifests("team-x-1", IMAGE)))
    for each in rights:
        assert found.pop((each["kind"], each["metadata"]["name"])) == each
    for each in yaml.safe_load_all((DEPLOY / "alerts.yaml").read_text()):
        each["metadata"]["namespace"] = "team-x-1"
        assert found.pop((each["kind"], each["metadata"]["name"])) == each
    dashboard = found.pop(("ConfigMap", "flyte-ddp-dashboard"))
    assert dashboard["metadata"]["namespace"] == "team-x-1"
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(dashboard["data"]["dashboard.json"]) == json.loads(
        (DEPLOY / "dashboard.json").read_text()
    )
    operator = found["Deployment", "dask-operator"]
    assert operator["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE
    kinds = sorted(kind for kind, _ in found)
    expected = ["ClusterRole", "ClusterRoleBinding", *["CustomResourceDefinition"] * 4]
    assert kinds == [*expected, "Deployment", "Namespace", "ServiceAccount"]
    # The annotation of `kubectl apply` has at most 256 KiB.
    assert max(len(json.dumps(each, separators=(",", ":"))) for each in found.values()) < 256 << 10


def test_namespace_quota_and_queue_can_be_added_and_the_operator_and_alerts_left_out(tmp_path):
    added = [(f"  # - {name}.yaml", f"  - {name}.yaml") for name in ("namespace", "queue")]
    left_out = [("  - operator #", "  #"), ("  - alerts.yaml #", "  #")]
    found = build(tmp_path, *added, *left_out)
    assert ("Namespace", "team-x-1") in found
    quota = found["ResourceQuota", "training"]
    assert quota["metadata"]["namespace"] == "team-x-1"
    queue = found["LocalQueue", "training"]
    assert queue["metadata"]["namespace"] == queue["spec"]["clusterQueue"] == "team-x-1"
    (group,) = found["ClusterQueue", "team-x-1"]["spec"]["resourceGroups"]
    assert [each["name"] for each in group["flavors"]] == ["team-x-1"]
    assert ("ResourceFlavor", "team-x-1") in found
    kinds = {kind for kind, _ in found}
    assert not kinds & {"PodMonitor", "PrometheusRule", "CustomResourceDefinition", "Deployment"}
