"""Prepare a recipe's data once, before any rank starts, and write a note that identifies the data.
Imports no torch.

Descriptions and errors of recipes name the URL that the user gave. They pass through here, and lose
its password or signature, before they reach a report, a manifest, a log or W&B.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from flyte_ddp.code.by_value import code_version, is_by_value
from flyte_ddp.code.source_code import (
    compute_digest_of_files,
    compute_library_digest,
    imported_files,
    list_packages,
    source_files,
)
from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import Recipe, locate
from flyte_ddp.storage import compute_sha256, redact_errors, redact_url

NOTE = "data.json"


@redact_errors()
def prepare_data(recipe: Recipe, source: str, directory: Path, method: str = "prepare") -> None:
    """Run `recipe.prepare` into the empty `directory` and write the note that `describe_data`
    reads.

    Args:
        method: name of the recipe's method to call, with the parameters of `prepare`.

    Raises:
        ConfigError: the recipe did not describe its data.
        DataError: from the recipe.
        StorageDenied: the data may not be read with the credentials of this process.
        StorageUnavailable: the data's store could not be reached.
    """
    found: object = getattr(recipe, method)(source, directory)
    if not isinstance(found, str):
        raise ConfigError(
            f"{locate(recipe, method)}: expected a line that describes the data, got {found!r}: "
            "return one"
        )
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = file.relative_to(directory).as_posix()
        digest.update(f"{name}\0{compute_sha256(str(file))}".encode(errors="surrogateescape"))
    kind = type(recipe)
    code: dict[str, str] = {}
    if not is_by_value(kind):
        code = list_code(kind.__module__)
    note = {
        "description": redact_url(found),
        "source": redact_url(source),
        "fingerprint": digest.hexdigest(),
        "code": code,
        "recipe_version": class_version(kind),
        "license": str(recipe.data_license(source)),
    }
    (directory / NOTE).write_text(json.dumps(note), encoding="utf-8")


def class_version(kind: type[Recipe]) -> str:
    """Return the version of a class of recipes: `recipe_version` of its module.

    For a class that travels by value it is a SHA-256 of the class's code, of the values that the
    code refers to, and of the files.
    """
    if is_by_value(kind):
        return code_version(kind)
    return recipe_version(kind.__module__)


def recipe_version(module: str) -> str:
    """Return a SHA-256 of the library and of the files that decide what a recipe defined in
    `module` does.
    """
    packages = set(list_packages(module)) - {"flyte_ddp"}
    return compute_digest_of_files(
        {**source_files(["flyte_ddp"]), **imported_files(module, packages)}
    )


def list_code(module: str) -> dict[str, str]:
    """Return a SHA-256 of the library, and of each other file of Python that decides what a recipe
    defined in `module` does.
    """
    files = imported_files(module, set(list_packages(module)) - {"flyte_ddp"})
    return {"flyte_ddp": compute_library_digest()} | {
        name: compute_sha256(str(file)) for name, file in files.items() if file.suffix == ".py"
    }


def describe_data(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the note of `prepare_data`.

    Returns:
        "description": the data, in words; "source": the data's place, as the user gave it;
        "fingerprint": a SHA-256 of all prepared files; "code": the checksums of `list_code`;
        "recipe_version": a SHA-256 of the code that decides what the recipe does: the library, and
        the modules that the recipe imports of its own package and of the packages of recipes in
        settings.toml; "license": the data's licence, or "".
    """
    return dict(json.loads((Path(directory) / NOTE).read_text(encoding="utf-8")))
