"""`flyte-ddp replay PLACE --step N`: build a step of a recipe's run once more, up to its gradient,
and show what it is made of. Imports no torch itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.checkpoints import BAD_STEP, stored_steps
from flyte_ddp.code.by_value import dumps
from flyte_ddp.config.fields import whole_number
from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run_options import read_given
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.process.threads import start_thread
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.recipes.recorded import restore_options
from flyte_ddp.storage.recorded_config import OPTIONS
from flyte_ddp.storage.redaction import HIDDEN

if TYPE_CHECKING:
    from flyte_ddp.rehearsal.replayed_step import ReplayCall

NEWEST = -1  # stands for the newest step that was found bad
ARGUMENTS = (
    ("place", "directory or URL of the run's checkpoints", None),
    ("--step", "its number, from 1 (default: that of the newest bad one)", NEWEST),
    ("--processes", "ranks, all on this machine (default: as many as the run had)", 0),
    ("--data", "path or URL of the data (default: the run's)", ""),
    ("--config", 'options that the checkpoint hides, as {"recipe_options": {...}}', ""),
    ("--without", "index or key of a sample to leave out of the step", ""),
    ("--pdb", "stop after the backward pass, with model, batch and losses", False),
    ("--json", "print what is seen as JSON", False),
)
DEBUGGING_TIMEOUT = 86_400.0  # seconds that ranks wait for one that is debugged


def main(arguments: Sequence[str]) -> int:
    """Replay a step, and print what is seen of it."""
    text = "Build a step of a recipe's run once more, and show its samples, losses and gradients."
    options = make_parser("replay", text, ARGUMENTS).parse_args(arguments)
    step = options.step
    if step == NEWEST:
        step = find_bad_step(options.place)
    whole_number("--step", step, minimum=1)
    # after the mistakes that show without torch
    from flyte_ddp.rehearsal.replayed_step import ReplayCall, find_state

    start, is_bad, state, left_out = find_state(options.place, step)
    print_line(
        f"step {step}, from the state after step {start}; steps repeated: {step - 1 - start}"
    )
    origin = state["origin"]
    recipe, num_ranks = origin["recipe"], options.processes or origin["num_ranks"]
    data_source = options.data or origin["data"]
    fields = read_fields(options.config, data_source, state, num_ranks)
    num_threads = origin["num_threads"] * (num_ranks == origin["num_ranks"])
    # a recipe may print while it prepares its data
    with temporary_directory("replay-") as directory, contextlib.redirect_stdout(sys.stderr):
        terminal = ""
        if options.pdb:
            terminal = f"{directory}/terminal"
            open_terminal(terminal)
            fields |= dict.fromkeys(("collective_timeout", "stall_timeout"), DEBUGGING_TIMEOUT)
        config = config_of(recipe, fields)
        data = Path(directory, "data")
        data.mkdir()
        prepare_data(get_recipe(recipe, config.recipe_options), data_source, data)
        call = ReplayCall(
            recipe,
            config,
            options.place,
            step,
            start,
            is_bad,
            left_out,
            num_threads,
            options.without,
            terminal,
        )
        seen, lines = run_call(call, str(data), num_ranks)
    if options.json:
        lines = json.dumps(seen, indent=2)
    sys.stdout.write(f"{lines}\n")
    return 0


def run_call(call: ReplayCall, data: str, num_ranks: int) -> Any:
    """Replay the step in ranks, and return what they have seen: as plain values, and as lines."""
    # the initial state may be gone
    config = dataclasses.replace(call.config, initial_model_state="")
    program = dataclasses.replace(recipe_program(call.recipe, config), call=dumps(call))
    job = Job(program, "", time.time())
    ended = driver.run(job, LocalPlace(num_ranks), lambda: data, (), print_line)
    assert ended.finished is not None  # else it has raised
    return json.loads(ended.finished.value)


def read_fields(text: str, data: str, state: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return the fields of the replay's config: the run's, and the options of `--config`.

    Raises:
        ConfigError: `text` has other fields, or the place of the `data` is hidden.
    """
    from flyte_ddp.training.initial_state import recorded_config

    origin, config = state["origin"], state["config"]
    given = read_given("--config", text) or {}
    if given.keys() - {OPTIONS}:
        raise ConfigError(
            f"--config: expected {OPTIONS} alone, because a replay has the config of its run, got "
            f"{', '.join(given)}"
        )
    # A pass has as many samples as in the run.
    parts = config["gradient_accumulation"] * origin["num_ranks"] // num_ranks
    recorded = recorded_config(state)
    options = restore_options(origin["recipe"], recorded, given.get(OPTIONS, {}))
    if HIDDEN in data:
        raise ConfigError(
            f"--data: expected the place of the run's data, of which the checkpoint has "
            f"{data!r} alone, got none"
        )
    return {
        **config,
        "gradient_accumulation": max(1, parts),
        "memory_interval": 0,
        OPTIONS: options,
    }


def find_bad_step(place: str) -> int:
    """Return the newest bad step with a stored state. Raises ConfigError if there is none."""
    steps = stored_steps(place, BAD_STEP)
    if not steps:
        raise ConfigError(
            f"--step: expected a step's number, from 1, because no bad step was kept in {place}, "
            "got none"
        )
    return max(steps)


def open_terminal(name: str) -> None:
    """Connect this process's terminal with the rank that opens the pipes `name`-in and
    `name`-out.
    """
    for pipe, ends in {
        f"{name}-in": ("/dev/stdin", f"{name}-in"),
        f"{name}-out": (f"{name}-out", "/dev/stderr"),
    }.items():
        os.mkfifo(pipe)
        start_thread("copies", pass_on, *ends)


def pass_on(source: str, target: str) -> None:
    """Copy what comes to `source`, as it comes. The rank may end before that does."""
    with contextlib.suppress(OSError), open(source, "rb", 0) as given, open(target, "wb", 0) as got:
        shutil.copyfileobj(given, got)
