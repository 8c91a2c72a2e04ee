"""The ranks of one node, as each file of this room needs them. Imports nothing of ours."""

from __future__ import annotations

import os
from dataclasses import dataclass

TRAINING = "flyte_ddp.training.main:main"  # a name, because the module imports torch
# Signals that end a run early, as under torchrun. They are passed on to a function that does not
# ask for stop requests.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of one node, and where they meet the ranks of the other nodes."""

    first_rank: int
    num_ranks: int  # number of ranks on this node
    world_size: int
    use_gpus: bool
    num_threads: int  # CPU threads of each rank
    host: str = ""  # host of the rendezvous, as this node reaches it
    port: int = 0
    interface: str = ""  # network interface for the collectives
    node_rank: int = 0  # position of the node in the order of the ranks
    num_nodes: int = 1
    run_id: str = ""  # names the run, the same on all nodes and in all attempts
    num_restarts: int = 0  # restarts of the gang before this attempt
    max_restarts: int = 0
    # Directory for files on their way to the caller of the run; "" if the caller wants none. For an
    # agent on another machine it is the name of a directory there.
    results: str = ""
    # `num_threads` comes from the config, and wins over a user's OMP_NUM_THREADS
    has_set_threads: bool = False

    @property
    def numbers(self) -> range:
        """The ranks of this node."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def ranks_in_memory(self) -> list[int]:
        """The ranks that have their states in the memory of this node: its own ranks, and ranks of
        another node that are copied here.
        """
        return [*{*self.numbers, *map(self.copied_rank, self.numbers)}]

    def copied_rank(self, rank: int) -> int:
        """Return the rank that copies its states to the node of `rank`: the rank in the same place
        on the node before. On a single node this is `rank` itself.
        """
        return (rank - self.num_ranks) % self.world_size


def choose_threads(share: int) -> int:
    """Return the CPU threads of this process: its OMP_NUM_THREADS if there is one, else `share`."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given.isdecimal() and int(given):
        return int(given)
    return share


def semaphore_prefix(directory: str) -> str:
    """Return the start of the names of semaphores that ranks and their children make.

    Args:
        directory: directory of the ranks' files. Its name identifies the attempt.
    """
    return f"mp-{os.path.basename(directory)}"


def rank_log(directory: str, rank: int) -> str:
    """Return the path of the file that the standard output and standard error of `rank` are written
    to.
    """
    return os.path.join(directory, f"rank-{rank}.log")


def rank_stacks(directory: str, rank: int) -> str:
    """Return the path of the file where `rank` writes its Python stacks when it is asked to, or on
    SIGUSR1.
    """
    return os.path.join(directory, f"rank-{rank}.stacks")
