"""`flyte-ddp predict RECIPE`: predict new data with a trained model. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flyte_ddp.launch.run_options import RECIPE_OPTIONS, add_options, read_given
from flyte_ddp.prediction.predict import BATCH_SIZE, PART_SIZE, predict
from flyte_ddp.storage import redact_url


def main(arguments: Sequence[str]) -> str:
    """Predict, and return where the predictions are. Raises as `predict`."""
    text = "Predict new data with a trained model, into Parquet files. The same command resumes."
    parser = argparse.ArgumentParser("flyte-ddp predict", description=text, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="of the model")
    own = (
        ("--model-state", "path or URL of a state dict, or the directory of a champion", None),
        ("--output", "directory or URL for the predictions", None),
        ("--batch-size", f"samples of a forward pass (default {BATCH_SIZE})", BATCH_SIZE),
        ("--part-size", f"samples of a file (default {PART_SIZE})", PART_SIZE),
    )
    add_options(parser, (*own, *RECIPE_OPTIONS))
    options = parser.parse_args(arguments)
    made = predict(
        options.recipe,
        options.model_state,
        options.data,
        options.output,
        batch_size=options.batch_size,
        part_size=options.part_size,
        config=read_given("--config", options.config) or {},
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        cluster=read_given("--cluster", options.cluster),
    )
    files = f"{len(made.paths)} file{'s' * (len(made.paths) != 1)}"
    return f"{made.num_rows:,} predictions in {files} of {redact_url(options.output)}"
