"""The options of `python -m flyte_ddp run`: torchrun's, on the command line or as PET_ variables, and ours.

docs/your-own-function.md has a table of what each of torchrun's does here. Imports neither torch nor Dask.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import tempfile
from collections.abc import Sequence
from string import Template
from typing import Any

from flyte_ddp.config.fields import read_object
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.process.output import PREFIX, Output
from flyte_ddp.launch.process.programs import STOP_SIGNALS, Program, stop_grace
from flyte_ddp.launch.run import Gang, command_program, script_program
from flyte_ddp.observers.streams import print_line
from flyte_ddp.storage import check_url

# By these the agents that torchrun needs on every machine find each other. Here one command starts all machines.
RENDEZVOUS = (
    *("--node-rank", "--master-addr", "--master-port"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
)
# They choose what is decided otherwise here.
WITHOUT_EFFECT = (
    *("--monitor-interval", "--start-method", "--event-log-handler"),
    *("--local-addr", "--logs-specs", "--numa-binding"),
)
STREAMS = r"[0-3]|\d+:[0-3](,\d+:[0-3])*"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""

    def add(*flags: str, **options: Any) -> argparse.Action:
        """Add a flag of torchrun, which takes dashes and underscores, and reads the variable PET_<flag>."""
        name = flags[-1].lstrip("-").replace("-", "_")
        options["default"] = os.environ.get(f"PET_{name.upper()}", options.get("default"))
        return parser.add_argument(*dict.fromkeys((*flags, f"--{name}")), **options)

    def add_switch(*flags: str, help: str) -> None:
        add(*flags, action="store_true", default=False, help=help).type = _read_switch

    stall_timeout = Program.stall_timeout
    add("--nnodes", default="1", help="machines, or a range such as 1:4 (default 1)")
    add("--nproc-per-node", default="1", help="ranks on each: a number, gpu, cpu or auto (default 1)")
    add("--max-restarts", type=int, default=0, help="restarts of all ranks after a loss (default 0)")
    parser.add_argument("--cluster", default="", help="the machines: JSON, or the name of a YAML or JSON file")
    parser.add_argument("--checkpoints", help="directory or URL for session.save, for all machines")
    text = "the same for all attempts of this run: a retry on another machine takes over its checkpoints at once"
    parser.add_argument("--run-id", "--run_id", default="", help=text)
    text = f"seconds without a session.report until the run is ended (default {stall_timeout:g})"
    parser.add_argument("--stall-timeout", "--stall_timeout", type=float, default=stall_timeout, help=text)
    text = "until the run is ended, after a last checkpoint (default: no limit)"
    parser.add_argument("--max-hours", "--max_hours", type=float, default=0, help=text)
    add_switch("-m", "--module", help="SCRIPT is a module, as for python -m")
    add_switch("--no-python", help="SCRIPT is a program of any kind")
    add_switch("--run-path", help="SCRIPT is one of Python's, whatever --no-python says")
    add("--role", default="default", help="ROLE_NAME of the ranks (default default)")
    add_switch("--virtual-local-rank", help="each rank sees its own GPU alone, as number 0")
    add("--log-dir", default="", help="directory, on every machine, for the files of --redirects and --tee")
    text = "output that goes to files alone: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank such as 0:3,1:2"
    add("-r", "--redirects", default="0", help=text)
    add("-t", "--tee", default="0", help="output that goes to files too, as for --redirects")
    add("--local-ranks-filter", default="", help="local ranks whose output is shown, such as 0,2 (default all)")
    prefix = parser.add_mutually_exclusive_group()
    text = f"of each line of output (default '{PREFIX}'); also ${{role_name}}, ${{local_rank}}, ${{hostname}}"
    name = "log_line_prefix_template"
    template = os.environ.get(f"PET_{name.upper()}") or os.environ.get(f"TORCHELASTIC_{name.upper()}") or PREFIX
    prefix.add_argument("--log-line-prefix-template", f"--{name}", default=template, help=text)
    prefix.add_argument("--no-prefix", "--no_prefix", action="store_true", help="show lines of output as they are")
    for stream in ("stdout", "stderr"):
        text = f"lines of a {stream} that is tee'd with one of these in them also go to one file, such as 'loss,lr'"
        add(f"--duplicate-{stream}-filters", type=_read_list, default="", help=text)
    text = "seconds from a signal until the ranks are killed (default: 20, or what the task's pod has for it)"
    seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", stop_grace())
    add("--shutdown-timeout", type=int, default=seconds, help=text)
    text = f"that end the run and are passed on to its ranks (default {','.join(STOP_SIGNALS)})"
    add("--signals-to-handle", default=",".join(STOP_SIGNALS), help=text)
    add_switch("--standalone", help="accepted as torchrun's; nothing needs it here")
    for flag in RENDEZVOUS:
        add(flag, type=int if flag in ("--node-rank", "--master-port") else str, help=argparse.SUPPRESS)
    for flag in WITHOUT_EFFECT:
        choices = ("spawn", "fork", "forkserver") if flag == "--start-method" else None
        add(flag, choices=choices, help=argparse.SUPPRESS)
    for flag in ("--print-completion", "--print_completion"):
        parser.add_argument(flag, action=_NoCompletion, help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="of the script")


def read_gang(options: argparse.Namespace) -> Gang:
    """Return the ranks that the options ask for. Raises ConfigError for wrong values, or contradicting flags."""
    if options.checkpoints is not None:
        check_url(options.checkpoints, "--checkpoints")
    cluster = read_object("--cluster", options.cluster) if options.cluster else None
    gang = Gang(
        options.nnodes,
        options.nproc_per_node,
        options.max_restarts,
        cluster,
        options.stall_timeout,
        options.master_port or 0,
    )
    if gang.needs_cluster:
        for flag in _given(options, RENDEZVOUS):
            raise ConfigError(
                f"{flag}: expected neither the flag nor its PET_ variable: one command starts all machines (--cluster "
                "names them)"
            )
    if options.node_rank:
        raise ConfigError(f"--node-rank: expected 0 on one machine, got {options.node_rank}")
    return gang


def read_program(options: argparse.Namespace) -> Program:
    """Return the program that the options name.

    Raises:
        ConfigError: a wrong value, flags that contradict each other, or there is no such script.
    """
    _check("--local-ranks-filter", options.local_ranks_filter, r"(\d+(,\d+)*)?", "local ranks such as 0,2")
    for flag, value in (("--redirects", options.redirects), ("--tee", options.tee)):
        _check(flag, value, STREAMS, "0, 1, 2 or 3, or one of them for each local rank, such as 0:3,1:2")
    signals = [name.strip() for name in options.signals_to_handle.split(",")]
    if not set(signals) <= signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"}:
        raise ConfigError(
            f"--signals-to-handle: expected signals that can be handled, such as SIGTERM,SIGUSR1, got "
            f"{options.signals_to_handle!r}"
        )
    if options.shutdown_timeout < 0:
        raise ConfigError(f"--shutdown-timeout: expected seconds of at least 0, got {options.shutdown_timeout}")
    directory = os.path.abspath(options.log_dir) if options.log_dir else ""
    if directory and os.path.exists(directory) and not os.path.isdir(directory):
        raise ConfigError(f"--log-dir: expected a directory, got the file {options.log_dir!r}")
    if not directory and re.search("[123]", re.sub(r"\d+:", "", f"{options.redirects},{options.tee}")):
        directory = tempfile.mkdtemp(prefix="flyte-ddp-logs-")
        print_line(f"--log-dir: {directory}")
    variables = {"ROLE_NAME": options.role}
    if options.rdzv_id and not options.standalone:
        variables["TORCHELASTIC_RUN_ID"] = options.rdzv_id
    return dataclasses.replace(
        _read_script(options),
        variables=variables,
        signals=tuple(signals),
        stop_grace=options.shutdown_timeout,
        virtual_local_rank=options.virtual_local_rank,
        output=Output(
            ""
            if options.no_prefix
            else Template(options.log_line_prefix_template).safe_substitute(role_name=options.role),
            directory,
            options.redirects,
            options.tee,
            options.local_ranks_filter,
            tuple(options.duplicate_stdout_filters),
            tuple(options.duplicate_stderr_filters),
        ),
    )


def note_without_effect(options: argparse.Namespace) -> str:
    """Return a line about the flags that were given and change nothing; "" if there are none."""
    given = _given(options, WITHOUT_EFFECT)
    return f"{', '.join(given)}: accepted as torchrun's, with no effect here" if given else ""


class _NoCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(2, "--print-completion: expected no such flag: no completion script is made here\n")


def _read_script(options: argparse.Namespace) -> Program:
    if options.run_path:
        return script_program(options.script, options.arguments, False, options.stall_timeout)
    if options.no_python and options.module:
        raise ConfigError("--no-python: expected not with --module, which is Python's")
    if options.no_python:
        return command_program([options.script, *options.arguments], options.stall_timeout)
    if interpreter := os.environ.get("PYTHON_EXEC"):
        module = ["-m"] if options.module else []
        command = [interpreter, "-u", *module, options.script, *options.arguments]
        return command_program(command, options.stall_timeout)
    return script_program(options.script, options.arguments, options.module, options.stall_timeout)


def _given(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    return [flag for flag in flags if getattr(options, flag[2:].replace("-", "_")) is not None]


def _check(flag: str, value: str, pattern: str, expected: str) -> None:
    if not re.fullmatch(pattern, value):
        raise ConfigError(f"{flag}: expected {expected}, got {value!r}")


def _read_switch(text: str) -> bool:
    return bool(int(text))


def _read_list(text: str) -> list[str]:
    """Return the items of a list with commas; a double comma is one within an item."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",") if item]
