"""The job of a process that predicts, and the names of its files. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from flyte_ddp.config import TrainingConfig
from flyte_ddp.recipes import Recipe

MANIFEST = "_manifest.json"  # which readers of the whole directory skip
DATA = "samples"  # in the manifest: `Predictor.describe_data`, as JSON


@dataclass(frozen=True)
class PredictionJob:
    """The same for all parts of the data, and for all processes of one node."""

    recipe: str | type[Recipe]
    config: TrainingConfig
    model_state: str  # URL with the checksum of its contents
    output: str  # URL of the directory of the parts
    batch_size: int  # samples of a forward pass
    part_size: int  # samples of a file, a multiple of `batch_size`
    # the driver's storage environment, with keys: for no log
    storage: dict[str, str] = field(default_factory=dict, repr=False)
    data: str = ""  # directory of the prepared data if this machine has it
    data_archive: str = ""  # else the URL of a zip of it
    num_threads: int = 1  # on CPUs


def part_name(number: int) -> str:
    """Return the name of the file with part `number`; the names sort as their samples do."""
    return f"part-{number:06d}.parquet"
