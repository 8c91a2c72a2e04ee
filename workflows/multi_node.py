"""Train a recipe across the nodes of a Dask cluster. The tasks contain the logic.

pyflyte run workflows/multi_node.py multi_node_training_wf --recipe pet_names
"""

from __future__ import annotations

from flytekit import workflow

from flyte_ddp import flyte
from tasks.train import prepare, train_on_cluster


@workflow
def multi_node_training_wf(
    recipe: str = "pet_names",
    config: flyte.OptionalOverrides = None,
    cluster: flyte.OptionalCluster = None,
    data: flyte.OptionalSource = None,
    checkpoints: str = "",
    output: str = "",
) -> flyte.TrainingOutputs:
    """Train a model with DistributedDataParallel across machines: start a Dask cluster, train on
    it, and delete it.

    Args:
        recipe: what to train: digits, mnist, pet_names, image_folder, text, or the dotted name of
            your own, such as recipes.wine.Wine
        config: hyperparameters that differ from the recipe's, as JSON or the name of a JSON or YAML
            file, for example '{"epochs": 3, "global_batch_size": 4096}';
            flyte_ddp/config/training.py lists all fields with units
        cluster: the machines, as JSON or the name of a JSON or YAML file, for example
            '{"kind": "kubernetes", "num_nodes": 4, "gpus_per_node": 1}'; by default two workers on
            this machine in a local run, and on Kubernetes in a remote one;
            flyte_ddp/cluster/config.py lists all fields with units
        data: directory, file or URL of your data; by default the recipe's own data
        checkpoints: directory or URL for checkpoints that all nodes reach; an unfinished run found
            there resumes; by default a place of the execution's own, which its retries share
        output: directory for the outputs of a local run; by default a new one, runs/NAME
    """
    prepared = prepare(
        recipe=recipe,
        config=config,
        source=data,
        cluster=cluster,
    )
    return train_on_cluster(
        recipe=recipe,
        config=prepared.config,
        data=prepared.data,
        cluster=prepared.cluster,
        checkpoints=checkpoints,
        output=output,
    )
