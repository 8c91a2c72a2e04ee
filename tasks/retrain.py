"""The tasks before and after the training of a challenger. They are not cached, because the
champion that they read changes.
"""

from __future__ import annotations

import dataclasses
import datetime

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import PythonPickledFile

from flyte_ddp import flyte
from flyte_ddp.config import TrainingConfig

EVALUATION = dataclasses.replace(
    flyte.SETTINGS.training, timeout_hours=flyte.SETTINGS.small.timeout_hours
)


@task(**flyte.pod(flyte.SETTINGS.small), retries=2)
def plan_retraining(
    kickoff_time: datetime.datetime,
    champion: str,
    recipe: str,
    config: flyte.OptionalOverrides,
    source: flyte.OptionalSource,
    cluster: flyte.OptionalCluster,
    train_on: str,
    start_from: str,
    margin: float,
    min_samples: int,
    min_share: float,
    output: str = "",
) -> flyte.RetrainingPlan:
    """Decide, before a GPU is requested, what to train, and from which weights."""
    return flyte.plan_retraining(
        kickoff_time=kickoff_time,
        champion=champion,
        recipe=recipe,
        config=config,
        source=source,
        cluster=cluster,
        train_on=train_on,
        start_from=start_from,
        margin=margin,
        min_samples=min_samples,
        min_share=min_share,
        output=output,
    )


# A single process measures, so this task needs one GPU, however many GPUs train.
@task(
    **flyte.pod(EVALUATION, gpus=min(1, flyte.SETTINGS.gpus), deck=True),
    retries=3,
    interruptible=True,
)
def judge_challenger(
    retraining: flyte.Retraining,
    config: TrainingConfig,
    data: flyte.PreparedData,
    challenger: PythonPickledFile,
    export: FlyteDirectory,
    output: str = "",
) -> flyte.RetrainingOutputs:
    """Measure challenger and champion on the same held-out data, and promote the better one."""
    return flyte.judge_challenger(
        retraining=retraining,
        config=config,
        data=data,
        challenger=challenger,
        export=export,
        output=output,
    )


@task(**flyte.pod(flyte.SETTINGS.small, deck=True), retries=2)
def keep_champion(retraining: flyte.Retraining, output: str = "") -> flyte.RetrainingOutputs:
    """Report why nothing was trained."""
    return flyte.keep_champion(retraining=retraining, output=output)
