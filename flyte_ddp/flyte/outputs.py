"""The typed outputs of the training workflows, and the directory for the outputs of a local run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile
from flytekit.types.structured import StructuredDataset

from flyte_ddp.errors import ConfigError, log_failures
from flyte_ddp.events import plain
from flyte_ddp.flyte.flyte_context import is_flyte_task
from flyte_ddp.flyte.inputs import given
from flyte_ddp.launch.run_observers import make_run_directory
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.storage import fetch_file
from flyte_ddp.task_run.files import EXPORT
from flyte_ddp.task_run.run import TaskRun
from flyte_ddp.task_run.training import Trained

OUTPUTS = "outputs.json"  # file with all outputs that are not files themselves
# Outputs that begin like this have been summarized on the terminal already.
SUMMARIZED = tuple(
    f"{name}Outputs(" for name in ("Training", "Retraining", "Sweep", "Scaling", "Script")
)


class TrainingOutputs(NamedTuple):
    """The outputs of a training run.

    Load the model on any machine with `recipe.model().load_state_dict(torch.load(path,
    weights_only=True))`.
    """

    # accuracy on the held-out data after each epoch, in [0, 1]; empty without an accuracy
    epoch_accuracies: list[float]
    # the held-out loss and every metric of the recipe after each epoch, by name
    epoch_metrics: dict[str, list[float]]
    # the state dict after the best or the last epoch (config.model_state), on the CPU
    model_state: PythonPickledFile
    report: FlyteFile  # the HTML page that the Deck shows too
    history: FlyteFile  # every event of the run, as JSON lines
    export: FlyteDirectory  # the weights as safetensors, and the run card: docs/outputs.md


class RetrainingOutputs(NamedTuple):
    """The outputs of a retraining, whether it promoted a model, kept the champion, or had nothing
    to train.
    """

    outcome: str  # value of flyte_ddp.promotion.policy.Outcome
    reason: str  # reason for the outcome, one line for people
    champion: str  # the version in use now; "" for none
    # measured test_loss and metrics of challenger and champion
    metrics: dict[str, float]
    report: FlyteFile  # the HTML page that the Deck shows too
    # the challenger's files, as in `TrainingOutputs.export`; None if nothing was trained
    export: FlyteDirectory | None


def output_file(run: TaskRun, name: str) -> FlyteFile:
    """Return file `name` of the task's directory as an output. In a pod the output has a URL that
    is known already.
    """
    files = run.files
    with log_failures(name):
        if files.output_directory:
            return FlyteFile(shutil.copy(files.directory / name, files.output_directory / name))
    return FlyteFile(str(files.directory / name), remote_path=files.url(name))


def output_model_state(run: TaskRun, name: str, url: str) -> PythonPickledFile:
    """Return the state dict at `url`, as `output_file`."""
    file = run.files.for_outputs / name
    fetch_file(url, file)
    return PythonPickledFile(str(file), remote_path=run.files.url(name))


def output_export(run: TaskRun, trained: Trained) -> FlyteDirectory:
    """Return the files that other programs load, with the run card, as `output_file`."""
    finished = trained.finished
    directory = run.files.collect_export(finished, trained.card)
    if finished.not_exported:
        run.say(f"not exported: {finished.not_exported}")
    return FlyteDirectory(str(directory), remote_directory=run.files.url(EXPORT))


def output_report(run: TaskRun) -> FlyteFile:
    """Complete the report, write it to a file and return it, as `output_file`."""
    run.report.close(None)
    run.report.write(run.files.directory / "report.html")
    return output_file(run, "report.html")


def say_outputs(run: TaskRun, outputs: Any) -> None:
    """Print the places of the files among the outputs: URLs in a pod, paths in a local run. Write
    the other outputs to a file beside them.
    """
    keep_values(run.files.output_directory, OUTPUTS, outputs)
    for name, file in outputs._asdict().items():
        if isinstance(file, (FlyteFile, FlyteDirectory)):
            url = getattr(file, "remote_directory", None) or getattr(file, "remote_path", None)
            place = url or str(file.path).removeprefix(f"{os.getcwd()}/")
            run.say(f"{name.replace('_', ' '):<20}{place}")
    if not run.execution.is_local:
        page = run.execution.url or "Flyte's console"
        run.say(f'the report is also in {page}: click this task, then "Flyte Deck"')


def keep_values(directory: Path | None, name: str, outputs: Any) -> None:
    """Write the outputs that are no files to file `name` of a local run's directory, if it has
    one.
    """
    files = FlyteFile, FlyteDirectory, StructuredDataset, type(None)
    values = {
        key: value for key, value in outputs._asdict().items() if not isinstance(value, files)
    }
    if directory is not None and values:
        with log_failures(name):
            text = json.dumps(plain(values), indent=1, default=given, allow_nan=False)
            (directory / name).write_text(f"{text}\n", encoding="utf-8")


def open_output_directory(output: str, name: str) -> Path | None:
    """Return the directory of a local run's outputs: `output`.

    The default in `pyflyte run` is a new directory, runs/NAME, for all tasks of the command.
    Otherwise the default is None, which means the task's own directory.

    Raises:
        ConfigError: the directory takes no files, or a run on Flyte got a directory.
    """
    if is_flyte_task():
        if output:
            raise ConfigError(
                "output: expected none in a run on Flyte, which keeps the outputs "
                f"itself, got {output!r}"
            )
        return None
    command = click.get_current_context(silent=True)
    # Only the first task of a command makes the directory.
    if command is not None and __name__ not in command.meta:
        command.with_resource(contextlib.redirect_stdout(_WithoutOutputs(sys.stdout)))
        if not output:
            output = str(make_run_directory(name.rpartition(".")[2]))
            print_line(f"outputs: {output}")
        command.meta[__name__] = output
    if command is not None:
        output = command.meta[__name__]
    if not output:
        return None
    return _make_directory(output)


def _make_directory(output: str) -> Path:
    """Make and return the user's directory for the outputs of a local run. Raises ConfigError if
    the directory takes no files.
    """
    try:
        directory = Path(output).expanduser().resolve()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"output: expected a directory that this process may write, got {output!r}: {reason}"
        ) from None


class _WithoutOutputs:
    """The standard output of `pyflyte run` without flytekit's last line.

    That line contains all outputs, with every epoch's numbers. flytekit has no option against it,
    and outputs.json has the numbers.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if text.startswith(SUMMARIZED):
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
