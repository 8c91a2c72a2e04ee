"""The task that spells new names with a trained model."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.file import PythonPickledFile

from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes.pet_names.recipe import TRAINING_NAMES
from tasks.inputs import InputError
from tasks.prepare import PreparedData
from tasks.resources import SMALL_TASK


# One task and not a map of them: a thousand names take it a second, and a pod takes ten to start. The names do not
# depend on who draws which chunk of them, so they would be the same.
@task(**SMALL_TASK, retries=2)
def generate(
    model_state: PythonPickledFile,
    data: PreparedData,
    count: int,
    temperature: float,
    seed: int,
    prefix: str,
    max_length: int,
) -> list[str]:
    """`count` names from the model that a run of a pet-name recipe left in `model_state`, none of those in `data`."""
    import torch

    from flyte_ddp.recipes.pet_names.generate import TooFewNames, generate_names, load_model

    state_file = Path(model_state.download() or model_state.path)
    known = Path(data.download() or data.path, TRAINING_NAMES).read_text().splitlines()
    try:
        state = torch.load(state_file, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind: the bytes of another file may look like anything
        raise InputError(
            f"model_state: {state_file} cannot be read: {type(error).__name__}; accepted is the model_state.pt of a "
            "run of recipe pet_names or pet_name_windows"
        ) from error
    try:
        return generate_names(load_model(state), count, temperature, seed, prefix, known, max_length)
    except (ConfigError, TooFewNames) as error:
        raise InputError(" ".join(str(error).split())) from error  # torch lists what a state lacks on many lines
