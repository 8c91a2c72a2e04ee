"""Train many models at once and compare them. The tasks contain the logic.

pyflyte run workflows/sweep.py sweep_wf --recipe digits --grid '{"learning_rate": [0.001, 0.01]}'
"""

from __future__ import annotations

from flytekit import workflow

from flyte_ddp import flyte
from tasks.study import check_sweep, train_sweep
from tasks.train import prepare


@workflow
def sweep_wf(
    grid: flyte.Grid,
    recipe: str = "digits",
    config: flyte.OptionalOverrides = None,
    num_models: int = 0,
    seed: int = 0,
    sampler: str = "random",
    stop_early: str = "none",
    cluster: flyte.OptionalCluster = None,
    data: flyte.OptionalSource = None,
    checkpoints: str = "",
    output: str = "",
) -> flyte.SweepOutputs:
    """Train a model for every combination in a grid, or for random combinations, side by side on a
    Dask cluster, and compare the models.

    Each worker of the cluster trains one model at a time. Returns a table with every epoch of every
    model, the configuration, the accuracies and the state of the best, and an HTML report.

    Args:
        grid: choices, as JSON: a list for each hyperparameter, or for an option of the recipe,
            recipe_options.NAME, for example '{"learning_rate": [0.001, 0.01],
            "global_batch_size": [64, 256]}'; with num_models also ranges, for example
            '{"learning_rate": {"low": 0.0001, "high": 0.1, "log": true}}'; or a list of models, for
            example '[{"learning_rate": 0.1, "momentum": 0.9}, {"learning_rate": 0.01}]'
        recipe: what to train: digits, mnist, pet_names, image_folder, text, or the dotted name of
            your own, such as recipes.wine.Wine
        config: hyperparameters that all models share, as JSON or the name of a JSON or YAML file;
            flyte_ddp/config/training.py lists all fields with units
        num_models: models to draw from the grid at random; 0 is every combination of its choices
        seed: seed of the random draws; the same seed draws the same models
        sampler: random, or tpe, which draws ten random models and then follows the results so far
        stop_early: none, median (stop models that are worse than the median of earlier ones) or
            halving (continue with the better half after epochs 1, 2, 4, ...)
        cluster: the machines, as JSON or the name of a JSON or YAML file, for example
            '{"kind": "kubernetes", "num_nodes": 4, "gpus_per_node": 1}'; by default two workers on
            this machine in a local run, and on Kubernetes in a remote one;
            flyte_ddp/cluster/config.py lists all fields with units
        data: directory, file or URL of your data; by default the recipe's own data
        checkpoints: directory or URL for checkpoints that all workers reach; models that an earlier
            sweep has trained there are not trained again; by default a place of the execution's
            own, which its retries share
        output: directory for the outputs of a local run; by default a new one, runs/NAME
    """
    checked = check_sweep(
        recipe=recipe,
        config=config,
        grid=grid,
        num_models=num_models,
        seed=seed,
        sampler=sampler,
        stop_early=stop_early,
        cluster=cluster,
    )
    prepared = prepare(
        recipe=recipe,
        config=checked.config,
        source=data,
        cluster=cluster,
    )
    return train_sweep(
        recipe=recipe,
        config=checked.config,
        trials=checked.trials,
        data=prepared.data,
        cluster=prepared.cluster,
        stop_early=stop_early,
        checkpoints=checkpoints,
        output=output,
        grid=grid,
        seed=seed,
        sampler=sampler,
    )
