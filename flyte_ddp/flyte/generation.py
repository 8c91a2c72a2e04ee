"""Generate names or text with a trained model."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import PythonPickledFile

from flyte_ddp.flyte.task import check_files, task_body
from flyte_ddp.recipes.pet_names.recipe import TRAINING_NAMES


@task_body
def generate_names(
    model_state: PythonPickledFile,
    data: FlyteDirectory,
    count: int,
    temperature: float,
    seed: int,
    prefix: str,
    max_length: int,
) -> list[str]:
    """Generate `count` names that are not in `data`, with a model that recipe pet_names trained."""
    from flyte_ddp.recipes.pet_names import generate as generator
    from flyte_ddp.recipes.pet_names.model import NameModel

    check_files(data=data)
    known = (
        Path(data.download() or data.path, TRAINING_NAMES).read_text(encoding="utf-8").splitlines()
    )
    state = _read_state(model_state, "pet_names", NameModel().state_dict().keys())
    model = generator.load_model(state)
    return generator.generate_names(model, count, temperature, seed, prefix, known, max_length)


@task_body
def generate_text(
    model_state: PythonPickledFile,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> str:
    """Continue `prompt` with the model in `model_state` that recipe text trained."""
    from flyte_ddp.recipes.text import model as generator

    # Every state of recipe text has its config and its tokenizer under this key.
    model = generator.load_model(_read_state(model_state, "text", {"_extra_state"}))
    return generator.generate_text(model, prompt, max_tokens, temperature, top_p, seed)


def _read_state(model_state: PythonPickledFile, recipe: str, keys: Set[str]) -> Any:
    """Return the state dict with some of `keys` in the file of a run of `recipe`.

    Raises:
        ConfigError: the file contains no state dict, or several.
    """
    from flyte_ddp.training.initial_state import find_state, read_state  # imports torch

    check_files(model_state=model_state)
    expected = f"model_state: expected the model_state.pt of a run of recipe {recipe}"
    found = read_state(str(model_state.download() or model_state.path), expected)
    return find_state(found, keys, "model_state")
