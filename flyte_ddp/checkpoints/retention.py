"""Which checkpoints stay: the newest, the best, and the checkpoints that other processes wrote."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.checkpoints.files import (
    Damaged,
    is_half_written,
    is_manifest,
    is_tensors,
    read_manifest,
)
from flyte_ddp.checkpoints.ownership import check_owner
from flyte_ddp.errors import ConfigError
from flyte_ddp.storage import Storage


@dataclass(eq=False)
class Retention:
    """Deletes what newer checkpoints replace."""

    storage: Storage  # the place of the checkpoints; it does not repeat a failed try
    num_kept: int  # newest checkpoints that stay; the best one stays besides
    owner: str  # the owner's token, see `CheckpointStore`
    resumed: str = ""  # the manifest that the run goes on from; older ones are its own
    # the run's manifests by name: written or read by this process, or older than `resumed`
    own: dict[str, dict[str, Any]] = field(default_factory=dict)

    def set_aside(self, storage: Storage, manifest_name: str, damage: Damaged) -> str:
        """Rename the files of a damaged checkpoint; return the line that reports it."""
        check_owner(storage, self.owner)
        mark = f"skipped-{uuid.uuid4().hex[:8]}-"
        stem = manifest_name.removesuffix(".json")
        # The manifest is renamed last: without it, nothing would find the tensors that are left.
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

    def keep_newest(self, keeps_best: bool) -> bool:
        """Delete all checkpoints but the newest, now and in the future. Return whether there were
        others.

        Args:
            keeps_best: keep the best checkpoint, too.
        """
        self.num_kept, num_before = 1, len(self.own)
        if not keeps_best:
            for manifest in self.own.values():
                manifest["best"] = False
        if self.own:
            self.prune(max(self.own))
        return len(self.own) < num_before

    def prune(self, newest: str) -> None:
        """Delete the checkpoints that newer ones replace, and files that killed writers left."""
        names = set(self.storage.names())
        for name in filter(is_manifest, names):
            if name <= self.resumed and name not in self.own:
                with contextlib.suppress(ConfigError, Damaged):  # an unreadable manifest stays
                    self.own[name] = read_manifest(self.storage, name)
        others = set(filter(is_manifest, names)) - self.own.keys()
        self.own = {name: manifest for name, manifest in self.own.items() if name in names}
        own = sorted(name for name in self.own if name <= newest)
        best = [name for name in own if self.own[name].get("best")]
        kept = {*own[-self.num_kept :], *best[-1:]}
        # Manifests are deleted first: a checkpoint with a manifest must be whole. Later steps are
        # deleted, too, because an older save of a later step would look like the newest.
        for name in list(self.own):
            if name not in kept:
                self.storage.delete(name)
                del self.own[name]
        referenced = {
            entry["file"] for manifest in self.own.values() for entry in manifest["files"]
        }
        for name in names - referenced:
            is_left = is_tensors(name) and f"{name[:15]}.json" not in others
            if is_left or is_half_written(name):
                self.storage.delete(name)
