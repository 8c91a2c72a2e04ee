"""Which checkpoints stay: the newest, the best, and what this process has neither written nor read
whole.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import dataclass
from typing import Any

from flyte_ddp.checkpoints.files import (
    Damaged,
    is_half_written,
    is_manifest,
    is_tensors,
    read_file,
    read_manifest,
)
from flyte_ddp.checkpoints.ownership import check_owner
from flyte_ddp.errors import ConfigError
from flyte_ddp.storage import Storage

# after which a file that no manifest names is one of an attempt that was killed
ORPHAN_SECONDS = 24 * 3600.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Retention:
    """Deletes what newer checkpoints replace."""

    storage: Storage  # of the checkpoints, in which a failed try is not repeated
    num_kept: int  # newest checkpoints that stay; the best one stays besides
    owner: str  # as of `CheckpointStore`

    def __post_init__(self) -> None:
        self.files: set[str] = set()  # tensors that were read or written here, or begun
        self.resumed = ""  # the manifest that the run goes on from
        self.keeps_resumed = False  # it stays, because other ranks may still read it
        # manifests that were written or read whole here, by name
        self._own: dict[str, dict[str, Any]] = {}
        # manifests of whole checkpoints that this process cannot read
        self._unreadable: set[str] = set()
        self._has_removed_orphans = False

    def note_whole(self, name: str, manifest: dict[str, Any]) -> None:
        """Note that a checkpoint was written or read whole, so that it may be deleted when its time
        has come.
        """
        self._own[name] = manifest
        self.files.update(entry["file"] for entry in manifest["files"])

    def set_aside(self, storage: Storage, manifest_name: str, damage: Damaged) -> str:
        """Rename the files of a damaged checkpoint; return the line that reports it."""
        self.check_owner(storage)
        mark = f"skipped-{uuid.uuid4().hex[:8]}-"
        stem = manifest_name.removesuffix(".json")
        # The manifest goes last: without it, tensors that are left would be found by nothing.
        names = [
            name for name in storage.names() if name.startswith(f"{stem}-") and is_tensors(name)
        ]
        for name in (*names, manifest_name):
            with contextlib.suppress(FileNotFoundError):
                storage.rename(name, mark + name)
        return (
            f"{storage.join(manifest_name)} is damaged and was renamed to "
            f"{mark}{manifest_name}: {damage}"
        )

    def keep_least(self, keeps_best: bool) -> bool:
        """Delete all checkpoints but the newest and the best; return whether there were others.

        Args:
            keeps_best: else the newest alone stays.
        """
        self.keeps_resumed = False
        for manifest in () if keeps_best else self._own.values():
            manifest["best"] = False
        return self.keep_newest()

    def keep_newest(self) -> bool:
        """Delete from now on all checkpoints but the newest, the best and one still read; return
        whether there were.
        """
        self.num_kept, num_before = 1, len(self._own)
        if self._own:
            self.prune(max(self._own))
        return len(self._own) < num_before

    def prune(self, newest: str) -> None:
        """Delete what newer checkpoints replace. Only what was written or read whole here counts
        and goes.
        """
        names = set(self.storage.names())
        self._adopt_one(names)
        self._own = {name: manifest for name, manifest in self._own.items() if name in names}
        own = sorted(name for name in self._own if name <= newest)
        best = [name for name in own if self._own[name].get("best")]
        kept = {*own[-self.num_kept :], *best[-1:], *([self.resumed] if self.keeps_resumed else [])}
        # Manifests go first: without one a checkpoint does not exist, with one it must be whole.
        for name in own:
            if name not in kept:
                self.storage.delete(name)
                del self._own[name]
        referenced = {
            entry["file"] for manifest in self._own.values() for entry in manifest["files"]
        }
        for name in sorted(names):
            if is_half_written(name) or (name in self.files and name not in referenced):
                self.storage.delete(name)
                names.discard(name)
                self.files.discard(name)  # not those that a slower rank may still write
        self._remove_orphans(newest, names)

    def _remove_orphans(self, newest: str, names: set[str]) -> None:
        """Delete, once, the files of attempts that were killed between the tensors and the manifest
        of a checkpoint.
        """
        if self._has_removed_orphans:
            return
        self._has_removed_orphans = True
        files = {name for name in names if is_tensors(name) and name not in self.files}
        for name in filter(is_manifest, names if files else ()):
            try:
                files -= {entry["file"] for entry in read_manifest(self.storage, name)["files"]}
            except (ConfigError, Damaged):  # whatever it named stays
                files = {
                    file for file in files if not file.startswith(f"{name.removesuffix('.json')}-")
                }
        now = self.storage.modified(newest)  # by the store's clock, as the files' times
        for name in files:
            if now - self.storage.modified(name) > ORPHAN_SECONDS:
                self.storage.delete(name)

    def _adopt_one(self, names: set[str]) -> None:
        """Read the oldest checkpoint of an earlier attempt whole, so that it may be deleted when
        its time has come.
        """
        older = [
            name
            for name in names
            if is_manifest(name) and name < self.resumed and name not in self._own
        ]
        older = [name for name in older if name not in self._unreadable]
        if older:
            try:
                manifest = read_manifest(self.storage, min(older))
                for entry in manifest["files"]:  # one in memory at a time
                    read_file(self.storage, entry)
            except Damaged as damage:
                logger.warning("%s", self.set_aside(self.storage, min(older), damage))
            except (ConfigError, MemoryError) as error:  # it is whole, and not ours to delete
                self._unreadable.add(min(older))
                logger.warning("an older checkpoint stays: %s", error)
            else:
                self.note_whole(min(older), manifest)

    def check_owner(self, storage: Storage) -> None:
        if self.owner:
            check_owner(storage, self.owner)
