"""Generate text with a trained language model. The tasks contain the logic.

pyflyte run workflows/text.py train_and_generate_text_wf --prompt "The import statement"
pyflyte run workflows/text.py generate_text_wf --model_state model_state.pt --prompt "The import
statement"
"""

from __future__ import annotations

from flytekit import workflow
from flytekit.types.file import PythonPickledFile

from flyte_ddp import flyte
from tasks.generate import generate_text
from tasks.train import prepare, train_on_one_node


@workflow
def generate_text_wf(
    model_state: PythonPickledFile,
    prompt: str = "",
    max_tokens: int = 500,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Continue a text with a trained model. The same seed gives the same text.

    Args:
        model_state: the model_state.pt of a run of recipe text; it contains the tokenizer too
        prompt: beginning of the text; "" lets the model begin
        max_tokens: limit on the tokens of the text, if the model does not end it before
        temperature: 0 or more; 0 takes the likeliest token each time, 1 draws tokens as often
            as they follow in the training text
        top_p: above 0, at most 1; draws only from the likeliest tokens that together have this
            probability
        seed: seed of the random draws, 0 or more
    """
    return generate_text(
        model_state=model_state,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )


@workflow
def train_and_generate_text_wf(
    recipe: str = "text",
    config: flyte.OptionalOverrides = None,
    num_processes: int = 0,
    data: flyte.OptionalSource = None,
    checkpoints: str = "",
    output: str = "",
    prompt: str = "",
    max_tokens: int = 500,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Train a language model on one node, and continue a text with it.

    Args:
        recipe: text, or the dotted name of a recipe derived from it
        config: hyperparameters that differ from the recipe's, as JSON or the name of a JSON or YAML
            file, for example '{"epochs": 3, "recipe_options": {"layers": 6}}';
            flyte_ddp/config/training.py lists all fields with units
        num_processes: DDP processes; 0 is one per GPU, or two on a machine without GPUs
        data: file, directory or URL of text or Parquet; by default the topics that come with Python
        checkpoints: directory or URL for checkpoints; an unfinished run found there resumes; by
            default a place of the execution's own, which its retries share
        output: directory for the outputs of a local run; by default a new one, runs/NAME
        prompt: beginning of the text; "" lets the model begin
        max_tokens: limit on the tokens of the text, if the model does not end it before
        temperature: 0 or more; 0 takes the likeliest token each time, 1 draws tokens as often
            as they follow in the training text
        top_p: above 0, at most 1; draws only from the likeliest tokens that together have this
            probability
        seed: seed of the random draws, 0 or more
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
    return generate_text(
        model_state=trained.model_state,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
