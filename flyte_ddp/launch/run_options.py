"""`flyte-ddp run`: a script in every rank. Its options are torchrun's, on the command line or as
PET_ variables, and ours.

Imports neither torch nor Dask.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flyte_ddp.code.source_code import find_project
from flyte_ddp.config.fields import HELP, finite_number, read_object, whole_number
from flyte_ddp.config.options import Option, add_options
from flyte_ddp.config.training import Needs
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.launch.protocol.programs import Job, Program, stop_grace
from flyte_ddp.launch.protocol.signals import TimeLimit
from flyte_ddp.launch.run import Gang, command_program, run_job, script_program
from flyte_ddp.launch.run_observers import OBSERVER_OPTIONS, make_observers, resume_command
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.project.admission import load_allowed
from flyte_ddp.storage import check_url


def gang_options(**defaults: Any) -> list[Option]:
    """Return the options for some fields of `Gang`, by their defaults; "" stands for none."""
    options = []
    for name, default in defaults.items():
        text = Gang.__dataclass_fields__[name].metadata[HELP]
        if default != "":
            text += f" (default {str(default).removesuffix('.0')})"
        options.append((f"--{name.replace('_', '-')}", text, default))
    return options


# With these flags, torchrun's agents on the machines find each other. Here one command starts all
# machines.
RENDEZVOUS = (
    *("--node-rank", "--master-addr", "--master-port"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
)
# flags of torchrun that are accepted and change nothing
IGNORED = (
    *("--duplicate-stderr-filters", "--duplicate-stdout-filters", "--event-log-handler"),
    *("--local-addr", "--local-ranks-filter", "--log-dir", "--log-line-prefix-template"),
    *("--logs-specs", "--monitor-interval", "--numa-binding", "--redirects", "--role"),
    *("--run-path", "--start-method", "--tee"),
)
# the other flags of torchrun, each with the reason why it is refused
REFUSED = {
    "--print-completion": "no completion script is made here",
    "--signals-to-handle": (
        "SIGTERM, SIGINT, SIGHUP and SIGQUIT end a run and are passed on to its ranks"
    ),
    "--virtual-local-rank": (
        "each rank sees all GPUs of its machine, and takes the one with the number LOCAL_RANK"
    ),
}
SWITCHES = ("--run-path", "--virtual-local-rank")  # flags among these without a value
# torchrun's variables that are accepted and change nothing
VARIABLES = (
    "PYTHON_EXEC",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)
SHORT = {"--redirects": ["-r"], "--tee": ["-t"], "--module": ["-m"]}
SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
# The flags of torchrun that change something, and the options of `add_argument`.
FLAGS: dict[str, dict[str, Any]] = {
    **{
        name: {"help": text, "default": default, "type": type(default)}
        for name, text, default in gang_options(nnodes="1", nproc_per_node="1", max_restarts=0)
    },
    "--module": {**SWITCH, "help": "SCRIPT is a module, as for python -m"},
    "--no-python": {**SWITCH, "help": "SCRIPT is a program of any kind"},
    "--shutdown-timeout": {
        "type": int,
        "help": "seconds from a signal until the ranks are killed (default: 20, or what the task's "
        "pod has for it)",
    },
    "--standalone": {**SWITCH, "help": "accepted as torchrun's; nothing needs it here"},
}
# The options by which `train` and `predict` take a recipe and place its ranks: name, help, default.
RECIPE_OPTIONS = (
    ("--config", "fields of the config: JSON, or a YAML or JSON file; options win", ""),
    ("--data", "path or URL, for recipes that read data of yours", ""),
    *gang_options(nproc_per_node="auto", nnodes="1", cluster=""),
)
OWN_OPTIONS = (
    *gang_options(cluster="", stall_timeout=Gang.stall_timeout),
    (
        "--run-id",
        "the same for all attempts of this run: a retry on another machine takes over its "
        "checkpoints at once",
        "",
    ),
    ("--results", "directory or URL for the files of session.submit_result", ""),
    ("--max-hours", "until the run is ended, after a final checkpoint (default: no limit)", 0.0),
    ("--max-cost", "of the nodes, by the prices in settings.toml, until the run is ended", 0.0),
    ("--no-prefix", "show lines of output as they are", False),
    *OBSERVER_OPTIONS,
)


def main(arguments: Sequence[str]) -> int:
    """Run a script in every rank, and return the exit status."""
    text = "run a script in every rank, on this machine or on a Dask cluster"
    parser = argparse.ArgumentParser("flyte-ddp run", description=text)
    add_run_options(parser)
    options = parser.parse_args(arguments)
    gang, program = read_gang(options), read_program(options)
    # The output of the ranks is the output of this command, as under torchrun.
    listeners, relay = make_observers(options, program.name, ProgressBar(lines=sys.stdout))
    note = note_without_effect(options)
    if note:
        print_line(note)
    job = Job(program, options.checkpoints or "", run=options.run_id)
    resume = ""
    if options.checkpoints:
        resume = resume_command()
    return end_as_shell(
        lambda: run_job(job, gang, None, listeners, relay, options.results or None),
        options.max_hours,
        resume,
    )


def end_as_shell(
    call: Callable[[], object], max_hours: float = 0.0, resume: str | None = None
) -> int:
    """Call `call` for at most `max_hours`, and return the exit status. If the run was stopped, say
    so, and print the command that resumes it. The status is then the shell's for the signal.

    Args:
        max_hours: hours; 0 is no limit.
        resume: "" for a run that cannot be resumed; by default the command of this process.
    """
    limit = TimeLimit(max_hours, time.time())
    try:
        call()
    except TrainingStopped as stopped:
        error = limit.convert_error(stopped)
        if isinstance(error, ConfigError):
            raise error from None
        print_line(str(stopped))
        if resume is None:
            resume = resume_command()
        if resume:
            print_line(f"to resume: {resume}")
        return 128 + signal.Signals[stopped.reason]
    finally:
        limit.cancel()
    return 0


def read_given(flag: str, text: str) -> dict[str, Any] | None:
    """Return the result of `read_object`; None for an option that is not given."""
    if not text:
        return None
    return read_object(flag, text)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command. A flag of torchrun takes dashes and underscores, and reads
    the variable PET_<flag>.
    """
    add_options(parser, OWN_OPTIONS)
    parser.add_argument("--checkpoints", help="directory or URL for session.save, for all machines")
    flags = {**FLAGS}
    for flag in RENDEZVOUS:
        flags[flag] = {"type": str}
    for flag in ("--node-rank", "--master-port"):
        flags[flag] = {"type": int}
    for flag in (*IGNORED, *REFUSED):
        flags[flag] = {}
    for flag in SWITCHES:
        flags[flag] = SWITCH
    for flag, given in flags.items():
        name = flag[2:].replace("-", "_")
        options = {"help": argparse.SUPPRESS, **given}
        options["default"] = os.environ.get(f"PET_{name.upper()}", options.get("default"))
        names = dict.fromkeys((*SHORT.get(flag, ()), flag, f"--{name}"))
        action = parser.add_argument(*names, **options)
        if "action" in options:
            action.type = lambda text: bool(int(text))
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="of the script"
    )


