"""The arguments of a rank: plain values that any process on any machine can read. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from flyte_ddp.launch.process.programs import Program


@dataclass(frozen=True)
class Job:
    """One run: the same for all of its ranks."""

    program: Program  # that each rank runs
    checkpoints: str  # fsspec URL of a directory, for `MODEL_STATE` too; "" for a function that keeps none
    launched_at: float  # seconds since the epoch
    run: str = ""  # the same for all attempts of a run, such as Flyte's execution and node; "" for a local run
    owner: str = ""  # token of the attempt that owns the checkpoints; see flyte_ddp/checkpoints/ownership.py
    is_kept: bool = True  # the checkpoints outlive the run


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of one node, and where they meet the ranks of the other nodes."""

    first_rank: int
    num_ranks: int  # on this node
    world_size: int
    host: str  # of the rendezvous, as this node reaches it
    port: int
    interface: str  # network interface for the collectives
    use_gpus: bool
    num_threads: int  # CPU threads of each rank
    node_rank: int = 0  # in the order of the ranks
    num_nodes: int = 1
    run_id: str = ""  # names the run, the same on all nodes and in all attempts
    num_restarts: int = 0  # of the gang before this attempt
    max_restarts: int = 0


def semaphore_prefix(directory: str) -> str:
    """Return the start of the names of semaphores that ranks and their children make.

    Args:
        directory: of the ranks' files, which names the attempt.
    """
    return f"mp-{os.path.basename(directory)}"
