"""The guide for a new cluster, deploy/README.md, followed in one shell by its own commands from the
first to the last.

A block that needs what is not here (a registry, Helm, a Flyte) is marked in the guide and left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doors.test_docs import blocks_of
from tests.outside.kubernetes.conftest import IMAGE, ROOT, kubectl, manifest
from tests.support.checkout import copy_repository

GUIDE = ROOT / "deploy/README.md"
KEY = "0123456789"
SMALL = (
    '"num_nodes": 2, "kubernetes": {"worker_cpus": 0.1, "worker_memory": "1Gi", "shared_memory": '
    '"128Mi", '
    '"scheduler_cpus": 0.1, "scheduler_memory": "512Mi", '
)
# Differences from a cluster of one's own: other tests use this one, and its nodes are small.
ADAPTED = (
    (r"=flytesnacks-development", "=GUIDE_NAMESPACE"),
    (re.escape('"num_nodes": 4, "kubernetes": {'), SMALL),
    (r" dask-operator/dask-operator; do", "; do"),
)


@pytest.fixture
def new_namespace(operator: None) -> Iterator[str]:
    name = f"ddp-guide-{uuid.uuid4().hex[:6]}"
    yield name
    kubectl(
        "delete", "-f", "-", "--ignore-not-found", stdin=manifest("admission-policy.yaml", name)
    )
    for kind in ("clusterrole", "clusterrolebinding"):
        kubectl("delete", kind, f"flyte-ddp-preflight-{name}", "--ignore-not-found")
    kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


def test_the_guide_leads_from_an_empty_namespace_to_a_checked_registration(
    new_namespace: str, tmp_path: Path
) -> None:
    script = ["set -euo pipefail"]
    for block in blocks_of(GUIDE):
        if block.language == "sh" and not block.needs:
            text = block.text
            for pattern, replacement in ADAPTED:
                text = re.sub(pattern, replacement.replace("GUIDE_NAMESPACE", new_namespace), text)
            script += [f"echo '=== {block}, after '$SECONDS s", text]
    copy_repository(tmp_path)
    (tmp_path / "storage.env").write_text("AWS_ENDPOINT_URL=http://store:9000\n")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{tmp_path}/bin:{ROOT / '.uv/bin'}:{Path(sys.executable).parent}"
            f":{os.environ['PATH']}",
            "IMAGE": IMAGE,
            "SANDBOX": "1",
            "VERSION": "v1",  # the copy is no git repository
        },
        input=KEY,
        capture_output=True,
        text=True,
    )
    shown = f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    print(shown)
    assert done.returncode == 0, shown
    assert f"could start in namespace {new_namespace}" in done.stdout, shown
    assert not re.search("^FAILED", done.stdout, re.MULTILINE), shown
    assert re.search(r"^Successfully registered \d\d entities$", done.stdout, re.MULTILINE), shown
