"""Retrain a recipe and keep the better model, by hand or by schedule.

The tasks have the logic, and flyte_ddp/promotion/policy.py has the rules.

pyflyte run workflows/retrain.py retrain_wf --champion /tmp/champion
"""

from __future__ import annotations

from datetime import datetime

from flytekit import conditional, workflow

from flyte_ddp import flyte
from flyte_ddp.config import TrainingConfig
from flyte_ddp.promotion.policy import PromotionCriteria
from tasks.retrain import judge_challenger, keep_champion, plan_retraining
from tasks.train import prepare, train_on_cluster, train_on_one_node


@workflow
def retrain_wf(
    kickoff_time: datetime = flyte.BY_HAND,
    champion: str = "",
    recipe: str = "digits",
    config: flyte.OptionalOverrides = None,
    data: flyte.OptionalSource = None,
    train_on: str = flyte.ONE_NODE,
    num_processes: int = 0,
    cluster: flyte.OptionalCluster = None,
    start_from: str = "champion",
    margin: float = 0.01,
    min_samples: int = 1,
    min_share: float = 0.5,
    checkpoints: str = "",
    model_artifact: str = "",
    initial_model_state: str = "",
    output: str = "",
) -> flyte.RetrainingOutputs:
    """Train a challenger on the newest data, and make it the champion if it is better on held-out
    data.

    Returns the outcome and its reason, the version of the champion now, the metrics of both, and an
    HTML report.

    Args:
        kickoff_time: when the schedule started it; by hand, when it begins
        champion: directory or URL where the champion and its predecessors are kept; by default a
            place of the project's own in Flyte's store; required in a local run
        recipe: what to train: digits, mnist, or the dotted name of your own, such as
            recipes.wine.Wine
        config: hyperparameters that differ from the recipe's, as JSON or the name of a JSON or YAML
            file, for example '{"epochs": 3, "learning_rate": 0.01}'; flyte_ddp/config/training.py
            lists all fields with units
        data: directory, file or URL of the data, for recipes that read data of yours; it is read
            again each time
        train_on: one_node, or cluster
        num_processes: DDP processes on one node; 0 is one per GPU, or two on a machine without GPUs
        cluster: the machines of a cluster, as JSON or the name of a JSON or YAML file;
            flyte_ddp/cluster/config.py lists all fields with units
        start_from: the challenger's first weights, champion or scratch
        margin: share of the champion's loss on the held-out data by which the challenger's must be
            lower
        min_samples: minimum of training samples, and of held-out samples; with fewer nothing is
            trained
        min_share: likewise, as a share of what the champion was trained on
        checkpoints: directory or URL for the challenger's checkpoints; by default a place of the
            execution's own
        model_artifact: name of the W&B artifact to keep the challenger as; none by default
        initial_model_state: path or URL of a model state that a challenger starts from which does
            not start from a champion; by default its weights are fresh
        output: directory in which a local run leaves its outputs; by default a temporary one
    """
    prepared = prepare(
        recipe=recipe,
        config=config,
        source=data,
        cluster=cluster,
        initial_model_state=initial_model_state,
    )
    planned = plan_retraining(
        kickoff_time=kickoff_time,
        champion=champion,
        recipe=recipe,
        config=prepared.config,
        data=prepared.data,
        train_on=train_on,
        start_from=start_from,
        margin=margin,
        min_samples=min_samples,
        min_share=min_share,
        initial_model_state=prepared.initial_model_state,
        output=output,
    )
    # A branch starts as soon as its condition can be evaluated, even if other inputs are missing
    # (flyteorg/flyte#3512). This condition is an output of the last node, so all of them are there.
    return (
        conditional("what_to_train_on")
        .if_(planned.train_on == flyte.ONE_NODE)
        .then(
            challenge_on_one_node(
                kickoff_time=kickoff_time,
                champion=planned.champion,
                recipe=recipe,
                config=prepared.config,
                data=prepared.data,
                num_processes=num_processes,
                initial_model_state=planned.initial_model_state,
                parent=planned.parent,
                criteria=planned.criteria,
                checkpoints=checkpoints,
                model_artifact=model_artifact,
                output=output,
            )
        )
        .elif_(planned.train_on == flyte.CLUSTER)
        .then(
            challenge_on_cluster(
                kickoff_time=kickoff_time,
                champion=planned.champion,
                recipe=recipe,
                config=prepared.config,
                data=prepared.data,
                cluster=prepared.cluster,
                initial_model_state=planned.initial_model_state,
                parent=planned.parent,
                criteria=planned.criteria,
                checkpoints=checkpoints,
                model_artifact=model_artifact,
                output=output,
            )
        )
        .else_()
        .then(
            keep_champion(
                champion=planned.champion,
                recipe=recipe,
                outcome=planned.outcome,
                reason=planned.reason,
                output=output,
            )
        )
    )


# A branch has one node, so each is a workflow.


@workflow
def challenge_on_one_node(
    kickoff_time: datetime,
    champion: str,
    recipe: str,
    config: TrainingConfig,
    data: flyte.PreparedData,
    num_processes: int,
    initial_model_state: str,
    parent: str,
    criteria: PromotionCriteria,
    checkpoints: str,
    model_artifact: str,
    output: str,
) -> flyte.RetrainingOutputs:
    """The branch of `retrain_wf` that trains on one node."""
    trained = train_on_one_node(
        recipe=recipe,
        config=config,
        data=data,
        num_processes=num_processes,
        checkpoints=checkpoints,
        model_artifact=model_artifact,
        initial_model_state=initial_model_state,
        parent_champion=parent,
        output=output,
    )
    return judge_challenger(
        kickoff_time=kickoff_time,
        champion=champion,
        recipe=recipe,
        config=config,
        data=data,
        challenger=trained.model_state,
        export=trained.export,
        criteria=criteria,
        initial_model_state=initial_model_state,
        output=output,
    )


@workflow
def challenge_on_cluster(
    kickoff_time: datetime,
    champion: str,
    recipe: str,
    config: TrainingConfig,
    data: flyte.PreparedData,
    cluster: flyte.ClusterInput,
    initial_model_state: str,
    parent: str,
    criteria: PromotionCriteria,
    checkpoints: str,
    model_artifact: str,
    output: str,
) -> flyte.RetrainingOutputs:
    """The branch of `retrain_wf` that trains across the nodes of a Dask cluster."""
    trained = train_on_cluster(
        recipe=recipe,
        config=config,
        data=data,
        cluster=cluster,
        checkpoints=checkpoints,
        model_artifact=model_artifact,
        initial_model_state=initial_model_state,
        parent_champion=parent,
        output=output,
    )
    return judge_challenger(
        kickoff_time=kickoff_time,
        champion=champion,
        recipe=recipe,
        config=config,
        data=data,
        challenger=trained.model_state,
        export=trained.export,
        criteria=criteria,
        initial_model_state=initial_model_state,
        output=output,
    )


# Inactive until `make register ACTIVATE=1`, and never running twice at once. settings.toml has the
# schedule, inputs and recipients of failures.
RETRAIN = flyte.launch_plan("retrain", retrain_wf)
