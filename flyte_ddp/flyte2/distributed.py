"""The task of `Distributed` in Flyte 2: its function runs in every rank.

The task is the driver. It starts the ranks in its own pod, or on a new Dask cluster. It watches
them, and returns rank 0's outputs.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import flyte
from flyte.extend import TaskPluginRegistry
from flyte.io import DataFrame, Dir, File

from flyte_ddp.code.source_code import packages_beside
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte2.task import (
    MainThreadTask,
    flyte_errors,
    is_local,
    limited_urls,
    open_task_run,
)
from flyte_ddp.launch import distributed
from flyte_ddp.launch.run import Gang, function_program
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.project.admission import load_allowed
from flyte_ddp.project.settings import SETTINGS
from flyte_ddp.storage import check_places
from flyte_ddp.task_run.distributed import (
    check_reachable,
    describe_sizes,
    find_urls,
    find_variables,
    run_function,
)
from flyte_ddp.task_run.process import KEYS

# beginnings of the variables that describe a process's action and its store
FLYTE_VARIABLES = ("FLYTE_INTERNAL_", "FLYTE_AWS_", "_U_", "_F_", "RUN_NAME", "ACTION_NAME")


@dataclass
class Distributed(distributed.Distributed):
    """`plugin_config` of an environment with tasks that run in every rank. Its fields have the same
    meaning as in `flyte_ddp.flytekit_plugin.Distributed`.

    Example:
        config = flyte2.Distributed(nproc_per_node=2, max_restarts=1)
        env = flyte2.environment("training", flyte2.SETTINGS.training, config)

        @env.task(retries=2, report=True)
        def count_ranks() -> int:
            dist.init_process_group("gloo")
            return dist.get_world_size()
    """

    def __post_init__(self) -> None:
        extend = sys.modules.get("flytekit.extend")
        if extend:  # Without this, a task of flytekit would call the function only once.
            extend.TaskPlugins.register_pythontask_plugin(type(self), _refuse)
        super().__post_init__()


def _refuse(task_config: Distributed, function: Callable[..., Any], **options: Any) -> None:
    raise ConfigError(
        "task_config: expected flyte_ddp.flytekit_plugin.Distributed for a task of flytekit's, got "
        "that of flyte_ddp.flyte2"
    )


@dataclass(frozen=True)
class RankCall:
    """A call of a task's function in the context of its task, so that files of the function go to
    the task's outputs.
    """

    function: Any
    context: Any

    def __call__(self, **inputs: Any) -> Any:
        from flyte._context import internal_ctx

        action = self.context.action
        flyte.init(
            org=action.org,
            project=action.project,
            domain=action.domain,
            root_dir=self.context.run_base_dir,
        )
        with internal_ctx().replace_task_context(self.context):
            # In a rank that imports the module, the function's name refers to the task.
            return getattr(self.function, "func", self.function)(**inputs)


@dataclass(kw_only=True)
class DistributedTask(MainThreadTask):
    """The task of `Distributed`. Its resources are meant for each machine of the ranks."""

    plugin_config: Distributed
    resources: Any = None
    pods: dict[str, Any] | None = None  # sizes of the ranks' pods; empty for ranks in the own pod
    lost_options: Sequence[str] = ()  # options that do not reach the ranks' pods

    def __post_init__(self) -> None:
        super().__post_init__()
        config, resources = self.plugin_config, self.resources or flyte.Resources()
        if self.pods is None:
            self.pods = {}
            if config.gang().needs_cluster:
                self.pods = read_pod_sizes(resources)
                self.lost_options = self._list_lost_options(resources)
                self.resources = flyte.Resources(cpu=1, memory="2Gi")  # size of the driver's pod
            elif config.increase_shared_mem and not resources.shm:
                self.resources = dataclasses.replace(resources, shm="auto")
        config.gang(self.pods)

    def call(self, *args: Any, **inputs: Any) -> Any:
        config, name = self.plugin_config, self.func.__name__
        report = Report(name)
        with flyte_errors():
            gang = config.gang(self.pods)
            self.check_allowed(gang, inputs)
            limits = config.limit_urls(limited_urls)
        with (
            flyte_errors(),
            limits,
            open_task_run(
                report, "", config.max_hours, config.tracking(), bool(config.mlflow)
            ) as run,
        ):
            call = RankCall(self.func, flyte.ctx().replace(data=None))
            program = function_program(call, (), inputs, config.stall_timeout)
            variables = {**find_variables(FLYTE_VARIABLES), **(self.env_vars or {})}
            program = program.with_needs(variables=variables, max_cost=config.max_cost)
            packages = packages_beside(self.func.__module__)
            program = dataclasses.replace(program, name=name, packages=packages)
            fields: dict[str, Any] = {}
            if is_local() and not gang.is_on_this_machine:
                fields["checkpoints"] = ""  # Pods cannot reach a directory of this machine.
            value = run_function(run, config, program, gang, self.lost_options, **fields)
            return cloudpickle.loads(value)

    def _list_lost_options(self, resources: flyte.Resources) -> list[str]:
        """Return the given options that do not reach the ranks' pods: these get only CPUs, memory,
        shared memory and the number of GPUs.
        """
        lost = []
        if self.pod_template and self.pod_template != make_driver_template():
            lost.append("pod_template")
        # The tracker's key is meant for the driver alone.
        if any(getattr(each, "as_env_var", "") not in KEYS for each in self.secrets or ()):
            lost.append("secrets")
        device = resources.get_device()
        if device and device.device not in (None, "", "GPU"):
            lost.append(f"the kind of GPU, {device.device}")
        return lost

    def check_allowed(self, gang: Gang, inputs: Mapping[str, Any]) -> None:
        """Raise ConfigError if the gang's cluster is not allowed, or, in a pod, a file of `inputs`;
        or if the ranks cannot reach a file.
        """
        allowed = load_allowed(self.plugin_config.allowed)
        gang.check_allowed(allowed)
        urls = [(name, url) for name, value in inputs.items() for url in find_urls(value, read_url)]
        if not is_local():
            check_places(urls, allowed.urls)
        kinds = self.native_interface.outputs
        files = [name for name, kind in kinds.items() if contains_files(kind)]
        place = "raw-data-path", flyte.ctx().raw_data_path.path
        check_reachable(gang, urls, files, place)


def make_driver_template() -> flyte.PodTemplate:
    """Return the template of a driver's pod, which has time for a last checkpoint."""
    return flyte.PodTemplate().with_termination_grace_period(SETTINGS.termination_grace)


def read_url(value: Any) -> str | None:
    """Return the URL of a file, a directory or a data frame; None for another value."""
    if isinstance(value, (File, Dir)):
        return str(value.path)
    if isinstance(value, DataFrame):
        return value.uri or ""
    return None


def contains_files(kind: Any) -> bool:
    """Return whether values of a type contain files, such as those of `list[File]`."""
    if isinstance(kind, type) and issubclass(kind, (File, Dir, DataFrame)):
        return True
    return any(contains_files(part) for part in typing.get_args(kind))


def read_pod_sizes(resources: flyte.Resources) -> dict[str, Any]:
    """Return the limits among a task's resources as fields of a cluster."""
    cpu, memory = resources.cpu, resources.memory
    if isinstance(cpu, tuple):  # (request, limit)
        cpu = cpu[1]
    if isinstance(memory, tuple):
        memory = memory[1]
    shared, device = resources.shm, resources.get_device()
    if shared == "auto":
        shared = None
    return describe_sizes(cpu, memory, device and device.quantity, shared)


TaskPluginRegistry.register(Distributed, DistributedTask)
