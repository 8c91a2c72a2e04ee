"""Predict new data in a task."""

from __future__ import annotations

from typing import NamedTuple

from flytekit.types.directory import FlyteDirectory

from flyte_ddp.flyte.flyte_context import current_execution
from flyte_ddp.flyte.inputs import (
    OptionalCluster,
    OptionalOverrides,
    OptionalSource,
    given,
    location,
)
from flyte_ddp.flyte.task import check_cluster, check_urls, task_body
from flyte_ddp.prediction.predict import BATCH_SIZE, PART_SIZE
from flyte_ddp.task_run import prediction


class PredictionOutputs(NamedTuple):
    predictions: FlyteDirectory  # Parquet files, in the order of the samples, and their manifest
    num_rows: int  # rows in all files


@task_body
def predict(
    recipe: str,
    model_state: str,
    data: OptionalSource = None,
    output: str = "",
    config: OptionalOverrides = None,
    batch_size: int = BATCH_SIZE,
    part_size: int = PART_SIZE,
    num_processes: int = 0,
    cluster: OptionalCluster = None,
) -> PredictionOutputs:
    """Predict `data` with a trained model: on this task's machine, or on the nodes of `cluster`.

    Each attempt continues the previous one. `output` is by default a place of the execution's own.

    Example:
        @task(**flyte.pod(flyte.SETTINGS.training, gpus=flyte.SETTINGS.gpus), retries=3)
        def predict(model_state: str, data: flyte.OptionalSource) -> flyte.PredictionOutputs:
            return flyte.predict(recipe="digits", model_state=model_state, data=data)
    """
    fields = given(config)
    check_cluster(cluster)
    check_urls(model_state=model_state, data=location(data), output=output)
    made, url = prediction.predict(
        current_execution(),
        cluster,
        num_processes,
        output,
        recipe=recipe,
        model_state=model_state,
        data=location(data),
        config=fields,
        batch_size=batch_size,
        part_size=part_size,
    )
    return PredictionOutputs(FlyteDirectory(url, remote_directory=False), made.num_rows)
