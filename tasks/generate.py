"""The task that generates new names with a trained model."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.file import PythonPickledFile

from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes.pet_names.recipe import TRAINING_NAMES
from tasks.failures import flyte_errors
from tasks.prepare import PreparedData
from tasks.resources import SMALL_TASK


# One task and not a map task: a thousand names take a second, and a pod takes ten seconds to start.
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
    """Generate `count` names that are not in `data`, with the model in `model_state` that a pet-name recipe trained."""
    import torch

    from flyte_ddp.recipes.pet_names.generate import TooFewNames, generate_names, load_model

    state_file = Path(model_state.download() or model_state.path)
    known = Path(data.download() or data.path, TRAINING_NAMES).read_text().splitlines()
    with flyte_errors():
        try:
            state = torch.load(state_file, map_location="cpu", weights_only=True)
        except Exception as error:  # of any kind: the bytes of another file may look like anything
            raise ConfigError(
                "model_state: expected the model_state.pt of a run of recipe pet_names or pet_name_windows, got "
                f"{state_file}, which cannot be read: {type(error).__name__}"
            ) from error
        try:
            return generate_names(load_model(state), count, temperature, seed, prefix, known, max_length)
        except (ConfigError, TooFewNames) as error:
            raise ConfigError(" ".join(str(error).split())) from error  # torch lists a state's gaps on many lines
