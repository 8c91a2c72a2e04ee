"""Shards in an S3 server, read on a real Kubernetes while a worker's pod is deleted and comes
back.
"""

from __future__ import annotations

import json
import re

from tests.outside.kubernetes.conftest import SCRIPT, Namespace, eventually, small_cluster
from tests.outside.kubernetes.store import Store

NUM_SHARDS, PER_SHARD, EPOCHS = 20, 12, 3
PROGRAM = """
import json, time
import torch
import torch.distributed as dist
import flyte_ddp
from flyte_ddp import session
from flyte_ddp.data import Shards, readers

def count():
    readers.PART_BYTES = 64  # bytes, so that a shard is fetched in several parts
    dist.init_process_group("gloo")
    data = Shards("s3://runs/shards", transform=lambda fields: fields["number"])
    state = session.load() or {"seen": torch.zeros(len(data)), "step": 0, "sizes": []}
    step, sizes = state["step"], [*state["sizes"], dist.get_world_size()]
    for epoch in session.epochs(EPOCHS):
        for numbers, weight in session.batches(data, 12, epoch, num_workers=1):
            seen = torch.zeros(len(data))
            if weight:  # else it is another rank's
                seen.index_add_(0, numbers, torch.ones(len(numbers)))
            dist.all_reduce(seen)
            step += 1
            state = {"seen": state["seen"] + seen, "step": step, "sizes": sizes}
            session.save(state, step)
            session.report(step=step)
            time.sleep(0.5 if sizes[-1] == 2 else 4)  # until a worker is back
    return json.dumps({"wrong": int((state["seen"] != EPOCHS).sum()), "sizes": sizes})

Shards("s3://runs/shards").prepare()
cluster = json.loads('CLUSTER')
print(flyte_ddp.run(count, nnodes="1:2", max_restarts=5, cluster=cluster,
                    checkpoints="s3://runs/counted", progress=False), flush=True)
"""


def test_a_deleted_worker_pod_loses_and_doubles_no_sample_of_shards(
    namespace: Namespace, store: Store
) -> None:
    for shard in range(NUM_SHARDS):
        lines = [json.dumps({"number": shard * PER_SHARD + each}) for each in range(PER_SHARD)]
        store.files.pipe_file(f"runs/shards/{shard:03d}.jsonl", "\n".join(lines).encode())
    program = PROGRAM.replace("EPOCHS", str(EPOCHS))
    cluster = small_cluster(image="", return_timeout=1.0, grow_delay=1.0, grow_interval=0.0)
    program = program.replace("CLUSTER", json.dumps(cluster))
    namespace.start_driver("streams", SCRIPT, program)
    eventually(lambda: store.files.glob("runs/counted/step-*.json"), 600, "a checkpoint")
    (name,) = namespace.clusters()
    pod = namespace.pods(name, "worker")[0]["metadata"]["name"]
    namespace.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
    assert namespace.wait_for_end("streams", timeout=600) == 0, namespace.log("streams")
    (line,) = re.findall(r'^{"wrong.*', namespace.log("streams"), re.M)
    found = json.loads(line)
    assert found["wrong"] == 0
    assert found["sizes"][0] == found["sizes"][-1] == 2
    assert len(found["sizes"]) > 1
