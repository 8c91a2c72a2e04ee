"""The tasks that generate names or text with a trained model."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import PythonPickledFile

from flyte_ddp import flyte


# A map task would be slower: a thousand names take a second, and a pod takes ten seconds to start.
@task(**flyte.pod(flyte.SETTINGS.small), retries=2)
def generate(
    model_state: PythonPickledFile,
    data: flyte.PreparedData,
    count: int,
    temperature: float,
    seed: int,
    prefix: str,
    max_length: int,
) -> list[str]:
    """Generate `count` names that are not in `data`."""
    return flyte.generate_names(
        model_state=model_state,
        data=data,
        count=count,
        temperature=temperature,
        seed=seed,
        prefix=prefix,
        max_length=max_length,
    )


@task(**flyte.pod(flyte.SETTINGS.small), retries=2)
def generate_text(
    model_state: PythonPickledFile,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> str:
    """Continue `prompt` with the model in `model_state`."""
    return flyte.generate_text(
        model_state=model_state,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
