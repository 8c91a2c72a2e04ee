"""The tasks that predict new data: on one machine, or on a cluster."""

from __future__ import annotations

from flytekit import task

from flyte_ddp import flyte


@task(
    **flyte.pod(flyte.SETTINGS.training, gpus=flyte.SETTINGS.gpus),
    retries=3,
    interruptible=True,  # The next attempt makes the missing files.
)
def predict_on_one_node(
    recipe: str,
    model_state: str,
    data: flyte.OptionalSource = None,
    output: str = "",
    config: flyte.OptionalOverrides = None,
    batch_size: int = 256,
    part_size: int = 16384,
    num_processes: int = 0,
) -> flyte.PredictionOutputs:
    """Predict `data` with one process per GPU, or `num_processes` on a machine without GPUs."""
    return flyte.predict(
        recipe=recipe,
        model_state=model_state,
        data=data,
        output=output,
        config=config,
        batch_size=batch_size,
        part_size=part_size,
        num_processes=num_processes,
    )


@task(**flyte.pod(flyte.SETTINGS.driver), retries=3)  # Only the cluster's pods have GPUs.
def predict_on_cluster(
    recipe: str,
    model_state: str,
    cluster: flyte.ClusterInput,
    data: flyte.OptionalSource = None,
    output: str = "",
    config: flyte.OptionalOverrides = None,
    batch_size: int = 256,
    part_size: int = 16384,
) -> flyte.PredictionOutputs:
    """Predict `data` on the nodes of a new Dask cluster."""
    return flyte.predict(
        recipe=recipe,
        model_state=model_state,
        cluster=cluster,
        data=data,
        output=output,
        config=config,
        batch_size=batch_size,
        part_size=part_size,
    )
