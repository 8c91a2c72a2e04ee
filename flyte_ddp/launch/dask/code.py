"""The code that the ranks run, as a zip: this package as it is here, and the recipe's own. Imports no torch.

The workers' image may be older than what this process runs, by a fast registration or an edited checkout, or may not
have the package at all. So the code travels with every run, some 100 kB of it.
"""

from __future__ import annotations

import importlib.util
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import BUILTIN

LARGEST = 32 << 20  # bytes of code; more is data that somebody left beside it


def packed_code(recipe: str) -> bytes:
    """A zip of package `flyte_ddp` and of the top-level package or module that defines `recipe`; equal for equal code.

    Raises:
        ConfigError: the recipe's package is too large to be code alone.
    """
    names = {"flyte_ddp", BUILTIN.get(recipe, recipe).replace(":", ".").split(".")[0]}
    buffer = io.BytesIO()
    size = 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(entry for package in names for entry in _files(package)):
            size += file.stat().st_size
            if size > LARGEST:
                raise ConfigError(
                    f"recipe: {recipe!r} lies in a package of more than {LARGEST >> 20} MiB, all of which every node "
                    "needs; accepted is one without data in it"
                )
            # Without the file's time, which two checkouts of the same code do not have in common.
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def packed_directory(directory: Path, target: Path) -> None:
    """Write a zip of all files below `directory`, not compressed, to `target`."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            archive.write(file, file.relative_to(directory).as_posix())


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """The files of a top-level package or module, each with its name relative to an entry of sys.path."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        if spec.origin is not None:
            yield os.path.basename(spec.origin), Path(spec.origin)
        return
    for location in spec.submodule_search_locations:
        for file in Path(location).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield f"{package}/{file.relative_to(location).as_posix()}", file
