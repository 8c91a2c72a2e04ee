"""A rank's process as its program and its session see it, and its link to the agent. Imports
no torch.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, TextIO

from flyte_ddp.checkpoints.memory import MemoryFile, MemoryPart
from flyte_ddp.launch.protocol.messages import (
    Entered,
    Inspect,
    Prepared,
    Profile,
    RankBeat,
    Resumed,
    Stop,
)
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.protocol.ranks import NodeRanks
from flyte_ddp.launch.protocol.signals import find_signal
from flyte_ddp.process.threads import start_thread
from flyte_ddp.rank.collectives import entered_collectives
from flyte_ddp.rank.profiler import answer_profile

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, TCPStore

# The share of the time before a stop in which a function may train on to its next save, if it
# never asks whether to stop.
SAVE_SHARE = 0.5


@dataclass(eq=False)
class AgentLink:
    """The rank's end of the pipe to its agent, and its place in the memory that they share.

    A thread receives the agent's messages. If the pipe ends, the agent is dead: the thread then
    kills this process and everything it started, because no other process can.
    """

    pipe: Connection
    beats: Sequence[RankBeat]
    local_rank: int
    stacks: TextIO  # takes the stacks of all threads
    # the signal that ends a function that never asks whether to stop
    stop_signal: signal.Signals = signal.SIGTERM
    saves_until: float = math.inf  # monotonic: half of the time that a stop leaves is over then
    # called when this rank is asked to end the run
    on_stop: Callable[[], None] = lambda: None
    # The thread that writes checkpoints sends messages, too.
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _data: Future[str] = field(default_factory=Future)  # the directory

    def __post_init__(self) -> None:
        # The session and the loop write their fields here, in memory shared with the agent.
        self.position = self.beats[self.local_rank]
        start_thread("agent-link", self._listen)

    @property
    def stop_requested(self) -> bool:
        """True once this rank was asked to end the run. The other ranks may not have been asked
        yet.
        """
        return self._stop.is_set()

    def beat(self, step: int) -> None:
        """Report progress; `step` counts optimizer steps from the start of the run."""
        self.position.progress_at = time.monotonic()
        self.position.step = step

    def set_pace(self, num_steps: int, seconds: list[float]) -> None:
        """Report this rank's number of steps in the attempt, and its own seconds in each phase of
        the steps.
        """
        self.position.seconds[:] = seconds
        self.position.num_steps = num_steps

    @property
    def all_ended(self) -> bool:
        """True once the function of each rank of this node has ended."""
        return all(each.has_ended for each in self.beats)

    def send(self, message: Any) -> None:
        """Send a message of messages.py to the agent."""
        with self._sending:
            self.pipe.send(message)

    def wait_for_data(self) -> Path:
        """Return the directory of the prepared data, as soon as the agent has it."""
        return Path(self._data.result())

    def _listen(self) -> None:
        while True:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)
            match message:
                case Prepared(directory):
                    self._data.set_result(directory)
                case Inspect():
                    # No thread runs meanwhile. A signal's handler would read the frames of running
                    # threads, and may crash. A file with contents shows that a signal came first.
                    if not os.fstat(self.stacks.fileno()).st_size:
                        faulthandler.dump_traceback(self.stacks)
                    self.send(Entered(entered_collectives()))
                case Profile():
                    start_thread("profile", answer_profile, message, self.send)
                case Stop(reason, seconds):
                    self.stop_signal = find_signal(reason)
                    self.saves_until = time.monotonic() + SAVE_SHARE * seconds
                    if not self._stop.is_set():
                        self._stop.set()
                        self.on_stop()


@dataclass
class RankProcess:
    """The process of one rank, as its program sees it."""

    job: Job
    node: NodeRanks
    local_rank: int
    listener: socket | None  # the listening socket of the rendezvous, on rank 0; None elsewhere
    link: AgentLink
    # take the parts of states that this rank saves in memory
    slots: list[MemoryFile] = field(default_factory=list)
    # take the parts that a rank of another node saves
    copies: list[MemoryFile] = field(default_factory=list)
    # parts of states that earlier attempts have left on this node
    parts: list[MemoryPart] = field(default_factory=list)
    # returns the store where the ranks meet; set when the rank begins
    open_store: Callable[[], Store] = field(init=False)

    @property
    def rank(self) -> int:
        """The number of this rank among all nodes' ranks."""
        return self.node.first_rank + self.local_rank

    def free_parts(self, attempt: int = -1, turn: int = 0) -> None:
        """Free the parts that earlier attempts have left in memory, but keep the state from which
        this attempt resumes.
        """
        self.link.send(Resumed(attempt, turn))
        self.parts = [each for each in self.parts if (each.attempt, each.turn) == (attempt, turn)]

    def choose_device(self) -> torch.device:
        """Return this rank's GPU, which its process uses from now on, or the CPU."""
        import torch

        if not self.node.use_gpus:
            return torch.device("cpu")
        # A rank on a MIG slice sees that slice alone, as device 0.
        device = torch.device("cuda", self.local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device

    def connect(self) -> TCPStore:
        """Return a new connection to the store, which rank 0's process serves. Call it once on
        rank 0. Operations have the default timeout of torch's process groups.
        """
        from torch.distributed import TCPStore
        from torch.distributed.constants import default_pg_timeout

        descriptor = None
        if self.listener is not None:
            descriptor = self.listener.detach()
        return TCPStore(
            self.node.host,
            self.node.port,
            self.node.world_size,
            is_master=self.listener is not None,
            timeout=default_pg_timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
