"""Bring code and data to the nodes: as zips, or as a directory of prepared data that the nodes see
too.

The workers' image may be older than the code that this process runs (after a fast registration, or
in an edited checkout), or may not have the package at all. So the code travels with every run, some
100 kB of it.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
import threading
import uuid
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client

from flyte_ddp.code.source_code import MAX_SIZE
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.nodes.dask import worker
from flyte_ddp.launch.nodes.dask.assignment import DaskNode
from flyte_ddp.launch.nodes.dask.calls import call_workers
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.recipes.prepare import NOTE, describe_data
from flyte_ddp.storage import Storage

logger = logging.getLogger(__name__)


@dataclass
class SharedData:
    """The data of runs that train at the same time, and the copy of the data for nodes that do not
    see the driver's directory.
    """

    storage: Storage  # store of the copy, which every worker reaches
    archive: str = ""  # URL of the copy
    # the answer of each worker, by its address
    _sees: dict[str, bool] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def locate(self, client: Client, directory: str, nodes: Sequence[DaskNode]) -> set[str]:
        """Return the addresses of nodes that see `directory`. Upload the copy for the others. A
        worker that still has the run's plugin is not asked again.
        """
        note = Path(directory, NOTE)
        new = [
            node.address for node in nodes if not (node.has_plugin and node.address in self._sees)
        ]
        answers = call_workers(client, new, worker.holds_file, str(note), note.read_bytes())
        sees_data = set()
        with self._lock:
            for node in nodes:
                answer = answers.get(node.address, self._sees.get(node.address))
                if isinstance(answer, bool):
                    self._sees[node.address] = answer
                if answer is True:
                    sees_data.add(node.address)
            if not self.archive and len(sees_data) < len(nodes):
                fingerprint = describe_data(directory)["fingerprint"]
                self._upload(Path(directory), f"data-{fingerprint[:16]}.zip")
        return sees_data

    def close(self) -> None:
        """Delete the copy, or log in one line that it stays. Does not raise."""
        try:
            if self.archive:
                Storage(self.storage.url, timeout=0).delete(os.path.basename(self.archive))
        except Exception as error:  # nothing that is left to clean up may fail a finished run
            logger.warning("%s could not be deleted: %s", self.archive, error)

    def _upload(self, directory: Path, name: str) -> None:
        with tempfile.TemporaryDirectory(prefix="data-") as scratch:
            archive = Path(scratch, name)
            packed_directory(directory, archive)
            self.storage.retry(
                lambda: self.storage.file_system.put_file(
                    str(archive), f"{self.storage.root}/{name}"
                )
            )
        self.archive = self.storage.join(name)


def check_same_directory(client: Client, storage: Storage, nodes: Sequence[DaskNode]) -> None:
    """Raise ConfigError if `storage` is a local path that is another directory on one of the
    nodes.
    """
    if not storage.is_local:
        return
    name = f".probe-{uuid.uuid4().hex}"
    storage.write(name, name.encode())
    addresses, path = [node.address for node in nodes], f"{storage.root}/{name}"
    answers = call_workers(client, addresses, worker.holds_file, path, name.encode())
    storage.delete(name)
    for node in nodes:
        if answers[node.address] is False:
            raise ConfigError(
                f"{storage.field}: expected a URL, or a path that all machines share, got "
                f"{storage.root!r}, which is another directory on {node}"
            )


def packed_directory(directory: Path, target: Path) -> None:
    """Write a zip of all files below `directory`, not compressed, to `target`."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive:
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            archive.write(file, file.relative_to(directory).as_posix())


def packed_code(program: Program) -> bytes:
    """Return a zip of the program's files, equal for equal code. Raises ConfigError if they are too
    large for code.
    """
    files = program.source_files()
    if sum(file.stat().st_size for file in files.values()) > MAX_SIZE:
        folders = [program.directory]
        if not program.directory:
            folders = sorted({name.split("/")[0] for name in files})
        raise ConfigError(
            f"{program.name}: expected code without data, got more than {MAX_SIZE >> 20} MiB in "
            f"{', '.join(folders)}, "
            "which every node needs; keep data and results elsewhere, and give their path or URL"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            # Without the file's time, which differs between two checkouts of the same code.
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
