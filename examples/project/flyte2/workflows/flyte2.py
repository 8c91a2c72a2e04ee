"""The tasks of this project for Flyte 2: `flyte run workflows/flyte2.py train --recipe ...`.

They are declarations; what they call is flyte_ddp.
"""

from __future__ import annotations

from datetime import datetime

from flyte_ddp import flyte2

SETTINGS = flyte2.SETTINGS
training = flyte2.environment("training", SETTINGS.training, gpus=SETTINGS.gpus)
on_cluster = flyte2.environment("on-cluster", SETTINGS.driver)  # the GPUs are the cluster's
# `retrain` calls another task, so it runs without this package's plugin.
planning = flyte2.environment("planning", SETTINGS.small, depends_on=[training], plugin_config=None)


@training.task(retries=3, report=True, interruptible=True)
def train(
    recipe: str,
    config: dict | None = None,
    data: str = "",
    num_processes: int = 0,
    checkpoints: str = "",
) -> flyte2.TrainingOutputs:
    """Train a recipe with one process per GPU, or `num_processes` on a machine without."""
    return flyte2.train(recipe, config, data, num_processes, checkpoints=checkpoints)


@on_cluster.task(retries=3, report=True)
def train_on_cluster(
    recipe: str, cluster: dict, config: dict | None = None, data: str = "", checkpoints: str = ""
) -> flyte2.TrainingOutputs:
    """Train a recipe across the nodes of a Dask cluster that is started for it."""
    return flyte2.train(recipe, config, data, cluster=cluster, checkpoints=checkpoints)


@on_cluster.task(retries=3, report=True)
def sweep(
    recipe: str,
    grid: dict,
    cluster: dict | None = None,
    config: dict | None = None,
    data: str = "",
    num_models: int = 0,
    seed: int = 0,
    sampler: str = "random",
    stop_early: str = "none",
) -> flyte2.SweepOutputs:
    """Train one model, a trial, for each configuration, and compare them."""
    return flyte2.sweep(
        recipe, grid, config, data, num_models, seed, sampler, stop_early, cluster=cluster
    )


@training.task(retries=3, interruptible=True)
def predict(
    recipe: str, model_state: str, data: str = "", output: str = "", num_processes: int = 0
) -> flyte2.PredictionOutputs:
    """Predict each sample of the data once, in its order, into Parquet files."""
    return flyte2.predict(recipe, model_state, data, output, num_processes=num_processes)


@training.task(retries=3, report=True, interruptible=True)
def challenge(retraining: flyte2.Retraining, num_processes: int = 0) -> flyte2.RetrainingOutputs:
    """Train a challenger, and promote it if it is better than the champion."""
    return flyte2.challenge(retraining, num_processes)


# Deployed, the schedule sleeps until `flyte update trigger retrain planning.retrain --activate`.
@planning.task(retries=2, report=True, triggers=flyte2.schedule())
def retrain(
    kickoff_time: datetime | None = None,
    champion: str = "",
    recipe: str = "digits",
    config: dict = {},  # noqa: B006 - the SDK puts no value of a schedule into `dict | None`
    data: str = "",
    start_from: str = "champion",
    margin: float = 0.01,
    num_processes: int = 0,
) -> flyte2.RetrainingOutputs:
    """Train a challenger on the newest data, and make it the champion if it is better."""
    retraining = flyte2.plan_retraining(
        kickoff_time, champion, recipe, config, data, start_from=start_from, margin=margin
    )
    if retraining.outcome:
        return flyte2.keep_champion(retraining)
    return challenge(retraining, num_processes)
