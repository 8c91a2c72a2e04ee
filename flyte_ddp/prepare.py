"""Prepare a recipe's data once, before any rank starts, and note beside it which data that is. Imports no torch."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from pathlib import Path

from flyte_ddp.recipes import Recipe

NOTE = "data.json"


def prepare_data(recipe: Recipe, source: str, directory: Path) -> None:
    """Run `recipe.prepare` into the empty `directory` and leave the note that `describe_data` reads.

    Raises:
        DataError: from the recipe.
    """
    description = recipe.prepare(source, directory)
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(file.relative_to(directory).as_posix().encode() + b"\0")
        with open(file, "rb") as contents:
            while block := contents.read(1 << 20):
                digest.update(block)
    code = Path(inspect.getfile(type(recipe))).read_bytes()
    note = {
        "description": description,
        "fingerprint": digest.hexdigest(),
        "recipe_version": hashlib.sha256(code).hexdigest(),
    }
    (directory / NOTE).write_text(json.dumps(note))


def describe_data(directory: str | os.PathLike[str]) -> dict[str, str]:
    """What `prepare_data` noted.

    Returns:
        "description": which data it is, in words; "fingerprint": a SHA-256 of all that was prepared;
        "recipe_version": a SHA-256 of the file that defines the recipe.
    """
    note: dict[str, str] = json.loads((Path(directory) / NOTE).read_text())
    return note
