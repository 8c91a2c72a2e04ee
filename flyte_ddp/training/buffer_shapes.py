"""The shapes of a model's buffers on all ranks, which DDP sends before each forward pass. A buffer
that grows with the batch, such as a mask, would else end the ranks without its name.

A rank notes in the store that a shape has changed, before the exchange of the gradients. So at the
next forward pass all ranks know of it, and no step needs a collective more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flyte_ddp.errors import ConfigError
from flyte_ddp.world import RankNotes

KEY = "flyte_ddp/buffers"  # the number of all ranks' notes

Shapes = dict[str, list[int]]  # shapes by the names of the buffers


def has_own_buffers(model: nn.Module) -> bool:
    """Return whether a module of another class than torch's has a buffer. Torch's
    own buffers do not grow.
    """
    for module in model.modules():
        has_buffer = any(True for _ in module.buffers(recurse=False))
        if has_buffer and not type(module).__module__.startswith("torch."):
            return True
    return False


@dataclass(eq=False)
class BufferShapes:
    """One rank's notes of its shapes, and their comparison with other ranks' notes.

    Args:
        place: where the model is defined, for the error.
    """

    model: nn.Module
    notes: RankNotes
    place: str
    _number: int = 0  # number of forward passes
    _num_compared: int = 0  # notes that were compared
    # pairs of a pass's number and the shapes after the pass
    _notes: list[tuple[int, Shapes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = self._last = self._read()

    def note(self, *_: Any) -> None:
        """Note shapes that a forward pass has changed."""
        shapes = self._read()
        if shapes != self._last:
            self._last = shapes
            self._notes.append((self._number, shapes))
            self.notes.write(self._notes)
            self.notes.store.add(KEY, 1)

    def compare(self, *_: Any) -> None:
        """Compare the shapes before a forward pass, if earlier passes have left notes.

        Raises:
            ConfigError: a rank has other shapes; the same line on all ranks.
        """
        self._number += 1
        num_notes = self.notes.store.add(KEY, 0)
        if num_notes == self._num_compared:
            return
        ranks = range(self.notes.world.world_size)
        notes = [self.notes.read(rank) or [] for rank in ranks]
        # A rank that is ahead may have noted a later pass. Later passes are compared later.
        found = []
        self._num_compared = 0
        for own in notes:
            earlier = [each for each in own if each[0] < self._number]
            self._num_compared += len(earlier)
            shapes = self._first
            if earlier:
                shapes = earlier[-1][1]
            found.append(shapes)
        for rank in ranks:
            for name in {**found[0], **found[rank]}:
                one, other = found[0].get(name, "none"), found[rank].get(name, "none")
                if one != other:
                    raise ConfigError(
                        f"{self.place}: expected buffers of one shape on all ranks, got {name} of "
                        f"{one} on rank 0 and {other} on rank {rank}: let it not grow with the "
                        "batch, or give the config broadcast_buffers: false"
                    )

    def _read(self) -> Shapes:
        return {name: list(each.shape) for name, each in self.model.named_buffers()}
