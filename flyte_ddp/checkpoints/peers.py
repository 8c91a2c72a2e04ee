"""The ranks that each write a part of every checkpoint, as their writing threads see each other.

The ranks use the store where they met, because a collective outside the training's thread would
meet the training's collectives. Rank 0 chooses the state that is written next. The other ranks
follow, and send their entries to rank 0 for the manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed import Store

from flyte_ddp.errors import StorageUnavailable, first_line
from flyte_ddp.world import RankNotes, World

T = TypeVar("T")


@dataclass(eq=False)
class Peers:
    """The ranks that save a state together: all of a gang, or this one alone.

    Every method raises StorageUnavailable if the store is gone, which is with rank 0's process.
    """

    world: World  # the ranks; the training's thread alone calls its collectives
    # The rendezvous; None for a rank alone. Only calls that return at once are made: others would
    # keep the collectives from it.
    store: Store | None = None

    def file(self, stem: str) -> str:
        """Return the name of the file that this rank writes."""
        return f"{stem}-{self.world.rank}of{self.world.world_size}.pt"

    def announce(self, number: int, value: Any) -> None:
        """Tell the other ranks about the state with this number: rank 0 the beginning of its files'
        names, as it begins to write it, another rank the entry of its part, when that is in place.
        """
        if self.store is not None:
            _try(lambda: self._notes.write([number, value]))

    def announced(self, rank: int) -> tuple[int, Any]:
        """Return what `rank` has announced last; (0, "") for nothing yet."""
        number, value = _try(lambda: self._notes.read(rank)) or (0, "")
        return number, value

    @property
    def _notes(self) -> RankNotes:
        assert self.store is not None  # there is another rank
        return RankNotes(self.store, "flyte_ddp/checkpoint", self.world)


def _try(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:  # the training notices a dead peer too, and says which
        raise StorageUnavailable(
            f"checkpoints: rank 0 cannot be reached: {first_line(error)}"
        ) from None
