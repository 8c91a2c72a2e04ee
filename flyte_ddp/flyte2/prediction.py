"""Predict new data in a task of Flyte 2."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from flyte.io import Dir

from flyte_ddp.flyte2.task import check_cluster, check_thread, current_execution, limited
from flyte_ddp.prediction.predict import BATCH_SIZE, PART_SIZE
from flyte_ddp.project.admission import list_places
from flyte_ddp.storage import check_places, storage_environment
from flyte_ddp.task_run import prediction


class PredictionOutputs(NamedTuple):
    """The outputs of a prediction.

    Example:
        num_rows, predictions = flyte.run(predict, model_state=url, data="").outputs()
        directory = predictions.download_sync()
        print(num_rows, "rows in", directory)
    """

    num_rows: int  # rows in all files
    predictions: Dir  # Parquet files, in the order of the samples, and their manifest


@limited
def predict(
    recipe: str,
    model_state: str,
    data: str = "",
    output: str = "",
    config: Mapping[str, Any] | None = None,
    batch_size: int = BATCH_SIZE,
    part_size: int = PART_SIZE,
    num_processes: int = 0,
    cluster: Mapping[str, Any] | None = None,
) -> PredictionOutputs:
    """Predict `data` with a trained model, on this task's machine or on the nodes of `cluster`.

    Each attempt continues the previous one. `output` is by default a place of the action's own.

    Example:
        @env.task(retries=3)
        def predict(model_state: str, data: str) -> flyte2.PredictionOutputs:
            return flyte2.predict("digits", model_state, data, num_processes=2)
    """
    execution, nodes = current_execution(), check_cluster(cluster)
    # Options that are not in `config` come from the model's training.
    places = [("model_state", model_state), ("data", data), ("output", output)]
    check_places([*places, *list_places(config, "config")])
    if not execution.is_local:
        check_thread()
    os.environ.update(storage_environment())
    made, url = prediction.predict(
        execution,
        nodes,
        num_processes,
        output,
        recipe=recipe,
        model_state=model_state,
        data=data,
        config=config,
        batch_size=batch_size,
        part_size=part_size,
    )
    return PredictionOutputs(made.num_rows, Dir.from_existing_remote(url))
