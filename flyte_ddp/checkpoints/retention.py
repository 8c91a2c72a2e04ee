"""Delete checkpoints that newer ones replace. "Newer" means of a later step.

The newest and the best stay. A checkpoint of another process stays, too, if it is newer than the
one that this run resumed from.
"""

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
    """Deletes what newer checkpoints replace. Names of manifests sort by their steps."""

    storage: Storage  # the place of the checkpoints; it does not retry a failed request
    num_kept: int  # number of newest checkpoints that stay; the best one stays as well
    owner: str  # token of the run, see `CheckpointStore`
    # manifest of the checkpoint that the run resumed from; "" for a run from step 0
    resumed_manifest: str = ""
    # The manifests, by name, of the checkpoints that may be deleted: this process wrote or read
    # them, or they are not newer than `resumed_manifest`.
    replaceable: dict[str, dict[str, Any]] = field(default_factory=dict)

    def rename_damaged(self, storage: Storage, manifest_name: str, damage: Damaged) -> str:
        """Rename the files of a damaged checkpoint to `skipped-...`. Return a line that reports it.

        Args:
            storage: the same place as `self.storage`, but it retries a failed request.
        """
        check_owner(storage, self.owner)
        mark = f"skipped-{uuid.uuid4().hex[:8]}-"
        stem = manifest_name.removesuffix(".json")
        # The manifest is renamed last: without it, nothing would find the other files after a
        # crash in between.
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

    def keep_one(self, keeps_best: bool) -> bool:
        """Delete all checkpoints but the newest. From now on, each new checkpoint replaces the one
        before it. Return whether a checkpoint was deleted.

        Args:
            keeps_best: keep the best checkpoint as well.
        """
        self.num_kept = 1
        num_before = len(self.replaceable)
        if not keeps_best:
            for manifest in self.replaceable.values():
                manifest["best"] = False  # The stored manifest does not change.
        if self.replaceable:
            self.prune(max(self.replaceable))
        return len(self.replaceable) < num_before

    def prune(self, newest_manifest: str) -> None:
        """Delete the checkpoints that newer ones replace, and the files of incomplete checkpoints.
        `newest_manifest` is the manifest that was just written, and is in `replaceable` already.

        Only rank 0 calls this, and no rank writes a checkpoint meanwhile. So each file of a
        checkpoint without a manifest is from a writer that was killed or has failed.
        """
        names = set(self.storage.names())
        manifests = set(filter(is_manifest, names))
        for name in manifests - self.replaceable.keys():
            if name <= self.resumed_manifest:
                with contextlib.suppress(ConfigError, Damaged):  # an unreadable manifest stays
                    self.replaceable[name] = read_manifest(self.storage, name)
        protected = manifests - self.replaceable.keys()
        for name in self.replaceable.keys() - names:
            del self.replaceable[name]  # deleted by hand
        steps = sorted(name for name in self.replaceable if name <= newest_manifest)
        best = [name for name in steps if self.replaceable[name].get("best")]
        kept = {*steps[-self.num_kept :], *best[-1:]}
        # Manifests are deleted first: a checkpoint with a manifest must be whole. If the run went
        # back to an earlier step, its old checkpoints of later steps would look like the newest, so
        # they are deleted, too.
        for name in list(self.replaceable):
            if name not in kept:
                self.storage.delete(name)
                del self.replaceable[name]
        referenced = {
            entry["file"] for manifest in self.replaceable.values() for entry in manifest["files"]
        }
        for name in names - referenced:
            is_orphan = is_tensors(name) and _manifest_of(name) not in protected
            if is_orphan or is_half_written(name):
                self.storage.delete(name)


def _manifest_of(tensors: str) -> str:
    """Return the name of the manifest for a file such as `step-0000000123-4f1c88a2-1of4.pt`."""
    checkpoint, _, _ = tensors.rsplit("-", 2)
    return f"{checkpoint}.json"
