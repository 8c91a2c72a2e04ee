"""Train at several world sizes and compare. The tasks have the logic.

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
    """Measure how a training scales: train at several world sizes, one after the other on one
    cluster.

    Returns a table and charts (loss, time to a target loss, speed-up, efficiency, samples per
    second, communication, GPU-hours or core-hours).

    Args:
        recipe: what to train: digits, mnist, pet_names, image_folder, text, or the dotted name of
            your own, such as recipes.wine.Wine
        config: hyperparameters that differ from the recipe's, as JSON or the name of a JSON or YAML
            file; global_batch_size is the same in all trials, and each rank gets its share
        world_sizes: numbers of ranks to train with, two or more, as JSON, for example '[1, 2, 4]'
        learning_rates: learning rates to train with at each of them; by default the config's own
        batch_sizes_per_rank: samples per rank and optimizer step to train with at each of them, in
            place of an equal global batch: it grows with the world size
        sample_sizes: numbers of training samples to train with at each of them; by default the
            config's own
        target_loss: held-out loss to which the time is measured; 0 is the worst of the trials'
            best, which all reach
        repeats: trainings of every trial, each with another seed; from two on, figures have 95 %
            confidence intervals
        cluster: the machines, as JSON or the name of a JSON or YAML file; their number follows from
            the largest world size and the ranks of each, for example '{"kind": "kubernetes",
            "gpus_per_node": 4}'; by default workers of one rank each, on this machine in a local
            run and on Kubernetes in a remote one
        data: directory, file or URL of the data, for recipes that read data of yours; the recipe's
            own by default
        checkpoints: directory or URL for checkpoints that all nodes reach; trials that an earlier
            study has finished there are not repeated; by default a place of the execution's own,
            which its retries share
        output: directory in which a local run leaves its outputs; by default runs/NAME, a new one
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
