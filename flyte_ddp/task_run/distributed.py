"""Run the function of a task in every rank. Both Flytes have a task class for it, and this module
knows neither.
"""

from __future__ import annotations

import os
from typing import Any

from flyte_ddp.launch.distributed import Distributed
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.run import Gang, returned_value
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.task_run.run import TaskRun


def run_function(
    run: TaskRun, config: Distributed, program: Program, gang: Gang, **fields: Any
) -> bytes:
    """Run a task's function in the ranks of `gang`, and return the pickled value of rank 0.

    Args:
        program: the program that calls the function.
        fields: further fields of `Job`.
    """
    report = run.report
    assert isinstance(report, Report)
    run.receivers.append(report.add_line)
    names = config.list_ignored()
    if names:
        run.say(f"{report.name}: these fields of Distributed change nothing: {', '.join(names)}")
    labels = {"task": report.name}
    state = run.run(program, gang, labels=labels, results=config.results, **fields)
    run.files.keep_history(report)
    return returned_value(state)


def find_variables(beginnings: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables with these beginnings."""
    return {name: value for name, value in os.environ.items() if name.startswith(beginnings)}


def describe_sizes(
    cpus: object, memory: str | None, gpus: int | None, shared_memory: str | None
) -> dict[str, Any]:
    """Return the given sizes of a task's pod as fields of a cluster.

    Args:
        cpus: cores such as 2 or "2", or thousandths of a core such as "500m".
    """
    sizes: dict[str, Any] = {"worker_memory": memory, "shared_memory": shared_memory}
    if gpus:
        sizes["gpus_per_node"] = gpus
    if cpus is not None:
        number, milli, _ = str(cpus).partition("m")
        sizes["worker_cpus"] = float(number)
        if milli:
            sizes["worker_cpus"] /= 1000
    return {name: size for name, size in sizes.items() if size is not None}
