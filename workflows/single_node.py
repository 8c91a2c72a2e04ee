"""Train a recipe on one node. The tasks contain the logic.

pyflyte run workflows/single_node.py single_node_training_wf --recipe digits
"""

from __future__ import annotations

from flytekit import workflow

from flyte_ddp import flyte
from tasks.train import prepare, train_on_one_node


@workflow
def single_node_training_wf(
    recipe: str = "digits",
    config: flyte.OptionalOverrides = None,
    num_processes: int = 0,
    data: flyte.OptionalSource = None,
    checkpoints: str = "",
    output: str = "",
) -> flyte.TrainingOutputs:
    """Train a model with DistributedDataParallel on one node: prepare its data, train, report.

    Args:
        recipe: what to train: digits, mnist, pet_names, image_folder, text, or the dotted name of
            your own, such as recipes.wine.Wine
        config: hyperparameters that differ from the recipe's, as JSON or the name of a JSON or YAML
            file, for example '{"epochs": 3, "global_batch_size": 128, "learning_rate": 0.01}';
            flyte_ddp/config/training.py lists all fields with units
        num_processes: DDP processes; 0 is one per GPU, or two on a machine without GPUs
        data: directory, file or URL of your data; by default the recipe's own data
        checkpoints: directory or URL for checkpoints; an unfinished run found there resumes; by
            default a place of the execution's own, which its retries share
        output: directory for the outputs of a local run; by default a new one, runs/NAME
    """
    prepared = prepare(
        recipe=recipe,
        config=config,
        source=data,
        trains_here=True,
    )
    return train_on_one_node(
        recipe=recipe,
        config=prepared.config,
        data=prepared.data,
        num_processes=num_processes,
        checkpoints=checkpoints,
        output=output,
    )
