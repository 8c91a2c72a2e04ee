"""`Distributed`: a Flyte task whose function runs in every rank, with the fields of kfpytorch's
`Elastic`.

The task is the driver. It starts the ranks in its own pod, or on a Dask cluster that it makes for
them, watches them, and returns rank 0's outputs. In a local run the ranks are processes of this
machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from flytekit import Deck, FlyteContextManager, PythonFunctionTask
from flytekit.core.tracker import extract_task_module
from flytekit.core.type_engine import TypeEngine
from flytekit.deck.deck import _output_deck
from flytekit.extend import TaskPlugins
from flytekit.models.literals import LiteralMap
from google.protobuf.json_format import MessageToDict

from flyte_ddp.cluster.admission import Allowed, check_allowed, check_urls, load_allowed
from flyte_ddp.cluster.config import KubernetesConfig
from flyte_ddp.cluster.kubernetes.api import own_namespace
from flyte_ddp.config.fields import check, finite_number
from flyte_ddp.config.source_code import find_root, packages_beside
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.failures import flyte_errors
from flyte_ddp.flyte.flyte_context import is_flyte_task
from flyte_ddp.flyte.frame import open_frame
from flyte_ddp.flyte.pods import describe_pods, fit_driver_pod, fit_own_pod
from flyte_ddp.flyte.rank_call import TaskCall, unpack
from flyte_ddp.launch.agent.devices import num_gpus
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.run import Gang, returned_value
from flyte_ddp.observers.mlflow import find_server
from flyte_ddp.observers.recorder import TRACKERS
from flyte_ddp.observers.reports.run import Report

# beginnings of the names that tell a process its execution; no secrets
FLYTE_VARIABLES = ("FLYTE_INTERNAL_", "_F_")
_LITERALS = "literals"


@dataclass
class Distributed:
    """Run the function of a Flyte task in every rank of a gang, in torchrun's environment.

    The first eight fields are those of kfpytorch's `Elastic`, in its order.

    Args:
        nnodes: machines; "1:4" for at least 1 and at most 4. One is the task's own pod and needs no
            cluster.
        nproc_per_node: ranks on each; "gpu" for one per GPU, "auto" for one per GPU, or two where
            there are none.
        start_method: "spawn" or "fork", which change nothing: ranks are always fresh processes.
        monitor_interval: changes nothing: the end of a rank is noticed at once.
        max_restarts: how often all ranks start again, within one attempt of Flyte's and without a
            new checkpoint in between, after one was killed, hung or lost, or failed in a way that
            another attempt may not repeat.
        rdzv_configs: "join_timeout" is the number of seconds that a cluster of several nodes may
            take to start; the rest has no meaning here.
        increase_shared_mem: give a pod with ranks as much shared memory as it has memory, if
            neither the task's `shared_memory` nor `cluster` names its size.
        run_policy: Kubeflow's, which changes nothing: the task's own `timeout` and `retries` count.
        cluster: the machines, with the fields of `flyte_ddp.cluster.config.ClusterConfig`. What it
            does not name follows from the task's `requests` and `limits`: they are those of each
            machine's pod.
        stall_timeout: seconds without a report of any rank until the run is ended with all stacks;
            it counts from the first `session.report` on.
        max_hours: of the task, all attempts together, until its ranks are asked for a last
            checkpoint and it ends for good; 0 is no limit.
        wandb: the project of W&B that records the run, by the key of the task's secret
            `wandb/api_key` or of WANDB_API_KEY; "" for none, as for a function that calls W&B
            itself.
        mlflow: instead of it, the experiment of MLflow that records the run, on the server that
            MLFLOW_TRACKING_URI or settings.toml names, by the token of the task's secret
            `mlflow/token` or of MLFLOW_TRACKING_TOKEN.
        tensorboard: instead of both, a directory or URL for TensorBoard, in which each run gets
            one.
        allowed: what the task's cluster and its input files may be, such as {"kinds": ["existing"],
            "addresses": ["tcp://dask:8786"], "env": ["NCCL_*"]}. A field that it does not name is
            that of the table `allowed` in the settings.toml beside this package. Without that file:
            the kind "kubernetes" with whatever pods, and files in object stores or at https.
        results: URL for the files that `session.submit_result` sends, or a directory of the task's
            machine.

    Raises:
        ConfigError: a value has the wrong type or range.
    """

    nnodes: int | str = 1
    nproc_per_node: int | str = 1
    start_method: str = "spawn"
    monitor_interval: float = 5
    max_restarts: int = 0
    rdzv_configs: dict[str, Any] = field(
        default_factory=lambda: {"timeout": 900, "join_timeout": 900}
    )
    increase_shared_mem: bool = True
    run_policy: Any = None
    cluster: Mapping[str, Any] | None = None
    stall_timeout: float = Program.stall_timeout
    max_hours: float = 0.0
    wandb: str = ""
    allowed: Mapping[str, Sequence[str]] | None = None
    mlflow: str = ""
    tensorboard: str = ""
    results: str = ""

    def __post_init__(self) -> None:
        check("allowed", self.allowed or {}, Allowed)
        trackers = [name for name in TRACKERS if getattr(self, name)]
        for name in trackers[1:]:
            got = getattr(self, name)
            raise ConfigError(f"{name}: expected none beside {trackers[0]}, got {got!r}")
        finite_number("max_hours", self.max_hours, minimum=0, unit="hours")
        self.gang()

    def gang(self, pods: Mapping[str, Any] | None = None) -> Gang:
        """Return where the ranks run. `cluster` need not name what `pods` has of `kubernetes`, and
        gpus_per_node.
        """
        gang = Gang(
            self.nnodes, self.nproc_per_node, self.max_restarts, self.cluster, self.stall_timeout
        )
        if not gang.needs_cluster:
            return gang
        values = dict(self.cluster or {})
        if "join_timeout" in self.rdzv_configs:
            values.setdefault("start_timeout", float(self.rdzv_configs["join_timeout"]))
        gang = dataclasses.replace(gang, cluster=values)
        kind = gang.cluster_config().resolved_kind
        pods = dict(pods or {})
        gpus = pods.pop("gpus_per_node", 0)
        if kind == "kubernetes":
            values.setdefault("gpus_per_node", gpus)
            kubernetes = {**pods, **values.get("kubernetes", {})}
            if self.increase_shared_mem:
                kubernetes.setdefault(
                    "shared_memory",
                    kubernetes.get("worker_memory", KubernetesConfig().worker_memory),
                )
            values["kubernetes"] = kubernetes
        elif kind == "local" and values.get("gpus_per_node", 0) > num_gpus():
            values["gpus_per_node"] = 0  # the same task, tried out on a machine without GPUs
        return dataclasses.replace(gang, cluster=values)

    def tracking(self) -> tuple[str, ...]:
        """Return what records the runs, as of `open_frame`. Raises ConfigError as `find_server`."""
        server = [find_server()] if self.mlflow else []
        found = [(name, *server, place) for name in TRACKERS if (place := getattr(self, name))]
        return found[0] if found else ()

    def list_ignored(self) -> list[str]:
        """Return the fields that were given and have no meaning here."""
        default = Distributed()
        fields = ("start_method", "monitor_interval", "run_policy")
        names = [name for name in fields if getattr(self, name) != getattr(default, name)]
        known = self.gang().needs_cluster or self.rdzv_configs == default.rdzv_configs
        unknown = self.rdzv_configs.keys() - (default.rdzv_configs.keys() if known else set())
        return [*names, *(f"rdzv_configs.{name}" for name in sorted(unknown))]


class DistributedTask(PythonFunctionTask[Distributed]):  # type: ignore[misc]
    """The task that `@task(task_config=Distributed(...))` makes."""

    def __init__(
        self, task_config: Distributed, task_function: Callable[..., Any], **options: Any
    ) -> None:
        behavior = PythonFunctionTask.ExecutionBehavior.DEFAULT
        if options.get("execution_mode", behavior) is not behavior:
            raise ConfigError(
                "task_config: expected Distributed for @task, got it for another decorator"
            )
        # sizes of the ranks' pods, as the task's own options have them
        self._pods: dict[str, Any] = {}
        self._not_moved: list[str] = []  # other options that would be meant for those pods
        if task_config.gang().needs_cluster:
            self._pods = describe_pods(options)
            options, self._not_moved = fit_driver_pod(options)
            task_config.gang(self._pods)
        else:
            options = fit_own_pod(options, task_config.increase_shared_mem)
        super().__init__(task_config, task_function, task_type="python-task", **options)

    def _literal_map_to_python_input(self, literal_map: LiteralMap, ctx: Any) -> dict[str, Any]:
        """Return the inputs as they are: only the ranks need Python values."""
        return {_LITERALS: literal_map}

    def execute(self, **inputs: Any) -> Any:
        """Run the function in the ranks. Called by flytekit, with Python values by a map task.

        Returns:
            The outputs as literals, which flytekit passes on as they are; as Python values to a map
            task.

        Raises:
            UserError, RecoverableError, TaskFailed, KeyboardInterrupt: see `flyte_errors`.
        """
        literals = inputs.get(_LITERALS)
        if isinstance(literals, LiteralMap):
            return self._run(literals)
        context = FlyteContextManager.current_context()
        outputs = self.python_interface.outputs
        literals = self._run(
            TypeEngine.dict_to_literal_map(context, inputs, self.python_interface.inputs)
        )
        values = tuple(
            TypeEngine.literal_map_to_kwargs(context, literals, outputs)[name] for name in outputs
        )
        return values if len(values) > 1 else next(iter(values), None)

    def _run(self, inputs: LiteralMap) -> LiteralMap:
        context = FlyteContextManager.current_context()
        parameters, config = context.user_space_params, self.task_config
        is_local = context.execution_state.is_local_execution()
        name = self.name.split(".")[-1]
        report = Report(name)
        with flyte_errors():
            tracking = config.tracking()
        # A function may call W&B itself, so its ranks get that key where MLflow does not record the
        # run.
        with open_frame(report, name, tracking=tracking, hides_key=bool(config.mlflow)) as frame:
            frame.receivers.append(report.add_line)
            gang = config.gang(self._pods)
            self.check_allowed(gang, inputs)
            self._say_what_is_ignored(frame.say)
            prefix = context.file_access.raw_output_prefix
            _check_places(gang, inputs, self.interface.outputs, prefix)
            frame.limit_time(config.max_hours)
            program = self._program(inputs, prefix, parameters)
            # A run from this machine on pods has no place that they would reach.
            checkpoints = "" if is_local and not gang.is_on_this_machine else None
            package = sys.modules.get(self.task_function.__module__.partition(".")[0])
            root = str(find_root(package) or os.getcwd())
            if root not in sys.path:  # where `pyflyte run` had it while it loaded the module
                sys.path.append(root)
            with gang.open_place(program, frame.name) as place:
                state = frame.run(
                    report,
                    program,
                    place,
                    labels={"task": name},
                    checkpoints=checkpoints,
                    is_kept=not is_local,
                    results=config.results,
                )
                frame.keep_history(report)
        outputs, decks = unpack(returned_value(state))
        for title, html in decks:
            Deck(title, html)
        if is_local and self.enable_deck:  # in a pod, flytekit does it
            _output_deck(name, parameters)
        return outputs

    def check_allowed(self, gang: Gang, inputs: LiteralMap) -> None:
        """Raise ConfigError for a cluster of the gang, or in a task of Flyte a URL of `inputs`,
        that is not allowed.
        """
        allowed = load_allowed(self.task_config.allowed)
        if gang.needs_cluster:
            check_allowed(gang.cluster_config(), allowed, own_namespace())
        if is_flyte_task():
            for name, url in _list_urls(inputs):
                check_urls({name: url}, allowed)

    def _program(self, inputs: LiteralMap, raw_output_prefix: str, parameters: Any) -> Program:
        _, module, attribute, _ = extract_task_module(self)
        is_found = getattr(sys.modules.get(module), attribute, None) is self
        checkpoints: tuple[str | None, str | None] = (None, None)
        with contextlib.suppress(NotImplementedError):  # a local run has no place for Flyte's own
            checkpoint = parameters.checkpoint
            checkpoints = (checkpoint._checkpoint_dest, checkpoint._checkpoint_src)
        call = TaskCall(
            module=module if is_found else "",
            attribute=attribute,
            task=b"" if is_found else cloudpickle.dumps(self),
            inputs=inputs.to_flyte_idl().SerializeToString(),
            raw_output_prefix=raw_output_prefix,
            output_metadata_prefix=parameters.output_metadata_prefix or "",
            checkpoints=checkpoints,
        )
        own = {
            name: value for name, value in os.environ.items() if name.startswith(FLYTE_VARIABLES)
        }
        return Program(
            name=attribute,
            call=cloudpickle.dumps(call),
            packages=packages_beside(self.task_function.__module__),
            stall_timeout=self.task_config.stall_timeout,
            variables={**own, **self.environment},
        )

    def _say_what_is_ignored(self, say: Callable[[str], None]) -> None:
        if names := self.task_config.list_ignored():
            say(f"{self.name}: these fields of task_config change nothing: {', '.join(names)}")
        if self._not_moved:
            say(
                f"{self.name}: these options of the task do not reach the pods of its ranks, "
                "which have their own in "
                f"task_config.cluster.kubernetes: {', '.join(self._not_moved)}"
            )


def _check_places(
    gang: Gang, inputs: LiteralMap, outputs: Mapping[str, Any], raw_output_prefix: str
) -> None:
    """Raise ConfigError for a local file as input, or local outputs, in a run whose ranks are on
    other machines.
    """
    if not gang.needs_cluster or gang.cluster_config().resolved_kind != "kubernetes":
        return
    for name, url in _list_urls(inputs):
        if _is_local(url):
            raise ConfigError(
                f"{name}: expected a URL that the pods of the ranks can reach, got {url!r}"
            )
    for name, variable in outputs.items():
        kind = MessageToDict(variable.type.to_flyte_idl())
        files = list(_find_values(kind, "blob", "structuredDatasetType"))
        if files and _is_local(raw_output_prefix):
            raise ConfigError(
                "raw-output-data-prefix: expected a URL that the pods of the ranks can reach, "
                f"because output {name} "
                f"is a file, got {raw_output_prefix!r}"
            )


def _list_urls(inputs: LiteralMap) -> Iterator[tuple[str, str]]:
    """Yield the URLs of files, directories and data frames among a task's inputs, each with the
    input's name.
    """
    for name, literal in inputs.literals.items():
        for url in _find_values(MessageToDict(literal.to_flyte_idl()), "uri"):
            yield name, url


def _find_values(message: Any, *keys: str) -> Iterator[Any]:
    """Yield what is under one of `keys` anywhere in a message."""
    if isinstance(message, Mapping):
        yield from (message[key] for key in keys if key in message)
        message = list(message.values())
    for value in message if isinstance(message, list) else ():
        yield from _find_values(value, *keys)


def _is_local(uri: str) -> bool:
    return "://" not in uri or uri.startswith("file://")


TaskPlugins.register_pythontask_plugin(Distributed, DistributedTask)
