"""The tasks that train one model. `flyte_ddp.flyte` has the functions that they call."""

from __future__ import annotations

from flytekit import task

from flyte_ddp import flyte
from flyte_ddp.config import TrainingConfig


@task(
    **flyte.pod(flyte.SETTINGS.training, gpus=flyte.SETTINGS.gpus, trains=True),
    retries=3,
    interruptible=True,  # a preempted attempt resumes from its checkpoint
    cache=flyte.TRAINING_CACHE,
)
@flyte.wandb_link
def train_on_one_node(
    recipe: str,
    config: TrainingConfig,
    data: flyte.PreparedData,
    num_processes: int = 0,
    checkpoints: str = "",
    model_artifact: str = "",
    initial_model_state: str = "",
    output: str = "",
    parent_champion: str = "",
) -> flyte.TrainingOutputs:
    """Train `recipe` with one process per GPU, or `num_processes` on a machine without."""
    return flyte.train_on_one_node(
        recipe=recipe,
        config=config,
        data=data,
        num_processes=num_processes,
        checkpoints=checkpoints,
        model_artifact=model_artifact,
        initial_model_state=initial_model_state,
        output=output,
        parent_champion=parent_champion,
    )


@task(
    **flyte.pod(flyte.SETTINGS.driver, trains=True),  # the GPUs are the cluster's
    retries=3,
    interruptible=False,  # its loss ends the whole gang
    cache=flyte.TRAINING_CACHE,
)
@flyte.wandb_link
def train_on_cluster(
    recipe: str,
    config: TrainingConfig,
    data: flyte.PreparedData,
    cluster: flyte.ClusterInput,
    checkpoints: str = "",
    model_artifact: str = "",
    initial_model_state: str = "",
    output: str = "",
    parent_champion: str = "",
) -> flyte.TrainingOutputs:
    """Train `recipe` across the nodes of a Dask cluster that is started for it."""
    return flyte.train_on_cluster(
        recipe=recipe,
        config=config,
        data=data,
        cluster=cluster,
        checkpoints=checkpoints,
        model_artifact=model_artifact,
        initial_model_state=initial_model_state,
        output=output,
        parent_champion=parent_champion,
    )
