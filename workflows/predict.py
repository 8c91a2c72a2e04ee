"""Predict new data with a trained model, or with the champion. The tasks contain the logic.

pyflyte run workflows/predict.py predict_wf --recipe digits --model_state runs/first/model_state.pt
"""

from __future__ import annotations

from flytekit import workflow

from flyte_ddp import flyte
from tasks.predict import predict_on_cluster, predict_on_one_node


@workflow
def predict_wf(
    recipe: str,
    model_state: str,
    data: flyte.OptionalSource = None,
    output: str = "",
    config: flyte.OptionalOverrides = None,
    batch_size: int = 256,
    part_size: int = 16384,
    num_processes: int = 0,
) -> flyte.PredictionOutputs:
    """Predict each sample of the data once, in its order, into Parquet files, on one machine.

    Args:
        recipe: recipe that trained the model
        model_state: path or URL of a state dict, such as the model_state.pt of a run, or the
            directory of a champion; its version in use predicts
        data: directory, file or URL of the data; by default the recipe's own data
        output: directory or URL for the predictions; existing files are not made again; by default
            a place of the execution's own
        config: fields such as precision, as JSON or the name of a JSON or YAML file; the recipe's
            options are by default the values of the model's training
        batch_size: samples of a forward pass
        part_size: samples of a file, a multiple of batch_size
        num_processes: number of processes; 0 is one per GPU, or two on a machine without GPUs
    """
    return predict_on_one_node(
        recipe=recipe,
        model_state=model_state,
        data=data,
        output=output,
        config=config,
        batch_size=batch_size,
        part_size=part_size,
        num_processes=num_processes,
    )


@workflow
def predict_on_cluster_wf(
    recipe: str,
    model_state: str,
    cluster: flyte.ClusterInput,
    data: flyte.OptionalSource = None,
    output: str = "",
    config: flyte.OptionalOverrides = None,
    batch_size: int = 256,
    part_size: int = 16384,
) -> flyte.PredictionOutputs:
    """Predict each sample of the data once, in its order, into Parquet files, on the nodes of a
    Dask cluster.

    Args:
        recipe: recipe that trained the model
        model_state: the same as in predict_wf
        cluster: the machines, as JSON or the name of a JSON or YAML file, for example
            '{"kind": "kubernetes", "num_nodes": 4, "gpus_per_node": 1}';
            flyte_ddp/cluster/config.py lists all fields with units
        data: the same as in predict_wf
        output: the same as in predict_wf
        config: the same as in predict_wf
        batch_size: samples of a forward pass
        part_size: samples of a file, a multiple of batch_size
    """
    return predict_on_cluster(
        recipe=recipe,
        model_state=model_state,
        cluster=cluster,
        data=data,
        output=output,
        config=config,
        batch_size=batch_size,
        part_size=part_size,
    )
