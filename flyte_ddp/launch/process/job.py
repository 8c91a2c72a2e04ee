"""The arguments of a rank: plain values that any process on any machine can read. Imports no torch."""

from __future__ import annotations

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
