"""Generate pet names with a trained model. The tasks contain the logic.

pyflyte run workflows/pet_names.py generate_names_wf --model_state model_state.pt
pyflyte run workflows/pet_names.py train_and_generate_names_wf
"""

from __future__ import annotations

from flytekit import workflow
from flytekit.types.file import PythonPickledFile

from flyte_ddp import flyte
from tasks.generate import generate
from tasks.train import prepare, train_on_one_node


@workflow
def generate_names_wf(
    model_state: PythonPickledFile,
    count: int = 20,
    temperature: float = 1.0,
    seed: int = 0,
    prefix: str = "",
    max_length: int = 30,
    data: flyte.OptionalSource = None,
) -> list[str]:
    """Generate different names with a trained model, none of them from the training list.

    The same seed gives the same names, and a smaller count returns a prefix of a larger one.

    Args:
        model_state: the model_state.pt of a run of recipe pet_names
        count: names to generate
        temperature: above 0; below 1 the names are more common than the training list, above 1 more
            unusual
        seed: seed of the random draws, 0 or more
        prefix: first letters of every name
        max_length: characters, at most 30; longer names are dropped, not cut
        data: the training list of the model, as given to the training; no generated name is from
            it; by default the recipe's own
    """
    prepared = prepare(recipe="pet_names", source=data)
    return generate(
        model_state=model_state,
        data=prepared.data,
        count=count,
        temperature=temperature,
        seed=seed,
        prefix=prefix,
        max_length=max_length,
    )


@workflow
def train_and_generate_names_wf(
    recipe: str = "pet_names",
    config: flyte.OptionalOverrides = None,
    num_processes: int = 0,
    data: flyte.OptionalSource = None,
    checkpoints: str = "",
    output: str = "",
    count: int = 20,
    temperature: float = 1.0,
    seed: int = 0,
    prefix: str = "",
    max_length: int = 30,
) -> list[str]:
    """Train a model of pet names on one node, and generate names with it, none of them from the
    training list.

    Args:
        recipe: pet_names
        config: hyperparameters that differ from the recipe's, as JSON or the name of a JSON or YAML
            file, for example '{"epochs": 3}'; flyte_ddp/config/training.py lists all fields with
            units
        num_processes: DDP processes; 0 is one per GPU, or two on a machine without GPUs
        data: CSV, JSON or text file, or its URL, with names; by default the recipe's own
        checkpoints: directory or URL for checkpoints; an unfinished run found there resumes; by
            default a place of the execution's own, which its retries share
        output: directory for the outputs of a local run; by default a new one, runs/NAME
        count: names to generate
        temperature: above 0; below 1 the names are more common than the training list, above 1 more
            unusual
        seed: seed of the random draws of letters, 0 or more
        prefix: first letters of every name
        max_length: characters, at most 30; longer names are dropped, not cut
    """
    prepared = prepare(
        recipe=recipe,
        config=config,
        source=data,
        trains_here=True,
    )
    trained = train_on_one_node(
        recipe=recipe,
        config=prepared.config,
        data=prepared.data,
        num_processes=num_processes,
        checkpoints=checkpoints,
        output=output,
    )
    return generate(
        model_state=trained.model_state,
        data=prepared.data,
        count=count,
        temperature=temperature,
        seed=seed,
        prefix=prefix,
        max_length=max_length,
    )
