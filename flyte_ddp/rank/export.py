"""The trained weights in forms that other programs read, beside the model state."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.checkpoints import EXPORT, EXPORTED_STATE
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.storage import Storage
from flyte_ddp.storage.weights import save_safetensors

TIMEOUT = 60.0  # seconds for a store that is away, or a disk that is full: the model state is safe already


def export_model(recipe: Recipe, state: Mapping[str, Any], checkpoints: str) -> dict[str, Any]:
    """Write the state as safetensors and the files of `Recipe.export`; return the fields of `RunFinished` about them.

    The files are written from the state's own memory, which may leave none for a copy. The model is trained and safe by
    now. So a state that has no such form, a mistake in the recipe's `export`, and a store that takes no more are named
    in the results and end nothing.

    Args:
        checkpoints: URL of the directory beside whose files they are kept.
    """
    storage = Storage(f"{checkpoints}/{EXPORT}", timeout=TIMEOUT)
    written: list[str] = []
    problems: list[str] = []

    def write(make: Callable[[Path], object], what: str) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="export-") as place:
                make(Path(place))
                for file in sorted(file for file in Path(place).rglob("*") if file.is_file()):
                    name = file.relative_to(place).as_posix()
                    storage.write(name, file)
                    written.append(name)
        except Exception as error:  # of any kind: `export` may be the user's
            problems.append(f"{what}: {' '.join(str(error).split()) or type(error).__name__}")

    write(lambda place: save_safetensors(state, place / EXPORTED_STATE), EXPORTED_STATE)
    write(lambda place: recipe.export(state, place), f"{type(recipe).__name__}.export")
    return {"export_url": storage.url, "exported": written, "not_exported": "; ".join(problems)}
