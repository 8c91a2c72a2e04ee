"""The trained weights in forms that other programs read, beside the model state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flyte_ddp.checkpoints import EXPORT, EXPORTED_STATE
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.storage import Storage
from flyte_ddp.weights import to_safetensors

TIMEOUT = 60.0  # seconds for a store that is away, or a disk that is full: the model state is safe already


def export_model(recipe: Recipe, state: Mapping[str, Any], checkpoints: str) -> dict[str, Any]:
    """Write the state as safetensors and the files of `Recipe.export`; return the fields of `RunFinished` about them.

    The model is trained and safe by now. So a state that has no such form, a mistake in the recipe's `export`, and a
    store that takes no more are named in the results and end nothing.

    Args:
        checkpoints: URL of the directory beside whose files they are kept.
    """
    storage = Storage(f"{checkpoints}/{EXPORT}", timeout=TIMEOUT)
    written: list[str] = []
    problems: list[str] = []

    def write(make: Callable[[], Mapping[str, bytes]], what: str) -> None:
        try:
            for name, contents in make().items():
                if name.startswith("/") or ".." in name.split("/"):  # it would be outside of the directory
                    raise ValueError(f"expected a relative path as a name, got {name!r}")
                storage.write(name, contents)
                written.append(name)
        except Exception as error:  # of any kind: `export` may be the user's
            problems.append(f"{what}: {' '.join(str(error).split()) or type(error).__name__}")

    write(lambda: {EXPORTED_STATE: to_safetensors(state)}, EXPORTED_STATE)
    write(lambda: recipe.export(state), f"{type(recipe).__name__}.export")
    return {"export_url": storage.url, "exported": written, "not_exported": "; ".join(problems)}
