"""The Flyte task of `Distributed`: its function runs in every rank.

The task is the driver. It starts the ranks in its own pod, or on a new Dask cluster. It watches
them, and returns rank 0's outputs. In a local run the ranks are processes of this machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flytekit import Deck, FlyteContextManager, PythonFunctionTask, StructuredDataset
from flytekit.core.tracker import extract_task_module
from flytekit.core.type_engine import TypeEngine
from flytekit.extend import TaskPlugins
from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from google.protobuf.json_format import MessageToDict

from flyte_ddp.code.by_value import dumps, pickle
from flyte_ddp.code.source_code import find_root, packages_beside
from flyte_ddp.config.training import Needs
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.deck import write_local_decks
from flyte_ddp.flyte.failures import flyte_errors
from flyte_ddp.flyte.flyte_context import is_flyte_task
from flyte_ddp.flyte.pods import make_driver_options, make_rank_options, read_pod_sizes
from flyte_ddp.flyte.rank_call import TaskCall, unpack
from flyte_ddp.flyte.task import limited_urls, open_task_run
from flyte_ddp.launch.arguments import name_arguments
from flyte_ddp.launch.distributed import Distributed as Distributed
from flyte_ddp.launch.protocol.caller_logging import CallerLogging
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.run import Gang
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.project.admission import load_allowed
from flyte_ddp.storage import check_places
from flyte_ddp.task_run import distributed
from flyte_ddp.task_run.distributed import find_variables, run_function

# beginnings of the variables that describe a process's execution; they contain no secrets
FLYTE_VARIABLES = ("FLYTE_INTERNAL_", "_F_")
_LITERALS = "literals"


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
        # sizes of the ranks' pods, from the task's own options
        self._pods: dict[str, Any] = {}
        self._lost_options: list[str] = []  # options that do not reach the ranks' pods
        if task_config.gang().needs_cluster:
            self._pods = read_pod_sizes(options)
            options, self._lost_options = make_driver_options(options)
            task_config.gang(self._pods)
        else:
            options = make_rank_options(options, task_config.increase_shared_mem)
        super().__init__(task_config, task_function, task_type="python-task", **options)

    def _literal_map_to_python_input(self, literal_map: LiteralMap, ctx: Any) -> dict[str, Any]:
        """Return the inputs as they are: only the ranks need Python values."""
        return {_LITERALS: literal_map}

    def execute(self, **inputs: Any) -> Any:
        """Run the function in the ranks. flytekit calls this with literals, and a map task with
        Python values.

        Returns:
            The outputs as literals, which flytekit passes on as they are. A map task gets Python
            values.

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
        if len(values) > 1:
            return values
        return next(iter(values), None)

    def _run(self, inputs: LiteralMap) -> LiteralMap:
        context = FlyteContextManager.current_context()
        parameters, config = context.user_space_params, self.task_config
        is_local = context.execution_state.is_local_execution()
        name = self.name.split(".")[-1]
        report = Report(name)
        with flyte_errors():
            tracking, limits = config.tracking(), config.limit_urls(limited_urls)
        opened = open_task_run(
            report,
            name,
            tracking=tracking,
            # A function may call W&B itself, so its ranks get W&B's key unless MLflow records the
            # run.
            hides_keys=bool(config.mlflow),
            has_outputs=False,
        )
        with limits, opened as run:
            gang = config.gang(self._pods)
            self.check_allowed(gang, inputs)
            prefix = context.file_access.raw_output_prefix
            check_reachable(gang, self._list_urls(inputs), self.interface.outputs, prefix)
            run.limit_time(config.max_hours)
            program = self._program(inputs, prefix, parameters)
            fields: dict[str, Any] = {"is_kept": not is_local}
            if is_local and not gang.is_on_this_machine:
                fields["checkpoints"] = ""  # Pods cannot reach a directory of this machine.
            self._extend_path()
            value = run_function(run, config, program, gang, self._lost_options, **fields)
        outputs, decks = unpack(value)
        for title, html in decks:
            Deck(title, html)
        if is_local and self.enable_deck:  # flytekit itself writes the Decks in a pod
            write_local_decks(name, parameters)
        return outputs

    def _extend_path(self) -> None:
        """Let Python find the function's package, as `pyflyte run` did while it loaded the task."""
        package = sys.modules.get(self.task_function.__module__.partition(".")[0])
        root = str(find_root(package) or os.getcwd())
        if root not in sys.path:
            sys.path.append(root)

    def check_allowed(self, gang: Gang, inputs: LiteralMap) -> None:
        """Raise ConfigError if the gang's cluster is not allowed, or, in a task of Flyte, a URL of
        `inputs`.
        """
        allowed = load_allowed(self.task_config.allowed)
        gang.check_allowed(allowed)
        if is_flyte_task():
            check_places(self._list_urls(inputs), allowed.urls)

    def _list_urls(self, inputs: LiteralMap) -> Iterator[tuple[str, str]]:
        """Yield the URLs of files, directories and data frames among the inputs, each with the
        input's name.
        """
        context, kinds = FlyteContextManager.current_context(), self.python_interface.inputs
        for name, literal in inputs.literals.items():
            message = MessageToDict(literal.to_flyte_idl())
            for url in _find_values(message, "uri"):
                yield name, url
            if list(_find_values(message, "binary")):  # dataclasses, without their files' bytes
                value = TypeEngine.to_python_value(context, literal, kinds[name])
                for url in distributed.find_urls(value, _read_url):
                    yield name, url

    def _program(self, inputs: LiteralMap, raw_output_prefix: str, parameters: Any) -> Program:
        _, module, attribute, _ = extract_task_module(self)
        is_found = getattr(sys.modules.get(module), attribute, None) is self
        checkpoints: tuple[str | None, str | None] = (None, None)
        # A local run has no Flyte checkpoint, and another flytekit may hide the paths.
        with contextlib.suppress(NotImplementedError, AttributeError):
            checkpoint = parameters.checkpoint
            checkpoints = (checkpoint._checkpoint_dest, checkpoint._checkpoint_src)
        pickled = b""
        if not is_found:
            module, pickled = "", pickle(self, self.task_function, "task")
        call = TaskCall(
            module=module,
            attribute=attribute,
            task=pickled,
            inputs=inputs.to_flyte_idl().SerializeToString(),
            raw_output_prefix=raw_output_prefix,
            output_metadata_prefix=parameters.output_metadata_prefix or "",
            checkpoints=checkpoints,
        )
        variables = {**find_variables(FLYTE_VARIABLES), **self.environment}
        config = self.task_config
        return Program(
            name=attribute,
            call=dumps(call),
            packages=packages_beside(self.task_function.__module__),
            named_arguments=name_arguments(self.task_function, (), _list_primitives(inputs)),
            logging=CallerLogging.read(),
            needs=Needs(config.stall_timeout, variables=variables, max_cost=config.max_cost),
        )


