"""The arguments of a rank: plain values that any process on any machine can read. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import RankFailure

MODEL_STATE = "model_state.pt"  # the trained model's file, beside the checkpoints
WRITE_GRACE = 20.0  # seconds in which a checkpoint that is being written may be completed after a rank has failed
CUDA_OUT_OF_MEMORY = "OutOfMemoryError"  # class name of torch.cuda.OutOfMemoryError


@dataclass(frozen=True)
class Job:
    """One run: the same for all of its ranks."""

    recipe: str
    config: TrainingConfig
    checkpoints: str  # fsspec URL of a directory; `MODEL_STATE` is written there too
    launched_at: float  # seconds since the epoch
    initial_state: str = ""  # fsspec URL of the state dict that a new run starts from; "" for fresh weights
    timed_batch_sizes: tuple[int, ...] = ()  # samples per rank and step whose costs are timed after the training
    run: str = ""  # the same for all attempts of a run, such as Flyte's execution and node; "" for a local run
    owner: str = ""  # token of the attempt that owns the checkpoints; see flyte_ddp/ownership.py


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


def grow_accumulation(job: Job, failure: RankFailure, world_size: int) -> Job | None:
    """Return `job` with twice the micro-batches per optimizer step, if a GPU ran out of memory and the user allows it.

    Returns:
        None if `failure` is another one, or the global batch cannot be split further over `world_size` ranks.
    """
    config = job.config
    if not config.grow_accumulation_on_oom or failure.error_name != CUDA_OUT_OF_MEMORY:
        return None
    accumulation = 2 * config.gradient_accumulation
    if config.global_batch_size % (world_size * accumulation):
        return None
    return dataclasses.replace(job, config=dataclasses.replace(config, gradient_accumulation=accumulation))


def rank_log(directory: str, rank: int) -> str:
    """Return the path of the file with everything that `rank` prints."""
    return os.path.join(directory, f"rank-{rank}.log")


def rank_stacks(directory: str, rank: int) -> str:
    """Return the path of the file where `rank` writes its Python stacks on SIGUSR1."""
    return os.path.join(directory, f"rank-{rank}.stacks")
