"""The layers that each rank's forward pass uses, where the ranks hold one model together (fsdp). A
rank that leaves out a layer would else end the others without its name, or train on a mixture of
two layers of one shape.

Each rank compares a pass with its own last one. Only where they differ it notes the layer in the
store, and waits until all ranks have noted the same. So a usual pass needs no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.sharding import is_sharded
from flyte_ddp.world import RankNotes

# Seconds for the note of another rank, which may load its batch until then: half of the default
# `stall_timeout`.
MAX_WAIT = 150.0
# Seconds in the first pass, in which every rank writes a note: a late rank is only loading.
MAX_FIRST_WAIT = 1800.0


@dataclass(eq=False)
class PassLayers:
    """One rank's record of the layers that a forward pass has used.

    Args:
        place: where the model is defined, for the error.
    """

    model: nn.Module
    notes: RankNotes
    place: str
    _number: int = 0  # number of forward passes
    _num_notes: int = 0
    _is_in_pass: bool = False  # False where the backward pass computes activations again
    # the parts that this pass has gathered, in their order, and its layers with weights
    _parts: list[str] = field(default_factory=list)
    _layers: set[str] = field(default_factory=set)
    # the same, in the last training pass and in the last evaluation
    _last_parts: dict[bool, list[str]] = field(default_factory=dict)
    _last_layers: set[str] = field(default_factory=set)

    def watch(self) -> None:
        """Let each forward pass of the model check the layers that it uses."""
        for name, module in self.model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda *_, name=name: self._layers.add(name))
            if is_sharded(module) and module is not self.model:
                # This hook runs before the hook that gathers the weights.
                module.register_forward_pre_hook(
                    lambda *_, name=name: self._begin_part(name), prepend=True
                )
        self.model.register_forward_pre_hook(self._begin, prepend=True)
        self.model.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._number += 1
        self._is_in_pass = True
        self._parts, self._layers = [], set()

    def _begin_part(self, name: str) -> None:
        """Note the part of the model that is gathered next. Compare it if the last pass gathered
        another part here.

        Raises:
            ConfigError: other ranks gather another part.
        """
        if not self._is_in_pass:
            return
        number = len(self._parts)
        self._parts.append(name)
        last = self._last_parts.get(self.model.training, [])
        if last[number : number + 1] != [name]:
            self._compare(name)

    def _end(self, *_: Any) -> None:
        """Note the layers of the pass, before their gradients are exchanged.

        Raises:
            ConfigError: other ranks have used other layers.
        """
        self._is_in_pass = False
        changed = self._last_parts.get(self.model.training, [])[len(self._parts) :]
        if torch.is_grad_enabled():
            changed += sorted(self._layers ^ self._last_layers)
            self._last_layers = self._layers
        if changed:
            layers: Sequence[str] = ()
            if torch.is_grad_enabled():
                layers = sorted(self._layers)
            self._compare(changed[0], layers)
        self._last_parts[self.model.training] = self._parts

    def _compare(self, name: str, layers: Sequence[str] = ()) -> None:
        """Wait until all ranks have noted the same.

        Args:
            name: the name of the next part, or of the first change since the last pass.
            layers: the layers that the whole pass has used.

        Raises:
            ConfigError: a rank has noted something else, or nothing in time.
        """
        own = [self._number, len(self._parts), name, list(layers)]
        max_wait = MAX_WAIT
        if self.model.training not in self._last_parts:
            max_wait = MAX_FIRST_WAIT
        self._num_notes += 1
        for other in self.notes.gather(own, self._num_notes, max_wait):
            if other is None:
                self._refuse(name)
            if other != own:
                self._refuse(min({*other[3]} ^ {*layers}, default=name))

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigError(
            f'{self.place}: expected with "parallel": "fsdp" the same layers in the forward passes '
            f"of all ranks, got {name} on some of them alone: use all in each pass"
        )
