"""Predictions on a real Kubernetes, driven by a pod, while a worker's pod is deleted."""

from __future__ import annotations

import json

import torch
from pyarrow import parquet

from flyte_ddp.recipes import get_recipe
from tests.outside.kubernetes.conftest import SCRIPT, Namespace, eventually, small_cluster
from tests.outside.kubernetes.store import Store

PROGRAM = """
import json, sys
import flyte_ddp
cluster = json.loads('CLUSTER')
made = flyte_ddp.predict(
    "tests.support.predicted.Slow", "s3://runs/scored-with/state.pt", "", "s3://runs/scored",
    batch_size=4, part_size=4, nnodes=2, cluster=cluster, progress=False,
)
print(json.dumps({"rows": made.num_rows}), flush=True)
"""


def test_a_deleted_worker_pod_costs_no_prediction(namespace: Namespace, store: Store) -> None:
    with store.files.open("runs/scored-with/state.pt", "wb") as file:
        torch.save(get_recipe("digits").model().state_dict(), file)
    program = PROGRAM.replace("CLUSTER", json.dumps(small_cluster(image="")))
    namespace.start_driver("scores", SCRIPT, program)
    eventually(lambda: store.files.exists("runs/scored/part-000003.parquet"), 600, "a fourth part")
    (name,) = namespace.clusters()
    pod = namespace.pods(name, "worker")[0]["metadata"]["name"]
    namespace.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
    assert namespace.wait_for_end("scores", timeout=600) == 0, namespace.log("scores")
    assert '{"rows": 360}' in namespace.log("scores")
    keys = []
    for file in sorted(store.files.glob("runs/scored/part-*.parquet")):
        with store.files.open(file, "rb") as opened:
            keys += parquet.read_table(opened)["key"].to_pylist()
    assert keys == list(range(360))
    assert namespace.clusters() == []