def _list_primitives(inputs: LiteralMap) -> dict[str, Any]:
    """Return the inputs that are numbers, texts and truth values."""
    scalars = {name: literal.scalar for name, literal in inputs.literals.items()}
    return {
        name: scalar.primitive.value
        for name, scalar in scalars.items()
        if scalar and scalar.primitive and isinstance(scalar.primitive.value, (str, int, float))
    }


def check_reachable(
    gang: Gang,
    urls: Iterable[tuple[str, str]],
    outputs: Mapping[str, Any],
    raw_output_prefix: str,
) -> None:
    """Check a task's inputs and outputs as `task_run.distributed.check_reachable` does."""
    files = []
    for name, variable in outputs.items():
        kind = MessageToDict(variable.type.to_flyte_idl())
        if list(_find_values(kind, "blob", "structuredDatasetType")):
            files.append(name)
    place = "raw-output-data-prefix", raw_output_prefix
    distributed.check_reachable(gang, urls, files, place)


def _read_url(value: Any) -> str | None:
    """Return the URL of a file, a directory or a data frame; None for another value."""
    if isinstance(value, (FlyteFile, FlyteDirectory)):
        return str(value.remote_source or value.path)
    if isinstance(value, StructuredDataset):
        return value.uri or ""
    return None


def _find_values(message: Any, *keys: str) -> Iterator[Any]:
    """Yield the values of `keys` anywhere in a message."""
    if isinstance(message, Mapping):
        yield from (message[key] for key in keys if key in message)
        message = list(message.values())
    if isinstance(message, list):
        for value in message:
            yield from _find_values(value, *keys)


TaskPlugins.register_pythontask_plugin(Distributed, DistributedTask)
