"""The directory where a script's ranks leave files for whoever started it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flyte_ddp.storage import write_file

OUTPUTS_VARIABLE = "FLYTE_DDP_OUTPUTS"  # in ranks: the directory on this node; the Dask worker removes it after the run


@contextlib.contextmanager
def outputs_directory(url: str) -> Iterator[str]:
    """Yield a directory of this machine in a rank, and copy its files to `url` when rank 0 leaves the block.

    All ranks of a node have the same one. A local `url` is that directory itself; "" yields "".

    Raises:
        StorageUnavailable, StorageDenied: the files cannot be copied.
    """
    directory = os.environ[OUTPUTS_VARIABLE] if "://" in url else url
    if directory:
        os.makedirs(directory, exist_ok=True)
    yield directory
    if directory != url and os.environ["RANK"] == "0":
        for file in sorted(Path(directory).rglob("*")):
            if file.is_file():
                write_file(f"{url.rstrip('/')}/{file.relative_to(directory).as_posix()}", file.read_bytes(), "outputs")
