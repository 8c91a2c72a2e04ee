"""The job of the ranks that predict, and the names of its files. Imports no torch."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.recipes import Recipe

MANIFEST = "_manifest.json"  # Readers of the whole directory skip names with _ and with a dot.
DATA = "samples"  # key of the manifest for `Predictor.describe_data`, as JSON
RUN = ".run"  # directory below the output that exists while a run does
RANK = "flyte_ddp.prediction.rank:main"  # a name, because the module imports torch


@dataclass(frozen=True)
class PredictionJob:
    """The program of a rank that predicts, the same for all ranks."""

    recipe: str | type[Recipe]
    config: TrainingConfig
    model_state: str  # URL with the checksum of its contents
    output: str  # URL of the directory of the parts
    batch_size: int  # samples of a forward pass
    part_size: int  # samples of a file, a multiple of `batch_size`
    record: dict[str, Any]  # description of the call for the manifest

    def __call__(self) -> bytes:
        pkgutil.resolve_name(RANK)(self)
        return b""


def part_name(number: int) -> str:
    """Return the name of the file with part `number`. Names sort in the order of the samples."""
    return f"part-{number:06d}.parquet"
