"""The ranks that each write a part of every checkpoint, as their writing threads see each other.

By the store where the ranks met, because a collective outside the training's thread would meet
those of the training. Rank 0 chooses the state that is written next, the others follow, and their
entries come back to it for the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from flyte_ddp.checkpoints.files import Entry
from flyte_ddp.errors import StorageUnavailable
from flyte_ddp.world import World

T = TypeVar("T")

BEGUN = "flyte_ddp/checkpoint"


class Peers:
    """All ranks of a gang whose states are in shards.

    Args:
        store: the rendezvous. Only calls that return at once are made: others would keep the
            collectives from it.

    Every method but the collectives raises StorageUnavailable if the store is gone, which is with
    rank 0's process.
    """

    def __init__(self, world: World, store: Store) -> None:
        self.rank = world.rank
        self.size = world.world_size
        self._world = world
        self._store = store

    def agree(self, numbers: Iterable[int]) -> list[int]:
        """Return rank 0's `numbers` on every rank. A collective, so for the training's thread."""
        return list(self._world.broadcast_object(sorted(numbers)))

    def all(self, is_so: bool) -> bool:
        """Return whether it is so on every rank. A collective, so for the training's thread."""
        return not self._world.all_reduce(float(not is_so))[0]

    def file(self, stem: str, rank: int) -> str:
        """Return the name of the file that `rank` writes."""
        return f"{stem}-{rank}of{self.size}.pt"

    def begin(self, number: int, stem: str) -> None:
        """On rank 0: let every rank write the state with this number."""
        _try(lambda: self._store.set(BEGUN, json.dumps([number, stem])))

    def begun(self) -> tuple[int, str]:
        """Return what rank 0 has begun last; (0, "") for nothing yet."""
        number, stem = self._get(BEGUN, [0, ""])
        return number, stem

    def publish(self, number: int, entry: Entry) -> None:
        """Report to rank 0 that this rank's part of the state with this number is in place."""
        _try(lambda: self._store.set(f"{BEGUN}/{self.rank}", json.dumps([number, entry])))

    def published(self, number: int, rank: int) -> Entry:
        """Return the entry of the part that `rank` has written of the state with this number; {}
        for none yet.
        """
        of, entry = self._get(f"{BEGUN}/{rank}", [0, {}])
        return dict(entry) if of == number else {}

    def _get(self, key: str, default: list[Any]) -> list[Any]:
        # `get` alone would wait for the key.
        values: list[Any] = _try(
            lambda: json.loads(self._store.get(key)) if self._store.check([key]) else default
        )
        return values


def _try(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:  # the training notices a dead peer too, and says which
        raise StorageUnavailable(
            f"checkpoints: rank 0 cannot be reached: {str(error).partition(chr(10))[0]}"
        ) from None
