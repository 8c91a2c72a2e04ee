"""The job of the ranks that predict, and the names of its files. Imports no torch."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.recipes import Recipe

MANIFEST = "_manifest.json"  # which readers of the whole directory skip
DATA = "samples"  # in the manifest: `Predictor.describe_data`, as JSON
RUN = ".run"  # below the output while a run is there; readers skip it, too
RANK = "flyte_ddp.prediction.rank:main"  # by name, because its module imports torch


@dataclass(frozen=True)
class PredictionJob:
    """The program of a rank that predicts, the same for all ranks."""

    recipe: str | type[Recipe]
    config: TrainingConfig
    model_state: str  # URL with the checksum of its contents
    output: str  # URL of the directory of the parts
    batch_size: int  # samples of a forward pass
    part_size: int  # samples of a file, a multiple of `batch_size`
    record: dict[str, Any]  # of the call, for the manifest

    def __call__(self) -> bytes:
        pkgutil.resolve_name(RANK)(self)
        return b""


def part_name(number: int) -> str:
    """Return the name of the file with part `number`; the names sort as their samples do."""
    return f"part-{number:06d}.parquet"
