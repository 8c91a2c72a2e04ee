"""Run the function of a task in every rank. Both Flytes have a task class for it, and this module
knows neither.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.distributed import Distributed
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.run import Gang, returned_value
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.task_run.run import TaskRun


def run_function(
    run: TaskRun,
    config: Distributed,
    program: Program,
    gang: Gang,
    lost_options: Sequence[str] = (),
    **fields: Any,
) -> bytes:
    """Run a task's function in the ranks of `gang`, and return the pickled value of rank 0.

    Args:
        program: the program that calls the function.
        lost_options: given options of the task that do not reach the pods of its ranks.
        fields: further fields of `Job`.
    """
    report = run.report
    assert isinstance(report, Report)
    run.receivers.append(report.add_line)
    names = config.list_ignored()
    if names:
        run.say(f"{report.name}: these fields of Distributed change nothing: {', '.join(names)}")
    if lost_options:
        run.say(
            f"{report.name}: these options of the task do not reach the pods of its ranks, which "
            f"have their own in cluster.kubernetes of Distributed: {', '.join(lost_options)}"
        )
    labels = {"task": report.name}
    state = run.run(program, gang, labels=labels, results=config.results, **fields)
    run.files.keep_history(report)
    return returned_value(state)


def find_urls(value: Any, read_url: Callable[[Any], str | None]) -> Iterator[str]:
    """Yield the URLs of files anywhere in a task's input: in lists, dicts, dataclasses and models
    of pydantic.

    Args:
        read_url: returns the URL of a file, a directory or a data frame, and None for another
            value.
    """
    url = read_url(value)
    parts: Sequence[Any] = ()
    if url is not None:
        yield url
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value) or hasattr(type(value), "model_fields"):
        parts = list(vars(value).values())
    for part in parts:
        yield from find_urls(part, read_url)


def check_reachable(
    gang: Gang, inputs: Iterable[tuple[str, str]], outputs: Iterable[str], place: tuple[str, str]
) -> None:
    """Raise ConfigError for a local file as input, or for local outputs, if the ranks are in a
    cluster's pods.

    Args:
        inputs: names of inputs, each with the URL of a file in it.
        outputs: names of the outputs that contain files.
        place: the option that names the place of such files, and the place.
    """
    if not gang.needs_cluster or gang.cluster_config().resolved_kind != "kubernetes":
        return
    for name, url in inputs:
        if _is_local(url):
            raise ConfigError(
                f"{name}: expected a URL that the pods of the ranks can reach, got {url!r}"
            )
    option, prefix = place
    for name in outputs:
        if _is_local(prefix):
            raise ConfigError(
                f"{option}: expected a URL that the pods of the ranks can reach, "
                f"because output {name} is a file, got {prefix!r}"
            )


def _is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


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
