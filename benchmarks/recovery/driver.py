"""The process that holds our run, which no fault touches: `python -m benchmarks.recovery.driver
OPTIONS`.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.recovery.workload import COLLECTIVE_TIMEOUT, MAX_RESTARTS, RECIPE, LoggedCounting

# seconds that a system waits for a node before it goes on without it, or for one more to join
PATIENCE = 1.0


def run(
    address: str, data: Path, directory: Path, epochs: int, store: str, config: Mapping[str, Any]
) -> None:
    """Train on the Dask cluster at `address`; on this machine where that is ""."""
    from flyte_ddp.cluster.config import ClusterConfig
    from flyte_ddp.cluster.connect import open_cluster
    from flyte_ddp.config import resolve
    from flyte_ddp.launch.control import driver
    from flyte_ddp.launch.nodes.dask.place import DaskPlace
    from flyte_ddp.launch.nodes.local import LocalPlace
    from flyte_ddp.launch.protocol.programs import Job
    from flyte_ddp.launch.recipe_program import recipe_program

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
    resolved = resolve(
        LoggedCounting.defaults,
        {"epochs": epochs, "stall_timeout": COLLECTIVE_TIMEOUT, **config},
    )
    job = Job(recipe_program(RECIPE, resolved), store or str(directory), time.time())
    if not address:
        driver.run(job, LocalPlace(2, MAX_RESTARTS), lambda: str(data))
        return
    with open_cluster(cluster, "recovery") as client:
        driver.run(job, DaskPlace(client, cluster), lambda: str(data))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument(
        "--store", default="", help="URL of an object store's directory for the checkpoints"
    )
    parser.add_argument(
        "--config", type=json.loads, default={}, help="besides the benchmark's, as JSON"
    )
    run(**vars(parser.parse_args()))
