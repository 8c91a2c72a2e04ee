"""Keep a rank's state in the memory of its node when its peers are lost, as it is between two steps.

Every rank of `ddp` has the whole state, and after an optimizer step all have the same, so one that is left is enough.
Its training thread may be anywhere then: in a collective that has failed or hangs, in a forward pass, in an evaluation.
So another thread writes the state, and holds a lock without which no optimizer step begins.

What a forward pass changes besides, such as the statistics of BatchNorm, is taken from before it. DDP has just made
these buffers those of rank 0 on every rank, and they are what a checkpoint of rank 0 has. An evaluation begins so, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from flyte_ddp.checkpoints.files import FORMAT
from flyte_ddp.checkpoints.resharding import find_tensors
from flyte_ddp.checkpoints.staging import map_tensors, readable
from flyte_ddp.checkpoints.state_file import CHECKSUM, save_state
from flyte_ddp.launch.process.link import RankProcess
from flyte_ddp.launch.process.memory import LOCK_TIMEOUT, free_memory
from flyte_ddp.world import World

MAX_BUFFER_BYTES = 16 << 20  # of buffers that are copied before each step: 1 ms

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StateKeeper:
    """Keeps the state of one rank."""

    model: nn.Module
    world: World
    collect_state: Callable[[], dict[str, Any]]  # returns it without copies of its tensors, while no step is taken
    step_of: Callable[[], int]  # returns the number of steps that are done
    finish: Callable[[], None] = lambda: None  # completes in the store what a run from this state will need

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._first_step = 0  # from which the rank has started, and which is kept already
        self._is_whole = False  # the state is that after a step
        self._buffers: dict[str, Tensor] = {}  # after `_buffers_step` steps, the same on every rank
        self._buffers_step = -1

    @contextlib.contextmanager
    def may_keep(self, process: RankProcess, is_compiled: bool, is_sharded: bool) -> Iterator[None]:
        """Keep the state if peers are lost in the block.

        Not if the rank has a part of the model only, if its buffers are large, or if it has buffers and is compiled, so
        that no hook runs before a forward pass. Not on a GPU either: its steps are queued, and when NCCL aborts an
        exchange of gradients, the optimizer step queued behind it uses a part of them.
        """
        buffers = list(self.model.buffers())
        num_bytes = sum(each.nbytes for each in buffers)
        is_lone = self.world.world_size == 1 or self.world.device.type == "cuda" or is_sharded
        if process.memory is None or is_lone or num_bytes > MAX_BUFFER_BYTES or (is_compiled and buffers):
            if num_bytes > MAX_BUFFER_BYTES and not is_lone and self.world.is_first:
                logger.warning(
                    "a model with %d bytes of buffers, more than %d, is not kept in memory when a rank is lost: "
                    "`memory_interval` keeps one with any",
                    *(num_bytes, MAX_BUFFER_BYTES),
                )
            yield
            return
        path = process.memory.path
        self._first_step = self.step_of()
        self._is_whole = True
        process.link.on_keep = lambda on_begin: self._keep(path, on_begin)
        hook = self.model.register_forward_pre_hook(self._before_forward) if buffers else None
        yield
        with self._lock:
            self._is_whole = False  # the model becomes that of the best epoch
        if hook:
            hook.remove()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change the state in the block: no other thread looks at it meanwhile, nor after an error."""
        with self._lock:
            was_whole, self._is_whole = self._is_whole, False
            yield
            self._is_whole = was_whole

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if model.training:
            self.note_buffers()

    def note_buffers(self) -> None:
        """Copy the buffers, which are those of rank 0 now, unless this was done since the last step."""
        step = self.step_of()
        if self._is_whole and step != self._buffers_step:
            with self._lock:
                self._buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
                self._buffers_step = step

    def _keep(self, path: str, on_begin: Callable[[int], None]) -> dict[str, Any] | None:
        """Write the state to `path` and return its fields of `Kept`; None if there is no state worth keeping."""
        if not self._lock.acquire(timeout=LOCK_TIMEOUT):  # never released: no step follows
            return None
        step = self.step_of()
        if not self._is_whole or step <= self._first_step:
            return None
        buffers = self._find_buffers(step)
        if buffers is None:
            return None
        state = self.collect_state()
        weights = state["model"]
        state["model"] = type(weights)(weights)
        vars(state["model"]).update(vars(weights))  # the versions of its modules' formats
        state["model"].update({name: buffer for name, buffer in buffers.items() if name in weights})
        state = map_tensors(readable(state), lambda each: each.detach())
        tensors = dict(find_tensors({name: state[name] for name in ("model", "optimizer")}))
        num_bytes = sum(each.nbytes for each in tensors.values())
        on_begin(num_bytes)
        if free_memory() <= num_bytes:
            return None
        # A buffer may have infinity on purpose, as a mask of attention.
        trained = {place: each for place, each in tensors.items() if place[0] != "model" or place[1] not in buffers}
        if not _are_finite(trained):
            logger.warning("this rank's state is not kept: a weight or the optimizer's state is not finite")
            return None
        with open(path, "wb") as file:
            entry = save_state({"format": FORMAT, **state}, file, with_crc32=False)
        self.finish()
        return {
            "step": step,
            "num_bytes": entry["bytes"],
            "checksum": entry[CHECKSUM],
            "version": str(torch.__version__),
            "digest": _digest(tensors),
        }

    def _find_buffers(self, step: int) -> dict[str, Tensor] | None:
        """Return the buffers that rank 0 has after `step` steps; None if this rank does not know them."""
        now = dict(self.model.named_buffers())
        if self._buffers_step == step:
            return self._buffers
        if self.world.is_first or not now:  # no forward pass has begun since, and none can
            return now
        before = self._buffers
        are_constant = before.keys() == now.keys() and all(torch.equal(now[name], before[name]) for name in now)
        return now if are_constant else None


def _are_finite(tensors: Mapping[Any, Tensor]) -> bool:
    """Return whether no step has spoiled the state."""
    floats = (each for each in tensors.values() if each.is_floating_point() and each.numel())
    return all(bool(torch.isfinite(torch.linalg.vector_norm(each.flatten().float(), torch.inf))) for each in floats)


def _digest(tensors: Mapping[Any, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for each in tensors.values():
        digest.update(each.contiguous().flatten().view(torch.uint8).numpy().data if each.numel() else b"")
    return digest.hexdigest()
