"""The observers of `flyte-ddp run`, by its options. Each is imported when it is asked
for.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.events import Listener
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.process.invocation import POD_VARIABLE, find_entered_command
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.storage import Storage

RUNS = "runs"  # where the directory of a run is made
# a file beside the checkpoints, so that every attempt continues the same run of a tracker
RUN_ID = "tracker-run-id"
MAX_NAME = 60  # characters of a script's name in the id of its run


# The options that `make_observers` reads.
OBSERVER_OPTIONS = (
    ("--history", "file for the events of the run, as JSON lines", ""),
    ("--report", "file for the run's HTML page", ""),
    ("--wandb", "project of Weights & Biases, which records the run", ""),
    (
        "--mlflow",
        "experiment of MLflow, whose server MLFLOW_TRACKING_URI names, which records the run",
        "",
    ),
    ("--tensorboard", "directory or URL for TensorBoard, in which the run gets one", ""),
)


def resume_command(checkpoints: str = "") -> str:
    """Return this process's command as it was typed, for a shell, which resumes its run; with
    `checkpoints` if it did not name them.
    """
    more = ["--checkpoints", checkpoints] if checkpoints else []
    return shlex.join([*find_entered_command(), *more])


@contextlib.contextmanager
def show_resume_command(is_kept: bool) -> Iterator[None]:
    """Print the command that resumes the run when a script's run is stopped and its checkpoints
    stay.
    """
    try:
        yield
    except TrainingStopped:
        is_script = hasattr(sys.modules["__main__"], "__file__")  # and no notebook
        if is_kept and is_script and POD_VARIABLE not in os.environ:
            print_line(f"to resume: {resume_command()}")
        raise


def make_run_directory(name: str) -> Path:
    """Make the directory of a run, runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is
    not there. Raises ConfigError if it cannot be made.
    """
    try:
        os.makedirs(RUNS, exist_ok=True)
        for number in itertools.count(1):
            directory = Path(RUNS, name if number == 1 else f"{name}-{number}")
            if not directory.exists():
                directory.mkdir()
                break
    except OSError as error:
        raise ConfigError(
            f"{RUNS}: expected a directory that this process may write, got {error}"
        ) from None
    return directory


def keep_run_id(storage: Storage, new: str) -> str:
    """Return the id of the run for trackers: the one that an earlier attempt kept in `storage`, or
    `new`.
    """
    kept = storage.read_if_there(RUN_ID)
    if kept:
        return kept.decode()
    storage.write(RUN_ID, new.encode())
    return new


def keep_first_start(storage: Storage, run_id: str, now: float) -> float:
    """Return when the first attempt of a run started, in seconds since the epoch, so that
    `max_hours` counts all attempts: the time that an earlier one kept in `storage`, or `now`.
    """
    name = f"first-start-{run_id}"
    with contextlib.suppress(FileNotFoundError, ValueError):
        return float(storage.read(name))
    storage.write(name, str(now).encode())
    return now


def make_observers(
    options: argparse.Namespace, name: str, bar: ProgressBar
) -> tuple[list[Listener], Callable[[str], None]]:
    """Return a script's listeners, and what gets its ranks' lines. Raises ConfigError if a file
    cannot be written.
    """
    from flyte_ddp.observers.metrics import MetricsServer, requested_port

    listeners: list[Listener] = [bar]
    receivers = [bar.write]
    try:
        if options.history:
            from flyte_ddp.observers.history import HistoryFile

            listeners.append(HistoryFile(options.history))
        if options.report:
            from flyte_ddp.observers.reports.run import Report

            file = Path(options.report)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            report = Report(name, file=file)
            listeners.append(report)
            receivers.append(report.add_line)
    except OSError as error:
        raise ConfigError(
            f"--history, --report: expected files that can be written, got {error.filename}: "
            f"{error.strerror}"
        ) from None
    if options.wandb or options.mlflow or options.tensorboard:
        listeners += _make_trackers(options, name)
    port = requested_port()
    if port:
        listeners.append(MetricsServer(port).follow(0, script=name))

    def relay(line: str) -> None:
        for receive in receivers:
            receive(line)

    return listeners, relay


def _make_trackers(options: argparse.Namespace, name: str) -> Iterator[Listener]:
    # Trackers make directories, queries and addresses of it.
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(name).stem)[:MAX_NAME]
    run_id = f"{plain}-{os.urandom(4).hex()}"
    if options.checkpoints:
        run_id = keep_run_id(Storage(options.checkpoints), run_id)
    if options.wandb:
        from flyte_ddp.observers.weights_and_biases import Wandb

        yield Wandb(options.wandb, run_id, os.environ.get("WANDB_DIR", "."), say=print_line)
    if options.mlflow:
        from flyte_ddp.observers.mlflow import KEY_VARIABLES, Mlflow, find_server

        # no rank gets them
        keys = {key: os.environ.pop(key) for key in KEY_VARIABLES if key in os.environ}
        yield Mlflow(find_server(), options.mlflow, run_id, keys=keys, say=print_line)
    if options.tensorboard:
        from flyte_ddp.observers.tensorboard import Tensorboard

        yield Tensorboard(options.tensorboard, run_id, say=print_line)
