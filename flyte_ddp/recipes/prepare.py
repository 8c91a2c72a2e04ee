"""Prepare a recipe's data once, before any rank starts, and write beside it which data that is.
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

from flyte_ddp.config.by_value import code_version, is_by_value
from flyte_ddp.config.source_code import (
    compute_digest_of_files,
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
        method: another one of the recipe's that takes the same.

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
    note = {
        "description": redact_url(found),
        "source": redact_url(source),
        "fingerprint": digest.hexdigest(),
        "code": {} if is_by_value(type(recipe)) else list_code(type(recipe).__module__),
        "recipe_version": class_version(type(recipe)),
        "license": str(recipe.data_license(source)),
    }
    (directory / NOTE).write_text(json.dumps(note), encoding="utf-8")


def class_version(kind: type[Recipe]) -> str:
    """Return the version of a class of recipes: `recipe_version` of its module; of one that travels
    by value a SHA-256 of its own code, of the values that this refers to, and of the files.
    """
    return code_version(kind) if is_by_value(kind) else recipe_version(kind.__module__)


def recipe_version(module: str) -> str:
    """Return a SHA-256 of the library and of the files that decide what a recipe defined in
    `module` does.
    """
    packages = set(list_packages(module)) - {"flyte_ddp"}
    return compute_digest_of_files(
        {**source_files(["flyte_ddp"]), **imported_files(module, packages)}
    )


def list_code(module: str) -> dict[str, str]:
    """Return a SHA-256 of the library, and of each file of Python that decides besides it what a
    recipe defined in `module` does.
    """
    files = imported_files(module, set(list_packages(module)) - {"flyte_ddp"})
    return {"flyte_ddp": compute_digest_of_files(source_files(["flyte_ddp"]))} | {
        name: compute_sha256(str(file)) for name, file in files.items() if file.suffix == ".py"
    }


def describe_data(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the note of `prepare_data`.

    Returns:
        "description": the data, in words; "source": where they were read, as the user gave it;
        "fingerprint": a SHA-256 of all prepared files; "code": that of `list_code`;
        "recipe_version": a SHA-256 of the code that decides what the recipe does: the library, and
        what the recipe imports of its own package and of the packages of recipes in settings.toml;
        "license": that of the data, or "".
    """
    return dict(json.loads((Path(directory) / NOTE).read_text(encoding="utf-8")))
