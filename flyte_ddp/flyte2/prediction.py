"""Predict new data in a task of Flyte 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flyte.io import Dir

from flyte_ddp.cluster.admission import list_places
from flyte_ddp.flyte.settings import SETTINGS
from flyte_ddp.flyte2.frame import check_cluster, is_local, limited, open_frame
from flyte_ddp.launch.agent.devices import check_requested_gpus
from flyte_ddp.observers.streams import print_line
from flyte_ddp.prediction import predict as predictions
from flyte_ddp.storage import check_places, redact_url


class PredictionOutputs(NamedTuple):
    num_rows: int  # in all of the files
    predictions: Dir  # Parquet files, in the order of the samples, and their manifest


@limited
def predict(
    recipe: str,
    model_state: str,
    data: str = "",
    output: str = "",
    config: Mapping[str, Any] | None = None,
    batch_size: int = predictions.BATCH_SIZE,
    part_size: int = predictions.PART_SIZE,
    num_processes: int = 0,
    cluster: Mapping[str, Any] | None = None,
) -> PredictionOutputs:
    """Predict `data` with a trained model, on this task's machine or on the nodes of `cluster`.

    An attempt after another one goes on where that ended. `output` is by default a place of the
    action's own.
    """
    check_requested_gpus()
    nodes = check_cluster(cluster)
    if not is_local():
        # The options that `config` leaves out are those of the model's training.
        places = [("model_state", model_state), ("data", data), ("output", output)]
        check_places([*places, *list_places(config, "config")], SETTINGS.allowed.urls)
    with open_frame(None) as frame:
        url = output or f"{frame.outputs}/predictions"
        made = predictions.predict(
            recipe,
            model_state,
            data,
            url,
            batch_size=batch_size,
            part_size=part_size,
            config=config,
            nnodes=nodes.num_nodes if nodes else 1,
            nproc_per_node=num_processes or "auto",
            cluster=nodes,
            name=frame.pod_id,
        )
    print_line(f"{made.num_rows:,} predictions in {redact_url(url)}")
    return PredictionOutputs(made.num_rows, Dir.from_existing_remote(url))
