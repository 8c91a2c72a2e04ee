"""Train at several world sizes and compare. The tasks contain the logic.

pyflyte run workflows/scaling.py scaling_wf --recipe digits --world_sizes '[1, 2]'
"""

from __future__ import annotations

from flytekit import workflow

from flyte_ddp import flyte
from tasks.study import check_scaling, train_at_world_sizes
from tasks.train import prepare


@workflow
def scaling_wf(
    recipe: str = "digits",
    config: flyte.OptionalOverrides = None,
    world_sizes: list[int] = [1, 2],  # noqa: B006 - Flyte's form of a default
    learning_rates: list[float] = [],  # noqa: B006
    batch_sizes_per_rank: list[int] = [],  # noqa: B006
    sample_sizes: list[int] = [],  # noqa: B006
    target_loss: float = 0.0,
    repeats: int = 1,
    cluster: flyte.OptionalCluster = None,
    data: flyte.OptionalSource = None,
    checkpoints: str = "",
    output: str = "",
) -> flyte.ScalingOutputs:
    """Measure how a training scales: train at several world sizes, one after another on one
    cluster.

    Returns a table and charts (loss, time to a target loss, speed-up, efficiency, samples per
    second, communication, GPU-hours or core-hours).

    Args:
        recipe: what to train: digits, mnist, pet_names, image_folder, text, or the dotted name of
            your own, such as recipes.wine.Wine
        config: hyperparameters that differ from the recipe's, as JSON or the name of a JSON or YAML
            file; global_batch_size is the same in all trials, and each rank gets its share
        world_sizes: two or more numbers of ranks to train with, as JSON, for example '[1, 2, 4]'
        learning_rates: learning rates to train with at each world size; by default the config's own
        batch_sizes_per_rank: samples per rank and optimizer step to train with at each world
            size; the global batch then grows with the world size
        sample_sizes: numbers of training samples to train with at each world size; by default
            the config's own
        target_loss: held-out loss to which the time is measured; 0 is the smallest loss
            that all trials reach
        repeats: number of trainings of every trial, each with another seed; with two or more,
            figures have 95 % confidence intervals
        cluster: the machines, as JSON or the name of a JSON or YAML file; their number follows from
            the largest world size and the ranks of each, for example '{"kind": "kubernetes",
            "gpus_per_node": 4}'; by default workers of one rank each, on this machine in a local
            run and on Kubernetes in a remote one
        data: directory, file or URL of your data; by default the recipe's own data
        checkpoints: directory or URL for checkpoints that all nodes reach; trials that an earlier
            study has finished there are not repeated; by default a place of the execution's own,
            which its retries share
        output: directory for the outputs of a local run; by default a new one, runs/NAME
    """
    checked = check_scaling(
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
    prepared = prepare(
        recipe=recipe,
        config=checked.config,
        source=data,
        cluster=cluster,
    )
    return train_at_world_sizes(
        recipe=recipe,
        config=checked.config,
        trials=checked.trials,
        data=prepared.data,
        target_loss=target_loss,
        cluster=prepared.cluster,
        checkpoints=checkpoints,
        output=output,
    )
