"""The service that records the run of a task: W&B, MLflow or TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flyte_ddp.observers.mlflow import Mlflow
from flyte_ddp.observers.recorder import Recorder
from flyte_ddp.observers.tensorboard import Tensorboard
from flyte_ddp.observers.weights_and_biases import Wandb
from flyte_ddp.storage import Storage


def make_tracker(
    tracking: Sequence[str],
    run_id: str,
    directory: Path,
    storage: Storage,
    *,
    is_local: bool,
    origin: Mapping[str, str],
    history: str,
    **options: Any,
) -> Recorder:
    """Return the tracker of a run.

    Args:
        tracking: ("wandb", project), ("mlflow", server, experiment) or ("tensorboard", directory
            or URL, "" for one beside the checkpoints).
        run_id: the same for all attempts.
        directory: of the process's own files.
        storage: of the checkpoints.
        is_local: the directory stays where it is; a pod's is lost with the pod.
        origin: see `run_card`.
        history: path or URL of the run's.
        options: of `Recorder`.
    """
    kind, *place = tracking
    if kind == "mlflow":
        server, experiment = place
        return Mlflow(server, experiment, run_id, origin=origin, history=history, **options)
    if kind == "tensorboard":
        return Tensorboard(place[0] or storage.join(kind), run_id, **options)
    project = os.environ.get("WANDB_PROJECT", place[0])
    offline_url = "" if is_local else storage.join("wandb")
    return Wandb(project, run_id, directory, offline_url=offline_url, **options)
