"""The processes that hold a run, which no fault touches: `python -m benchmarks.recovery.drivers
ours|ray OPTIONS`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.recovery import script
from benchmarks.recovery.workload import COLLECTIVE_TIMEOUT, MAX_RESTARTS, RECIPE, LoggedCounting

# seconds that a system waits for a node before it goes on without it, or for one more to join
PATIENCE = 1.0
PLACEMENT_TIMEOUT = 5.0  # seconds for Ray to find places for the workers, before it tries fewer


def run_ours(
    address: str, data: Path, directory: Path, epochs: int, store: str, overrides: Mapping[str, Any]
) -> None:
    """Train on the Dask cluster at `address`; on this machine where that is ""."""
    from flyte_ddp.cluster.config import ClusterConfig
    from flyte_ddp.cluster.connect import open_cluster
    from flyte_ddp.config import resolve
    from flyte_ddp.launch.control import driver
    from flyte_ddp.launch.nodes.dask.place import DaskPlace
    from flyte_ddp.launch.nodes.local import LocalPlace
    from flyte_ddp.launch.protocol.programs import Job, recipe_program

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    cluster = ClusterConfig(
        kind="existing",
        scheduler_address=address,
        min_nodes=1,
        max_restarts=MAX_RESTARTS,
        return_timeout=PATIENCE,
        grow_delay=PATIENCE,
        grow_interval=0.0,
    )
    config = resolve(
        LoggedCounting.defaults,
        {"epochs": epochs, "stall_timeout": COLLECTIVE_TIMEOUT, **overrides},
    )
    job = Job(recipe_program(RECIPE, config), store or str(directory), time.time())
    if not address:
        driver.run(job, LocalPlace(2, MAX_RESTARTS), lambda: str(data))
        return
    with open_cluster(cluster, "recovery") as client:
        driver.run(job, DaskPlace(client, cluster), lambda: str(data))


def run_ray(address: str, data: Path, directory: Path, epochs: int, store: str) -> None:
    """Train on the Ray cluster at `address`."""
    import pyarrow.fs
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    place: dict[str, Any] = {"storage_path": str(directory)}
    if store:
        endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        s3 = pyarrow.fs.S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-east-1")
        place = {"storage_path": store.removeprefix("s3://"), "storage_filesystem": s3}
    # Ray asks for the lost node as well at first, and waits 60 s for it by default.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(PLACEMENT_TIMEOUT)
    ray.init(address, log_to_driver=True)
    while ray.cluster_resources().get("CPU", 0) < 2:  # one of each node
        time.sleep(0.1)
    TorchTrainer(
        script.run_with_ray,
        train_loop_config={"data": str(data), "directory": str(directory), "epochs": epochs},
        torch_config=TorchConfig(backend="gloo", timeout_s=int(COLLECTIVE_TIMEOUT)),
        scaling_config=ScalingConfig(
            num_workers=(1, 2), elastic_resize_monitor_interval_s=PATIENCE
        ),
        run_config=RunConfig(
            name="run",
            failure_config=FailureConfig(max_failures=MAX_RESTARTS),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            **place,
        ),
    ).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("ours", "ray"))
    parser.add_argument("--address", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument(
        "--store", default="", help="URL of an object store's directory for the checkpoints"
    )
    parser.add_argument(
        "--config", type=json.loads, default={}, help="of ours, besides the benchmark's, as JSON"
    )
    options = vars(parser.parse_args())
    overrides = options.pop("config")
    if options.pop("system") == "ours":
        run_ours(**options, overrides=overrides)
    else:
        run_ray(**options)
