"""`flyte-ddp COMMAND`: the command line of this package. `python -m flyte_ddp` is the same.

A command's module is imported when the command is given: `flyte-ddp --help` imports none.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import re
import sys
from collections.abc import Sequence

from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import (
    ChampionChanged,
    ChampionError,
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    GangLost,
    NoAnswer,
    RankFailure,
    StorageUnavailable,
)
from flyte_ddp.process.standard_streams import open_standard_streams, print_line

# Each command's function and its line in the help. The function takes the arguments after the
# command's name, and returns the exit status or the text to print.
COMMANDS = {
    "train": (
        "flyte_ddp.launch.train_options:main",
        "train a recipe, on this machine or on a Dask cluster",
    ),
    "run": (
        "flyte_ddp.launch.run_options:main",
        "run a script in every rank, on this machine or on a Dask cluster",
    ),
    "status": (
        "flyte_ddp.launch.inside:print_status",
        "show what a run does now, here or on a cluster",
    ),
    "profile": (
        "flyte_ddp.launch.inside:print_profile",
        "trace some steps of a run that goes on",
    ),
    "stacks": (
        "flyte_ddp.launch.inside:print_stacks",
        "show where each rank of a run is, for a run that seems to hang",
    ),
    "rehearse": (
        "flyte_ddp.rehearsal.command:main",
        "run a program with faults on purpose, and tell whether it is safe to interrupt",
    ),
    "replay": (
        "flyte_ddp.rehearsal.replay:main",
        "show a step of a recipe's run once more: its samples, losses and gradients",
    ),
    "predict": (
        "flyte_ddp.prediction.command:main",
        "predict new data with a trained model, on this machine or on a Dask cluster",
    ),
    "shards": (
        "flyte_ddp.recipes.shards_command:main",
        "write images in folders, text, or Parquet files, to shards in a random order",
    ),
    "estimate": (
        "flyte_ddp.rehearsal.estimate:main",
        "estimate a recipe's seconds per epoch and memory, by one step",
    ),
    "fields": (
        "flyte_ddp.__main__:list_fields",
        "list the fields of a run's config and cluster, with defaults and units",
    ),
    "new": ("flyte_ddp.__main__:make_project", "make a project that trains on Flyte, or add to it"),
    "register": (
        "flyte_ddp.flyte.register:main",
        "register a project's workflows with Flyte, with its code",
    ),
    "image": ("flyte_ddp.flyte.commands:image", "print the image of a project's tasks"),
    "abort": ("flyte_ddp.flyte.commands:abort", "end an execution of Flyte's for good"),
    "deploy": (
        "flyte_ddp.__main__:print_manifests",
        "print the rights of tasks in a namespace, for kubectl apply -f -",
    ),
    "doctor": (
        "flyte_ddp.cluster.kubernetes.doctor:main",
        "tell whether a run could start on a Kubernetes cluster, and what keeps it from that",
    ),
    "promotion": (
        "flyte_ddp.promotion.command:main",
        "show, roll back or release the promoted model of a recipe",
    ),
    "report": (
        "flyte_ddp.observers.reports.command:main",
        "make the page of a run again, from its history",
    ),
    "compare": (
        "flyte_ddp.observers.reports.comparison:main",
        "draw runs over each other, and list what differs and where the time went",
    ),
    "plot": ("flyte_ddp.observers.reports.plots:main", "draw the curves of a run's history"),
    "mlflow": ("flyte_ddp.observers.mlflow:main", "upload a run's history to MLflow"),
}

# Words of `train` that make its ranks import more than torch, run elsewhere, or not run at all.
OTHER_RANKS = re.compile(r"text|-h|--(help|config|cluster|nnodes|compile|parallel).*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a user's mistake, 1 for another error."""
    open_standard_streams()
    if arguments is None:
        arguments = sys.argv[1:]
    arguments = list(arguments)
    if arguments[:1] in (["--version"], ["-V"]):
        return print_result(describe_version())
    if not arguments or arguments[0] not in COMMANDS:
        parser = argparse.ArgumentParser("flyte-ddp", description="Distributed PyTorch training.")
        parser.add_argument("-V", "--version", action="store_true", help="print it, and the commit")
        commands = parser.add_subparsers(metavar="COMMAND", required=True)
        for name, (_, text) in COMMANDS.items():
            commands.add_parser(name, help=text)
        if arguments[:1] in (["--help"], ["-h"]):
            return print_result(parser.format_help().rstrip())
        parser.parse_args(arguments)  # exits with an error
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # recipes are found here, as under `python -m`
    if arguments[0] == "train" and not any(map(OTHER_RANKS.fullmatch, arguments)):
        # The ranks import torch while this process imports the rest.
        start_server = pkgutil.resolve_name("flyte_ddp.launch.agent.rank_start:start_server")
        list_client_modules = pkgutil.resolve_name("flyte_ddp.storage:list_client_modules")
        start_server(("torch", *list_client_modules(arguments)))
    try:
        ended = pkgutil.resolve_name(COMMANDS[arguments[0]][0])(arguments[1:])
        if isinstance(ended, int):
            return ended
        return print_result(ended)
    except KeyboardInterrupt:
        print_line("SIGINT: the run was stopped while no rank was running")
        return 130
    except (ConfigError, DataError) as error:
        print_line(f"error: {error}")
        return 2
    except (
        ChampionChanged,
        ChampionError,
        CheckpointError,
        ClusterError,
        GangLost,
        NoAnswer,
        RankFailure,
        StorageUnavailable,
    ) as error:
        print_line(f"error: {error}")
        return 1


def print_result(text: str) -> int:
    """Print the text that a command returned, and return the exit status."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        return 1
    except OSError as error:
        print_line(f"error: standard output: {error.strerror}")
        return 1
    return 0


def describe_version() -> str:
    """Return the version of this package, and the commit of a checkout."""
    from flyte_ddp.project import new

    version, commit = new.find_version()
    return f"flyte-ddp {version}, {commit}"


def make_project(arguments: Sequence[str]) -> str:
    from flyte_ddp.project import new

    options = make_parser(
        "new",
        COMMANDS["new"][1],
        (
            ("directory", "of the project", None),
            (
                "--with",
                f"more workflows, some of {', '.join(new.PARTS)}, separated by commas",
                "",
            ),
            ("--function", "a function, instead of a recipe", False),
            ("--flyte", "1 or 2: the version of Flyte", 1),
            ("--wheel", "that flyte-ddp is installed from (default: as pip has noted it)", ""),
        ),
    ).parse_args(arguments)
    parts = [part for part in vars(options)["with"].split(",") if part]
    lines = new.make_project(
        options.directory, parts, options.function, options.wheel, options.flyte
    )
    return "\n".join(lines)


def print_manifests(arguments: Sequence[str]) -> str:
    from flyte_ddp.project import new

    options = make_parser(
        "deploy",
        COMMANDS["deploy"][1],
        (
            ("--namespace", "such as flytesnacks-development", None),
            ("--image", "that the pods of runs may have", ""),
            ("--new-namespace", "make the namespace, too, where Flyte does not", False),
        ),
    ).parse_args(arguments)
    return new.manifests(options.namespace, options.image, not options.new_namespace)


def list_fields(arguments: Sequence[str]) -> str:
    from flyte_ddp.cluster.config import ClusterConfig
    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.config.fields import describe_fields

    make_parser("fields", COMMANDS["fields"][1], ()).parse_args(arguments)
    kinds = {"config.": TrainingConfig, "cluster.": ClusterConfig}
    return "\n".join(line for name in kinds for line in describe_fields(kinds[name], name))


if __name__ == "__main__":
    sys.exit(main())
