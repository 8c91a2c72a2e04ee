"""`python -m flyte_ddp run` starts a script on several GPUs or machines; `doctor` checks a Kubernetes cluster.

python -m flyte_ddp run --nnodes 2 --nproc-per-node 2 train.py --lr 0.1
python -m flyte_ddp doctor --cluster '{"num_nodes": 4, "namespace": "vision-development"}'
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from typing import Any

from flyte_ddp.cluster.config import cluster_config
from flyte_ddp.errors import ClusterError, ConfigError, GangLost, RankFailure, StorageUnavailable, TrainingStopped
from flyte_ddp.fields import read_object
from flyte_ddp.launch.run import Gang, run_program, script_program
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.rank.programs import FunctionProgram

# torchrun starts one agent on each machine; here one command starts all of them.
TORCHRUN_ONLY = (
    *("--node-rank", "--master-addr", "--master-port"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m flyte_ddp", description="Distributed PyTorch training.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_doctor(commands)
    options = parser.parse_args(arguments)
    return int(options.main(options))


def _add_run(commands: Any) -> None:
    text = "run a script in every rank, on this machine or on a Dask cluster"
    parser = commands.add_parser("run", help=text, description=text)

    def add(flag: str, **options: Any) -> None:
        parser.add_argument(flag, f"--{flag[2:].replace('-', '_')}", **options)  # torchrun takes both forms

    stall_timeout = FunctionProgram.stall_timeout
    parser.add_argument("--nnodes", default="1", help="machines, or a range such as 1:4 (default 1)")
    add("--nproc-per-node", default="1", help="ranks on each: a number, gpu, cpu or auto (default 1)")
    add("--max-restarts", type=int, default=0, help="restarts of all ranks after a loss (default 0)")
    parser.add_argument("--standalone", action="store_true", help="accepted as torchrun's; nothing needs it here")
    parser.add_argument("--cluster", default="", help="the machines: JSON, or the name of a YAML or JSON file")
    parser.add_argument("--checkpoints", default="", help="directory or URL for session.save, for all machines")
    text = f"seconds without a session.report until the run is ended (default {stall_timeout:g})"
    add("--stall-timeout", type=float, default=stall_timeout, help=text)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    for flag in TORCHRUN_ONLY:
        add(flag, help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(main=_run)


def _add_doctor(commands: Any) -> None:
    text = "tell whether a run could start on the Kubernetes cluster of the kubeconfig, and what keeps it from that"
    end = "Exit status: 0 if a run could start, 1 if not, 2 if that cannot be told."
    parser = commands.add_parser("doctor", help=text, description=text, epilog=end)
    parser.add_argument(
        "--cluster", default="{}", help="of the runs, as for --cluster of a workflow: JSON, or a YAML or JSON file"
    )
    parser.add_argument(
        "--namespace", default="", help="of the tasks (default: that of --cluster, or the kubeconfig's)"
    )
    parser.add_argument("--service-account", default="flyte-ddp", help="of the tasks (default flyte-ddp)")
    parser.add_argument("--tasks", default="{}", help="what the tasks' pods request: python -m tasks requests --json")
    text = "name of Flyte's default-pod-template-name (default: as a ConfigMap of Flyte's in the cluster has it)"
    parser.add_argument("--pod-template", default="", help=text)
    parser.set_defaults(main=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from flyte_ddp.cluster.kubernetes.doctor import diagnose, lines

    try:
        config = cluster_config(read_object("--cluster", options.cluster))
        if options.namespace:
            pods = dataclasses.replace(config.kubernetes, namespace=options.namespace)
            config = dataclasses.replace(config, kubernetes=pods)
        tasks = read_object("--tasks", options.tasks)
        findings, status = diagnose(config, options.service_account, tasks, options.pod_template)
    except (ConfigError, ClusterError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("".join(lines(findings)))
    return status


def _run(options: argparse.Namespace) -> int:
    bar = ProgressBar(lines=sys.stdout)  # what the ranks print is this command's output, as torchrun's
    try:
        for flag in TORCHRUN_ONLY:
            if getattr(options, flag[2:].replace("-", "_")) is not None:
                raise ConfigError(
                    f"{flag}: expected no such flag: one command starts all machines (--cluster names them)"
                )
        gang = Gang(
            options.nnodes,
            options.nproc_per_node,
            options.max_restarts,
            read_object("--cluster", options.cluster) if options.cluster else None,
            options.stall_timeout,
        )
        program = script_program(options.script, options.arguments, options.module, options.stall_timeout)
        run_program(program, gang, options.checkpoints, [bar], bar.write)
    except TrainingStopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        return 128 + signal.Signals[str(stopped).partition(":")[0]]  # as a shell has it
    except (ConfigError, ClusterError, GangLost, RankFailure, StorageUnavailable) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
