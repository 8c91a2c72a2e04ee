"""The tasks of a training: its data, and its model on one node or on a cluster."""

from __future__ import annotations

from flytekit import task

from flyte_ddp import flyte
from flyte_ddp.config import TrainingConfig


# This task is not cached, because the contents of a URL may have changed. The training task is
# cached by the contents of this task's output.
@task(**flyte.pod(flyte.SETTINGS.small), retries=2)
def prepare(
    recipe: str,
    config: flyte.OptionalOverrides = None,
    source: flyte.OptionalSource = None,
    cluster: flyte.OptionalCluster = None,
    trains_here: bool = False,
) -> flyte.Prepared:
    """Check and resolve the inputs, and prepare the data of `recipe`."""
    return flyte.prepare(
        recipe=recipe,
        config=config,
        source=source,
        cluster=cluster,
        trains_here=trains_here,
    )


@task(
    **flyte.pod(flyte.SETTINGS.training, gpus=flyte.SETTINGS.gpus, trains=True),
    retries=3,
    interruptible=True,  # A preempted attempt resumes from its checkpoint.
    cache=flyte.TRAINING_CACHE,
)
@flyte.wandb_link
def train_on_one_node(
    recipe: str,
    config: TrainingConfig,
    data: flyte.PreparedData,
    num_processes: int = 0,
    checkpoints: str = "",
    output: str = "",
    parent_champion: str = "",
) -> flyte.TrainingOutputs:
    """Train `recipe` with one process per GPU, or `num_processes` on a machine without GPUs."""
    return flyte.train_on_one_node(
        recipe=recipe,
        config=config,
        data=data,
        num_processes=num_processes,
        checkpoints=checkpoints,
        output=output,
        parent_champion=parent_champion,
    )


@task(
    **flyte.pod(flyte.SETTINGS.driver, trains=True),  # Only the cluster has GPUs.
    retries=3,
    interruptible=False,  # Losing the driver ends all ranks.
    cache=flyte.TRAINING_CACHE,
)
@flyte.wandb_link
def train_on_cluster(
    recipe: str,
    config: TrainingConfig,
    data: flyte.PreparedData,
    cluster: flyte.ClusterInput,
    checkpoints: str = "",
    output: str = "",
    parent_champion: str = "",
) -> flyte.TrainingOutputs:
    """Train `recipe` across the nodes of a new Dask cluster."""
    return flyte.train_on_cluster(
        recipe=recipe,
        config=config,
        data=data,
        cluster=cluster,
        checkpoints=checkpoints,
        output=output,
        parent_champion=parent_champion,
    )
