"""Faults that only Kubernetes has: what the run names and does. `make drills` runs it.

test_training.py drains a scheduler. The kinds of benchmarks/causes need no Kubernetes.
"""

from __future__ import annotations

import uuid

import pytest

from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import ClusterError
from tests.outside.kubernetes.conftest import MISSING_IMAGE, Namespace

MISSING = f"{MISSING_IMAGE}:missing"


def test_a_missing_image_is_named_and_ends_the_start(namespace: Namespace) -> None:
    config = namespace.config(image=MISSING, image_pull_policy="Always", start_timeout=40)
    name = f"missing-{uuid.uuid4().hex[:8]}"
    with pytest.raises(ClusterError, match="ImagePull") as caught, open_cluster(config, name):
        raise AssertionError("the cluster came up")
    print(f"missing image: {caught.value}")
    assert MISSING in str(caught.value)
    assert namespace.clusters() == []
