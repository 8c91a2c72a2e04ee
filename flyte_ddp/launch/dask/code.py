"""The code that the ranks of other machines import, as a zip. Imports no torch.

The workers' image may be older than the code that this process runs (after a fast registration, or in an edited
checkout), or may not have the package at all. So the code travels with every run, some 100 kB of it.
"""

from __future__ import annotations

import io
import zipfile

from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import BUILTIN
from flyte_ddp.source_code import MAX_SIZE, packages_of, source_files


def packed_code(recipe: str) -> bytes:
    """Return a zip of the library, the package or module that defines `recipe`, and all packages of recipes.

    Equal code has an equal zip.

    Raises:
        ConfigError: the packages are too large to be code alone.
    """
    packages = packages_of(BUILTIN.get(recipe, recipe).replace(":", "."))
    files = source_files(packages)
    if sum(file.stat().st_size for file in files.values()) > MAX_SIZE:
        raise ConfigError(
            f"recipe: {recipe!r}: expected packages without data, got more than {MAX_SIZE >> 20} MiB in "
            f"{', '.join(packages)}, which every node needs"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            # Without the file's time, which differs between two checkouts of the same code.
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
