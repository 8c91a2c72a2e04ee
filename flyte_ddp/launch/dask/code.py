"""The code that the ranks of other machines import, as a zip. Imports no torch.

The workers' image may be older than the code that this process runs (after a fast registration, or in an edited
checkout), or may not have the package at all. So the code travels with every run, some 100 kB of it.
"""

from __future__ import annotations

import io
import zipfile

from flyte_ddp.config.source_code import MAX_SIZE
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.process.programs import Program


def packed_code(program: Program) -> bytes:
    """Return a zip of the program's source files. Equal code has an equal zip.

    Raises:
        ConfigError: they are too large to be code alone.
    """
    files = program.source_files()
    if sum(file.stat().st_size for file in files.values()) > MAX_SIZE:
        folders = sorted({name.split("/")[0] for name in files})
        if program.directory:
            folders = [program.directory]
        raise ConfigError(
            f"{program.name}: expected code without data, got more than {MAX_SIZE >> 20} MiB in {', '.join(folders)}, "
            "which every node needs; keep data and results elsewhere, and give their path or URL"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            # Without the file's time, which differs between two checkouts of the same code.
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