def read_gang_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Gang` that the options give. Raises ConfigError for a cluster that
    settings.toml does not allow in the pod of a task.
    """
    values = {**vars(options), "cluster": read_given("--cluster", options.cluster)}
    names = Gang.__dataclass_fields__
    fields = {name: values[name] for name in names if values.get(name) is not None}
    # In a pod, beside a settings.toml, this is the code of a registered version.
    if os.environ.get("KUBERNETES_SERVICE_HOST") and find_project():
        Gang(**fields).check_allowed(load_allowed())
    return fields


def read_gang(options: argparse.Namespace) -> Gang:
    """Return the gang of the options. Raises ConfigError for wrong or contradicting flags."""
    if options.checkpoints is not None:
        check_url(options.checkpoints, "--checkpoints")
    gang = Gang(**read_gang_fields(options))
    if gang.needs_cluster:
        for flag in _given(options, RENDEZVOUS):
            raise ConfigError(
                f"{flag}: expected neither the flag nor its PET_ variable: one command starts all "
                "machines (--cluster names them)"
            )
    if options.node_rank:
        raise ConfigError(f"--node-rank: expected 0 on one machine, got {options.node_rank}")
    return gang


def read_program(options: argparse.Namespace) -> Program:
    """Return the program that the options name.

    Raises:
        ConfigError: a wrong value, contradicting flags, or a missing script.
    """
    for flag in _given(options, REFUSED):
        raise ConfigError(
            f"{flag}: expected neither the flag nor its PET_ variable: {REFUSED[flag]}"
        )
    if options.no_python and options.module:
        raise ConfigError("--no-python: expected not with --module, which is Python's")
    if options.no_python:
        program = command_program([options.script, *options.arguments])
    else:
        program = script_program(options.script, options.arguments, options.module)
    variables = {}
    if options.rdzv_id and not options.standalone:
        variables["TORCHELASTIC_RUN_ID"] = options.rdzv_id
    grace = int(stop_grace())
    if options.shutdown_timeout is not None:
        grace = whole_number("--shutdown-timeout", options.shutdown_timeout)
    max_cost = finite_number("max_cost", options.max_cost, minimum=0)
    return dataclasses.replace(
        program,
        needs=Needs(options.stall_timeout, variables=variables, max_cost=max_cost),
        stop_grace=grace,
        shows_ranks=not options.no_prefix,
    )


def note_without_effect(options: argparse.Namespace) -> str:
    """Return a line about the given flags and variables that change nothing; "" without any."""
    given = _given(options, IGNORED)
    given += [name for name in VARIABLES if name in os.environ]
    if not given:
        return ""
    return f"{', '.join(given)}: accepted as torchrun's, with no effect here"


def _given(options: argparse.Namespace, flags: Iterable[str]) -> list[str]:
    values = {flag: getattr(options, flag[2:].replace("-", "_")) for flag in flags}
    return [flag for flag, value in values.items() if value is not None and value is not False]
