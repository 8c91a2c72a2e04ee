"""Predict new data in a task."""

from __future__ import annotations

from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.prediction.predict import Predictions
from flyte_ddp.prediction.predict import predict as predict_data
from flyte_ddp.process.devices import check_requested_gpus
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.storage import redact_url
from flyte_ddp.task_run.execution import Execution
from flyte_ddp.task_run.process import launcher_log


def predict(
    execution: Execution,
    cluster: ClusterConfig | None,
    num_processes: int,
    output: str,
    **call: Any,
) -> tuple[Predictions, str]:
    """Predict new data; return the predictions and their URL, and print both.

    Args:
        num_processes: ranks on this machine, if there is no `cluster`; 0 is one for each GPU.
        output: URL; "" for a place of the task's own, in which each attempt continues the last one.
        call: further arguments of `flyte_ddp.predict`.
    """
    check_requested_gpus()
    url = output or f"{execution.checkpoints}/predictions"
    nnodes: int | str = 1
    if cluster:
        nnodes = cluster.num_nodes
    with launcher_log(print_line):
        made = predict_data(
            output=url,
            nnodes=nnodes,
            nproc_per_node=num_processes or "auto",
            cluster=cluster,
            name=execution.attempt_id,
            **call,
        )
    print(f"{made.num_rows:,} predictions in {redact_url(url)}")  # noqa: T201
    return made, url
