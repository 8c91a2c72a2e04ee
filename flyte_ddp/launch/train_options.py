"""`flyte-ddp train RECIPE`: train a recipe, with an option for each field of its config. Imports no
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import describe_fields
from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.launch.agent.rank_start import start_server
from flyte_ddp.launch.protocol.programs import Job, check_run_id
from flyte_ddp.launch.recipe_program import recipe_program, slow_imports
from flyte_ddp.launch.run import Gang
from flyte_ddp.launch.run_observers import (
    OBSERVER_OPTIONS,
    RUNS,
    make_observers,
    make_run_directory,
    resume_command,
)
from flyte_ddp.launch.run_options import (
    RECIPE_OPTIONS,
    end_as_shell,
    gang_options,
    read_gang_fields,
    read_given,
)
from flyte_ddp.recipes import BUILTIN, config_of, get_recipe
from flyte_ddp.storage import check_url, list_client_modules

HISTORY, REPORT = "history.jsonl", "report.html"
USAGE = "flyte-ddp train RECIPE [--FIELD VALUE ...] [OPTION ...]"


def main(arguments: Sequence[str]) -> int:
    """Train a recipe, and return the exit status."""
    options, words = _read_options(arguments)
    given = _merge(read_given("--config", options.config) or {}, read_fields(words))
    gang = Gang(**read_gang_fields(options))
    check_run_id(options.run_id)
    check_url(options.checkpoints or RUNS, "--checkpoints")
    if gang.is_on_this_machine:  # `flyte_ddp.__main__` may have started the server already
        recipe = None
        if options.recipe in BUILTIN:
            recipe = get_recipe(options.recipe)
        clients = list_client_modules(options.data, options.checkpoints)
        start_server((*slow_imports(given, recipe), *clients))
    config = config_of(options.recipe, given)
    directory = Path(options.checkpoints)
    is_new = not options.checkpoints or "://" in options.checkpoints
    if is_new:
        directory = make_run_directory(options.recipe.rpartition(".")[2])
    try:
        return _train(options, config, gang, directory)
    except (ConfigError, DataError):
        if is_new:  # nothing was trained
            shutil.rmtree(directory)
        raise


def _train(options: argparse.Namespace, config: TrainingConfig, gang: Gang, directory: Path) -> int:
    from flyte_ddp.launch.train import open_data, train_recipe
    from flyte_ddp.observers.progress_bar import ProgressBar

    new_directory = ""
    if not options.checkpoints:
        new_directory = str(directory)
    resume = resume_command(new_directory)
    options.checkpoints = options.checkpoints or str(directory)
    options.history = options.history or str(directory / HISTORY)
    options.report = options.report or str(directory / REPORT)
    listeners, relay = make_observers(options, options.recipe, ProgressBar())

    def train() -> None:
        program = recipe_program(options.recipe, config)
        job = Job(program, options.checkpoints, run=options.run_id)
        with open_data(get_recipe(options.recipe, config.recipe_options), options.data) as data:
            state = train_recipe(job, gang, data, listeners, relay)
        assert state.finished is not None  # an unfinished run has raised
        places = {
            "model state": state.finished.model_state_url,
            "export": state.finished.export_url,
            "report": options.report,
            "history": options.history,
        }
        for name, place in places.items():
            sys.stdout.write(f"{name:<14}{_short_path(place)}\n")

    relay(f"outputs: {directory}")
    return end_as_shell(train, config.max_hours, resume)


def _short_path(place: str) -> str:
    """Return a path below the working directory relative to it; any other place unchanged."""
    directory = f"{Path.cwd()}{os.sep}"
    return place.removeprefix(directory)


def read_fields(words: Sequence[str]) -> dict[str, Any]:
    """Return the fields that `--name value` and `--name=value` give. A name with a dot stands for a
    field in an object. A name without a value is true. Values are JSON, or text.

    Raises:
        ConfigError: a word is neither a name nor a value.
    """
    values: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        flag, sign, text = waiting.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"train: expected {USAGE}, got {flag!r}")
        if not sign:
            text = "true"
            if waiting and not waiting[0].startswith("--"):
                text = waiting.pop(0)
        *path, name = flag[2:].replace("-", "_").split(".")
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text
        for each in (name, *reversed(path)):
            value = {each: value}
        values = _merge(values, value)
    return values


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of both objects. `other` wins, also in objects within them."""
    both = dict(one)
    for name, value in other.items():
        before = one.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            value = _merge(before, value)
        both[name] = value
    return both


def _read_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the run, and the words that name fields of its config."""
    fields = "\n".join(f"  --{line}" for line in describe_fields(TrainingConfig))
    parser = make_parser(
        "train",
        "Train a recipe, on this machine or on a Dask cluster.",
        (
            ("recipe", f"{', '.join(BUILTIN)}, or the dotted name of your own", None),
            *RECIPE_OPTIONS,
            *gang_options(max_restarts=ClusterConfig.max_restarts),
            (
                "--checkpoints",
                "directory or URL: an unfinished run there goes on (default: a new one in "
                f"{RUNS}/)",
                "",
            ),
            ("--run-id", "the same for all attempts of this run", ""),
            *OBSERVER_OPTIONS,
        ),
        usage=USAGE,
        epilog=f"fields, with the library's defaults, over which are the recipe's:\n{fields}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser.parse_known_args(arguments)
