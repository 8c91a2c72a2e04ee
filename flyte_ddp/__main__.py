"""`flyte-ddp run` starts a script on several GPUs or machines; `doctor` checks a Kubernetes
cluster.

`estimate` trains one step of a recipe, and says what an epoch takes. `fields` lists the fields of a
run's config and cluster, with defaults and units. `new` makes a project; `update` brings it up to
the installed version. `python -m flyte_ddp` is the same command.

flyte-ddp run --nnodes 2 --nproc-per-node 2 train.py --lr 0.1
flyte-ddp doctor --cluster '{"num_nodes": 4}' --namespace vision-development
flyte-ddp new my-project
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from flyte_ddp.cluster.admission import check_allowed, load_allowed
from flyte_ddp.cluster.config import ClusterConfig, cluster_config
from flyte_ddp.cluster.kubernetes.api import own_namespace
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import describe_fields, read_object
from flyte_ddp.config.source_code import find_project
from flyte_ddp.errors import (
    ClusterError,
    ConfigError,
    GangLost,
    RankFailure,
    StorageUnavailable,
    TrainingStopped,
)
from flyte_ddp.launch.run import run_program
from flyte_ddp.launch.run_options import (
    add_run_options,
    note_without_effect,
    read_gang,
    read_program,
)
from flyte_ddp.launch.signals import TimeLimit
from flyte_ddp.observers.command_line import add_observer_options, make_observers, resume_command
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.streams import open_standard_streams, print_line

# Commands of rooms that have their own options.
ELSEWHERE = {
    "estimate": (
        "flyte_ddp.rank.estimate",
        "estimate a recipe's seconds per epoch and memory, by one step",
    ),
    "promotion": (
        "flyte_ddp.promotion.__main__",
        "show, roll back or release the promoted model of a recipe",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a mistake of the user's, 1 for another
    error.
    """
    open_standard_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in ELSEWHERE:
        module, _ = ELSEWHERE[arguments[0]]
        return int(importlib.import_module(module).main(arguments[1:]))
    parser = argparse.ArgumentParser(prog="flyte-ddp", description="Distributed PyTorch training.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_doctor(commands)
    text = "list the fields of --config and --cluster, with defaults, units and meaning"
    commands.add_parser("fields", help=text, description=text).set_defaults(main=_list_fields)
    _add_projects(commands)
    for name, (_, text) in ELSEWHERE.items():
        commands.add_parser(name, help=text)
    options = parser.parse_args(arguments)
    try:
        return int(options.main(options))
    except (ConfigError, ClusterError, GangLost, RankFailure, StorageUnavailable) as error:
        print_line(f"error: {error}")
        return 2 if isinstance(error, ConfigError) or options.command == "doctor" else 1


def _add_run(commands: Any) -> None:
    text = "run a script in every rank, on this machine or on a Dask cluster"
    parser = commands.add_parser("run", help=text, description=text)
    add_observer_options(parser)
    add_run_options(parser)
    parser.set_defaults(main=_run)


def _add_doctor(commands: Any) -> None:
    text = (
        "tell whether a run could start on the Kubernetes cluster of the kubeconfig, and what "
        "keeps it from that"
    )
    end = "Exit status: 0 if a run could start, 1 if not, 2 if that cannot be told."
    parser = commands.add_parser("doctor", help=text, description=text, epilog=end)
    parser.add_argument(
        "--cluster",
        default="{}",
        help="of the runs, as for --cluster of a workflow: JSON, or a YAML or JSON file",
    )
    parser.add_argument(
        "--namespace",
        default="",
        help="of the tasks (default: that of --cluster, or the kubeconfig's)",
    )
    parser.add_argument(
        "--service-account", default="flyte-ddp", help="of the tasks (default flyte-ddp)"
    )
    parser.add_argument(
        "--tasks",
        default="{}",
        help="what the tasks' pods request: python -m flyte_ddp.flyte requests --json",
    )
    text = (
        "name of Flyte's default-pod-template-name (default: as a ConfigMap of Flyte's in the "
        "cluster has it)"
    )
    parser.add_argument("--pod-template", default="", help=text)
    parser.set_defaults(main=_doctor)


def _add_projects(commands: Any) -> None:
    text = "make a project: recipes, workflows, tasks, settings, Dockerfile, deploy/ and a test"
    parser = commands.add_parser("new", help=text, description=text)
    parser.add_argument(
        "directory", metavar="DIRECTORY", help="of the project; it may not have files"
    )
    parser.add_argument(
        "--wheel",
        default="",
        help="that flyte-ddp is installed from (default: as pip has noted it)",
    )
    parser.set_defaults(main=_make_project)
    text = (
        "bring a project up to the installed version; files that you have changed stay, and "
        "the changes are shown"
    )
    parser = commands.add_parser("update", help=text, description=text)
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        nargs="?",
        default=".",
        help="of the project (default .)",
    )
    parser.add_argument("--wheel", default="", help="as of new")
    parser.set_defaults(main=_make_project)


def _make_project(options: argparse.Namespace) -> int:
    from flyte_ddp.config.project import make_project, update_project

    act = make_project if options.command == "new" else update_project
    for line in act(options.directory, options.wheel):
        sys.stdout.write(f"{line}\n")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from flyte_ddp.cluster.kubernetes.doctor import diagnose

    config = cluster_config(read_object("--cluster", options.cluster))
    if options.namespace:
        pods = dataclasses.replace(config.kubernetes, namespace=options.namespace)
        config = dataclasses.replace(config, kubernetes=pods)
    tasks = read_object("--tasks", options.tasks)
    lines, status = diagnose(config, options.service_account, tasks, options.pod_template)
    sys.stdout.write("".join(lines))
    return status


def _list_fields(options: argparse.Namespace) -> int:
    lines = [
        *describe_fields(TrainingConfig, "config."),
        *describe_fields(ClusterConfig, "cluster."),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _run(options: argparse.Namespace) -> int:
    # what the ranks print is this command's output, as torchrun's
    bar = ProgressBar(lines=sys.stdout)
    limit = None
    try:
        gang, program = read_gang(options), read_program(options)
        listeners, relay = make_observers(options, program.name, bar)
        limit = TimeLimit(options.max_hours, time.time())
        # In a pod, beside a settings.toml, this is the code of a registered version.
        if gang.needs_cluster and os.environ.get("KUBERNETES_SERVICE_HOST") and find_project():
            check_allowed(gang.cluster_config(), load_allowed(), own_namespace())
        if note := note_without_effect(options):
            print_line(note)
        run_program(
            program, gang, options.checkpoints or "", listeners, relay, run_id=options.run_id
        )
    except TrainingStopped as stopped:
        if limit and isinstance(error := limit.explain(stopped), ConfigError):
            raise error from None
        print_line(str(stopped))
        if options.checkpoints:
            print_line(f"to resume: {resume_command()}")
        return 128 + signal.Signals[stopped.reason]  # as a shell has it
    except KeyboardInterrupt:
        print_line("SIGINT: the run was stopped while no rank was running")
        return 130
    finally:
        if limit:
            limit.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(main())
