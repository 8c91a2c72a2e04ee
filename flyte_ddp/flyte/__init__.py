"""The Flyte side of the library. Only this package and `flyte_ddp.flytekit_plugin` import flytekit.

A task is a declaration: @task, a typed signature, and one call of a function from here.

from flyte_ddp import flyte

@task(**flyte.pod(flyte.SETTINGS.training, gpus=1, trains=True), retries=3)
def train(recipe: str, config: TrainingConfig, data: flyte.PreparedData) -> flyte.TrainingOutputs:
    return flyte.train_on_one_node(recipe=recipe, config=config, data=data)

`Distributed` is for a task with a training function of its own. Each name is imported at its first
use.
"""

from __future__ import annotations

import importlib
from typing import Any

# public names by the module that defines them
_HOMES = {
    "flyte_ddp.flyte.distributed": "Distributed",
    "flyte_ddp.flyte.generation": "generate_names generate_text",
    "flyte_ddp.flyte.inputs": "ClusterInput Grid OptionalCluster OptionalOverrides OptionalSource "
    "TrainingOverrides make_overrides",
    "flyte_ddp.flyte.outputs": "RetrainingOutputs TrainingOutputs",
    "flyte_ddp.flyte.prediction": "PredictionOutputs predict",
    "flyte_ddp.flyte.registration": "inner_branch launch_plan",
    "flyte_ddp.flyte.resources": "TRAINING_CACHE pod wandb_link",
    "flyte_ddp.flyte.retraining": "CLUSTER NOTHING NOW ONE_NODE Retraining RetrainingPlan "
    "judge_challenger keep_champion plan_retraining",
    "flyte_ddp.flyte.scripts": "ScriptOutputs ScriptSource run_script",
    "flyte_ddp.project.settings": "SETTINGS",
    "flyte_ddp.flyte.study": "CheckedStudy ScalingOutputs SweepOutputs "
    "check_scaling check_sweep train_at_world_sizes train_sweep",
    "flyte_ddp.flyte.training": "Prepared PreparedData prepare train_on_cluster train_on_one_node",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
