"""`flyte-ddp predict RECIPE`: predict new data with a trained model. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from flyte_ddp.config.options import make_parser
from flyte_ddp.launch.run_options import RECIPE_OPTIONS, end_as_shell, read_gang_fields, read_given
from flyte_ddp.prediction.predict import BATCH_SIZE, PART_SIZE, Predictions, predict
from flyte_ddp.storage import redact_url

ABOUT = "Predict new data with a trained model, into Parquet files. The same command resumes."
OPTIONS = (
    ("recipe", "of the model", None),
    ("--model-state", "path or URL of a state dict, or the directory of a champion", None),
    ("--output", "directory or URL for the predictions", None),
    ("--batch-size", f"samples of a forward pass (default {BATCH_SIZE})", BATCH_SIZE),
    ("--part-size", f"samples of a file (default {PART_SIZE})", PART_SIZE),
    *RECIPE_OPTIONS,
)


def main(arguments: Sequence[str]) -> int | str:
    """Predict, and return the place of the predictions, or the exit status of a run that was
    stopped. Raises as `predict`.
    """
    options = make_parser("predict", ABOUT, OPTIONS, allow_abbrev=False).parse_args(arguments)
    made: list[Predictions] = []

    def call() -> None:
        predictions = predict(
            options.recipe,
            options.model_state,
            options.data,
            options.output,
            batch_size=options.batch_size,
            part_size=options.part_size,
            config=read_given("--config", options.config) or {},
            **read_gang_fields(options),
        )
        made.append(predictions)

    status = end_as_shell(call)
    if not made:
        return status
    num_files = len(made[0].paths)
    files = f"{num_files} file{'s' * (num_files != 1)}"
    return f"{made[0].num_rows:,} predictions in {files} of {redact_url(options.output)}"
