"""The copy of the prepared data beside the checkpoints, for nodes that do not see the driver's directory."""

from __future__ import annotations

import logging
import os
import zipfile
from pathlib import Path

from flyte_ddp.storage import Storage

logger = logging.getLogger(__name__)


def packed_directory(directory: Path, target: Path) -> None:
    """Write a zip of all files below `directory`, not compressed, to `target`."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive:
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            archive.write(file, file.relative_to(directory).as_posix())


def delete_archive(storage: Storage, url: str) -> None:
    """Delete the copy of the data at `url`, or log one line that it is left behind."""
    once = Storage(storage.url, timeout=0)
    try:
        once.delete(os.path.basename(url))
    except Exception as error:  # nothing that is left to clean up may fail a finished run
        logger.warning("%s could not be deleted: %s", url, error)
