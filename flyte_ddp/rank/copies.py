"""A rank's parts of states in the memory of its node, and their copies in another node's: see
launch/protocol/memory.py.

A copy goes from rank to rank, over a process group that the two have for that alone. It is made
directly, over the store where all ranks meet: `new_group` would have to be called by all of them,
in the order of the program's own calls.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from flyte_ddp.launch.protocol.memory import NUM_FILES, MappedFile
from flyte_ddp.launch.protocol.messages import PartSaved
from flyte_ddp.rank.link import RankProcess

TIMEOUT = timedelta(days=20)  # for the next state to come; in milliseconds it still is a C int
HEADER_BYTES = 512  # of the fields of a part, pickled

logger = logging.getLogger(__name__)


class Slots:
    """The two files in memory that a rank writes its parts of states to, in turn.

    Args:
        open_store: returns the store where the ranks meet. Called where there is another node for
            the copies.
    """

    def __init__(self, process: RankProcess, open_store: Callable[[], Store]) -> None:
        self._files = [MappedFile(file) for file in process.slots]
        self._process = process
        self._open_store = open_store
        self._turn = 0
        self._complete_turn = 0  # the newest of which the part is here and where it is copied to
        # parts that are to be copied
        self._written: queue.SimpleQueue[dict[str, Any]] | None = None
        # by file: the fields of the `Part` in it, but for the attempt
        self.written: dict[int, dict[str, Any]] = {}

    @property
    def is_ready(self) -> bool:
        """True when the last part is here and where it is copied to, so that the one before it may
        be overwritten.
        """
        return bool(self._files) and self._complete_turn == self._turn

    def write(self, step: int, num_parts: int, save: Callable[[Any], tuple[int, str]]) -> None:
        """Write a part: nothing is ready until it is complete. `save` writes it to a file, and
        returns its size and checksum.
        """
        self._turn += 1
        with self._files[self._turn % NUM_FILES] as file:
            num_bytes, checksum = save(file)
        where = {
            "turn": self._turn,
            "step": step,
            "number": self._process.rank,
            "num_parts": num_parts,
        }
        part = {**where, "num_bytes": num_bytes, "checksum": checksum}
        self.written[self._turn % NUM_FILES] = part
        self._process.link.send(PartSaved(part))
        if not self._process.node.copy_distance:
            self._complete_turn = self._turn
            return
        if self._written is None:
            self._written = queue.SimpleQueue()
            threading.Thread(
                target=self._send_copies, args=(self._written,), name="copies", daemon=True
            ).start()
        self._written.put(part)

    def _send_copies(self, written: queue.SimpleQueue[dict[str, Any]]) -> None:
        try:
            store = self._open_store().clone()  # other threads use the connection of the first one
            store.set(_name_copies(self._process.rank), "")
            group = _connect(self._process.rank, 0, store)
            while True:
                part = written.get()
                group.send([_pack(part)], 1, 0).wait()
                group.send(
                    [self._files[part["turn"] % NUM_FILES].view(part["num_bytes"])], 1, 0
                ).wait()
                group.recv([torch.zeros(1)], 1, 0).wait()
                self._complete_turn = part["turn"]
        except RuntimeError as error:  # nothing is ready any more
            reason = str(error).partition("\n")[0]
            logger.warning(
                "no more states are kept in memory: they cannot be copied to another node: %s",
                reason,
            )


def receive_copies(process: RankProcess, open_store: Callable[[], Store]) -> None:
    """Take the parts of a rank of another node into the memory of this one, for as long as there
    are any.
    """
    source = process.node.rank_away(process.rank, -process.node.copy_distance)
    files = [MappedFile(file) for file in process.copies]
    # one of the two ranks, or that with the store, has ended
    with contextlib.suppress(RuntimeError):
        store = open_store().clone()
        store.wait([_name_copies(source)], TIMEOUT)
        group = _connect(source, 1, store)
        while files:
            header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
            group.recv([header], 0, 0).wait()
            part = pickle.loads(header.numpy().tobytes())
            with files[part["turn"] % NUM_FILES] as file:
                group.recv([file.view(part["num_bytes"])], 0, 0).wait()
            process.link.send(PartSaved(part))
            group.send([torch.zeros(1)], 0, 0).wait()


def _name_copies(source: int) -> str:
    return f"flyte_ddp/copies-{source}"


def _connect(source: int, rank: int, store: Store) -> Any:
    """Return the process group of the rank `source`, which is rank 0 of it, and of the one that has
    its copies.
    """
    return ProcessGroupGloo(PrefixStore(f"{_name_copies(source)}/group", store), rank, 2, TIMEOUT)


def _pack(part: dict[str, Any]) -> Tensor:
    return torch.frombuffer(
        bytearray(pickle.dumps(part).ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8
    )
