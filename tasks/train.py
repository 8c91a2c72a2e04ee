"""The tasks that train: the launchers with Flyte's context around them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import flytekit
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from flyte_ddp.errors import ConfigError, RankFailure, TrainingStopped
from flyte_ddp.launch import spawn
from flyte_ddp.rank.job import Job
from flyte_ddp.recipes import config_of
from flyte_ddp.storage import Storage
from tasks.flyte_context import Execution, current_execution, share_storage_credentials, wandb_link
from tasks.inputs import ClusterInput, InputError, TrainingOverrides, given
from tasks.outputs import TrainingOutputs
from tasks.prepare import PreparedData
from tasks.resources import (
    DRIVER_TASK,
    SECRETS,
    TRAINING_CACHE,
    TRAINING_TASK,
)
from tasks.watchers import Watchers

# What an attempt can die of that the next one may not: a killed or stuck rank, or storage that was out of reach.
RECOVERABLE_KINDS = ("signal", "exit", "stall")
RECOVERABLE_CAUSES = ("CheckpointError:", "StoreUnreachable:")
# What only a rank can find out, and only the user can mend: one line says it, and no traceback helps.
USER_CAUSES = ("ConfigError:", "DataError:", "NonFiniteLoss:")

WATCHED = {
    "cache": TRAINING_CACHE,
    "secret_requests": SECRETS,
    "enable_deck": True,
    "deck_fields": (),  # the report alone: flytekit's own tabs repeat the source and the inputs
}


@task(**TRAINING_TASK, **WATCHED)
@wandb_link
def train_on_one_node(
    recipe: str,
    config: TrainingOverrides,
    data: PreparedData,
    num_processes: int = 0,
    checkpoints: str = "",
    model_artifact: str = "",
    initial_state: str = "",
) -> TrainingOutputs:
    """Train `recipe` with one DistributedDataParallel process per GPU, or `num_processes` on a machine without.

    `initial_state` is the URL of a state dict to start from; by default the weights are fresh.
    """
    with _run(recipe, config, checkpoints, model_artifact, initial_state) as (job, watchers, _):
        result = spawn.train(
            job,
            data=lambda: data.download() or data.path,
            num_processes=num_processes,
            listeners=watchers.listeners,
            relay=watchers.bar.write,
        )
    return watchers.outputs(result)


@task(**DRIVER_TASK, **WATCHED)
@wandb_link
def train_on_cluster(
    recipe: str,
    config: TrainingOverrides,
    data: PreparedData,
    cluster: ClusterInput,
    checkpoints: str = "",
    model_artifact: str = "",
    initial_state: str = "",
) -> TrainingOutputs:
    """Train `recipe` across the nodes of a Dask cluster that is started for it and taken down afterwards.

    This task is the driver: it asks for no GPU, and the ranks run in the cluster's worker pods. `initial_state` is the
    URL of a state dict to start from, which every rank reads; by default the weights are fresh.
    """
    from flyte_ddp.cluster.connect import open_cluster
    from flyte_ddp.errors import ClusterError, GangLost
    from flyte_ddp.launch.dask.launcher import train_on_dask

    with _run(recipe, config, checkpoints, model_artifact, initial_state) as (job, watchers, execution):
        name = execution.attempt_id or f"{recipe.rpartition('.')[2]}-{os.urandom(4).hex()}"
        try:
            with open_cluster(cluster, name) as client:
                result = train_on_dask(
                    job,
                    data=lambda: data.download() or data.path,
                    client=client,
                    config=cluster,
                    listeners=watchers.listeners,
                    relay=watchers.bar.write,
                    run_name=name,
                )
        except (ClusterError, GangLost) as error:
            raise FlyteRecoverableException(str(error)) from error
    return watchers.outputs(result)


@contextlib.contextmanager
def _run(
    recipe: str, config: TrainingOverrides, checkpoints: str, model_artifact: str, initial_state: str
) -> Iterator[tuple[Job, Watchers, Execution]]:
    """What both ways of training begin with, and how their errors reach Flyte."""
    launched_at = time.time()
    context = flytekit.current_context()
    share_storage_credentials()
    execution = current_execution(context)
    directory = Path(context.working_directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        resolved = config_of(recipe, given(config))
        job = Job(recipe, resolved, checkpoints or execution.checkpoints, launched_at, initial_state)
        Storage(job.checkpoints).check_access("checkpoints")  # the watchers are the first to write there
        watchers = Watchers(job, execution, directory, model_artifact)
        with flyte_errors(), watchers.saying_what_is_logged():
            yield job, watchers, execution
    except ConfigError as error:
        raise InputError(str(error)) from error


@contextlib.contextmanager
def flyte_errors() -> Iterator[None]:
    """Tell Flyte which failures are worth another attempt: one goes on from the last checkpoint."""
    try:
        yield
    except TrainingStopped as error:
        if str(error).startswith("SIGINT"):
            raise KeyboardInterrupt(str(error)) from error
        raise FlyteRecoverableException(str(error)) from error
    except RankFailure as error:
        if error.cause.startswith(USER_CAUSES):
            raise InputError(error.cause.partition(": ")[2]) from error
        if error.kind in RECOVERABLE_KINDS or error.cause.startswith(RECOVERABLE_CAUSES):
            raise FlyteRecoverableException(str(error)) from error
        raise
