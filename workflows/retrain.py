"""Retrain a recipe and keep the better model, by hand or by schedule.

The tasks contain the logic, and flyte_ddp/promotion/policy.py has the rules.

pyflyte run workflows/retrain.py retrain_wf --champion /tmp/champion
"""

from __future__ import annotations

from datetime import datetime

from flytekit import conditional, workflow

from flyte_ddp import flyte
from flyte_ddp.config import TrainingConfig
from tasks.retrain import judge_challenger, keep_champion, plan_retraining
from tasks.train import train_on_cluster, train_on_one_node


@workflow
def retrain_wf(
    kickoff_time: datetime = flyte.NOW,
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
    output: str = "",
) -> flyte.RetrainingOutputs:
    """Train a challenger on the newest data, and make it the champion if it is better on held-out
    data.

    Returns the outcome and its reason, the champion's version now, the metrics of challenger and
    champion, and an HTML report.

    Args:
        kickoff_time: time at which the schedule starts the retraining; by default the start of its
            first task
        champion: directory or URL where the champion and its predecessors are kept; by default a
            place of the project's own in Flyte's store; required in a local run
        recipe: what to train: digits, mnist, or the dotted name of your own, such as
            recipes.wine.Wine
        config: hyperparameters that differ from the recipe's, as JSON or the name of a JSON or YAML
            file, for example '{"epochs": 3, "learning_rate": 0.01}'; flyte_ddp/config/training.py
            lists all fields with units
        data: directory, file or URL of your data, which each retraining reads again; by default the
            recipe's own data
        train_on: one_node, or cluster
        num_processes: DDP processes on one node; 0 is one per GPU, or two on a machine without GPUs
        cluster: the machines of a cluster, as JSON or the name of a JSON or YAML file;
            flyte_ddp/cluster/config.py lists all fields with units
        start_from: the challenger's first weights, champion or scratch
        margin: the challenger's loss on the held-out data must be lower by this share of the
            champion's loss
        min_samples: smallest number of training samples, and of held-out samples; with fewer
            nothing is trained
        min_share: smallest number of samples, as a share of the champion's number
        checkpoints: directory or URL for the challenger's checkpoints; by default a place of the
            execution's own
        output: directory for the outputs of a local run; by default a new one, runs/NAME
    """
    planned = plan_retraining(
        kickoff_time=kickoff_time,
        champion=champion,
        recipe=recipe,
        config=config,
        source=data,
        cluster=cluster,
        train_on=train_on,
        start_from=start_from,
        margin=margin,
        min_samples=min_samples,
        min_share=min_share,
        output=output,
    )
    # A branch starts as soon as its condition can be evaluated, even if other inputs are missing
    # (flyteorg/flyte#3512). This condition is an output of the last node, so all inputs are there.
    return (
        conditional("what_to_train")
        .if_(planned.train_on == flyte.NOTHING)
        .then(keep_champion(retraining=planned.retraining, output=output))
        .elif_(planned.train_on == flyte.CLUSTER)
        .then(
            challenge_on_cluster(
                retraining=planned.retraining,
                parent=planned.parent,
                recipe=recipe,
                config=planned.config,
                data=planned.data,
                cluster=planned.cluster,
                checkpoints=checkpoints,
                output=output,
            )
        )
        .else_()
        .then(
            challenge_on_one_node(
                retraining=planned.retraining,
                parent=planned.parent,
                recipe=recipe,
                config=planned.config,
                data=planned.data,
                num_processes=num_processes,
                checkpoints=checkpoints,
                output=output,
            )
        )
    )


# A branch has one node, so a branch that trains and judges is a workflow.
@workflow
def challenge_on_cluster(
    retraining: flyte.Retraining,
    parent: str,
    recipe: str,
    config: TrainingConfig,
    data: flyte.PreparedData,
    cluster: flyte.ClusterInput,
    checkpoints: str,
    output: str,
) -> flyte.RetrainingOutputs:
    """Train a challenger on the nodes of a new cluster, and judge it."""
    trained = train_on_cluster(
        recipe=recipe,
        config=config,
        data=data,
        cluster=cluster,
        checkpoints=checkpoints,
        output=output,
        parent_champion=parent,
    )
    return judge_challenger(
        retraining=retraining,
        config=config,
        data=data,
        challenger=trained.model_state,
        export=trained.export,
        output=output,
    )


@workflow
def challenge_on_one_node(
    retraining: flyte.Retraining,
    parent: str,
    recipe: str,
    config: TrainingConfig,
    data: flyte.PreparedData,
    num_processes: int,
    checkpoints: str,
    output: str,
) -> flyte.RetrainingOutputs:
    """Train a challenger on one machine, and judge it."""
    trained = train_on_one_node(
        recipe=recipe,
        config=config,
        data=data,
        num_processes=num_processes,
        checkpoints=checkpoints,
        output=output,
        parent_champion=parent,
    )
    return judge_challenger(
        retraining=retraining,
        config=config,
        data=data,
        challenger=trained.model_state,
        export=trained.export,
        output=output,
    )


# The launch plan is inactive until `make register ACTIVATE=1`, and never runs twice at once.
# settings.toml contains the schedule, the inputs and the recipients of failures.
RETRAIN = flyte.launch_plan("retrain", retrain_wf)
