"""The tasks of the studies: check all trials at once, and train them on one cluster."""

from __future__ import annotations

from flytekit import task

from flyte_ddp import flyte


@task(**flyte.pod(flyte.SETTINGS.small))
def check_sweep(
    recipe: str,
    config: flyte.OptionalOverrides,
    grid: flyte.Grid,
    num_models: int,
    seed: int,
    sampler: str,
    stop_early: str,
    cluster: flyte.OptionalCluster,
) -> flyte.CheckedStudy:
    """Check every trial of the sweep before any data is prepared or started."""
    return flyte.check_sweep(
        recipe=recipe,
        config=config,
        grid=grid,
        num_models=num_models,
        seed=seed,
        sampler=sampler,
        stop_early=stop_early,
        cluster=cluster,
    )


@task(**flyte.pod(flyte.SETTINGS.small))
def check_scaling(
    recipe: str,
    config: flyte.OptionalOverrides,
    world_sizes: list[int],
    learning_rates: list[float],
    batch_sizes_per_rank: list[int],
    sample_sizes: list[int],
    target_loss: float,
    repeats: int,
    cluster: flyte.OptionalCluster,
) -> flyte.CheckedStudy:
    """Check every trial of the study before any data is prepared or started."""
    return flyte.check_scaling(
        recipe=recipe,
        config=config,
        world_sizes=world_sizes,
        learning_rates=learning_rates,
        batch_sizes_per_rank=batch_sizes_per_rank,
        sample_sizes=sample_sizes,
        target_loss=target_loss,
        repeats=repeats,
        cluster=cluster,
    )


@task(
    **flyte.pod(flyte.SETTINGS.driver, trains=True),  # Only the cluster has GPUs.
    retries=3,
    interruptible=False,  # Losing the driver ends all ranks.
    cache=flyte.TRAINING_CACHE,
)
def train_sweep(
    recipe: str,
    config: flyte.TrainingOverrides,
    trials: list[dict],
    data: flyte.PreparedData,
    cluster: flyte.ClusterInput,
    stop_early: str = "none",
    checkpoints: str = "",
    output: str = "",
    grid: flyte.Grid = None,
    seed: int = 0,
    sampler: str = "random",
) -> flyte.SweepOutputs:
    """Train one model, a trial, for each configuration, and compare them."""
    return flyte.train_sweep(
        recipe=recipe,
        config=config,
        trials=trials,
        data=data,
        cluster=cluster,
        stop_early=stop_early,
        checkpoints=checkpoints,
        output=output,
        grid=grid,
        seed=seed,
        sampler=sampler,
    )


# This task is not cached: the measurements hold only for the machines and the network of that day.
@task(
    **flyte.pod(flyte.SETTINGS.driver, trains=True),  # Only the cluster has GPUs.
    retries=3,
    interruptible=False,  # Losing the driver ends all ranks.
)
def train_at_world_sizes(
    recipe: str,
    config: flyte.TrainingOverrides,
    trials: list[dict],
    data: flyte.PreparedData,
    cluster: flyte.ClusterInput,
    target_loss: float = 0.0,
    checkpoints: str = "",
    output: str = "",
) -> flyte.ScalingOutputs:
    """Train a trial at every world size with every combination of the other choices."""
    return flyte.train_at_world_sizes(
        recipe=recipe,
        config=config,
        trials=trials,
        data=data,
        cluster=cluster,
        target_loss=target_loss,
        checkpoints=checkpoints,
        output=output,
    )
