"""Run a function or a script of the user's on this machine or on a Dask cluster. Imports neither
torch nor Dask itself.

`run` combines dask-pytorch-ddp's `dispatch.run` and torchrun's `elastic_launch`.
docs/your-own-function.md describes the environment of the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import logging
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig, cluster_config
from flyte_ddp.code.by_value import dumps, pickle
from flyte_ddp.code.source_code import packages_beside
from flyte_ddp.config.fields import check_object, field, finite_number, whole_number
from flyte_ddp.config.training import Needs
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.launch.arguments import name_arguments
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.control.reference import read_slow_nodes
from flyte_ddp.launch.control.results import Destination
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.caller_logging import CallerLogging
from flyte_ddp.launch.protocol.programs import (
    OUTPUTS_VARIABLE,
    SCRIPT_DIRECTORY,
    Job,
    Kind,
    Program,
    check_run_id,
)
from flyte_ddp.launch.protocol.ranks import STOP_SIGNALS
from flyte_ddp.launch.run_observers import show_resume_command
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.process.devices import default_num_processes, num_cores, num_gpus
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.project.admission import Allowed, check_allowed
from flyte_ddp.storage import write_file

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")
logger = logging.getLogger(__name__)

RUNS_NOTHING = "expected one whose call does the work and returns its value"
OUTPUTS = "{outputs}"  # text in a script's arguments: the directory of the output files


@dataclass(frozen=True)
class Gang:
    """Number and placement of the ranks of a run, in torchrun's terms.

    The command line has an option for each field with a help. `run`, `train`, `predict` and the
    task `Distributed` have parameters with the same names.

    Raises:
        ConfigError: a value has the wrong type or range, or is given twice.
    """

    # One machine needs no cluster. The default is all workers of `client`, or one machine.
    nnodes: int | str | None = field(None, help="machines, or a range such as 1:4")
    nproc_per_node: int | str = field(
        1, help="ranks on each: a number, gpu, cpu (one per core) or auto (per GPU, else two)"
    )
    # counts restarts without a new checkpoint in between, after any end of a rank but success
    max_restarts: int = field(0, help="restarts of all ranks after a loss")
    # has the fields of `ClusterConfig`, where `nnodes` is not 1
    cluster: ClusterConfig | Mapping[str, Any] | None = field(
        None, help="the machines: JSON, or a YAML or JSON file"
    )
    # counts from the first report on; the error has the stacks of all ranks
    stall_timeout: float = field(
        Needs.stall_timeout, help="seconds without a session.report until the run is ended"
    )
    master_port: int = 0  # port where the ranks of one machine meet; 0 for any free port
    client: Client | None = None  # client of an existing Dask cluster

    def __post_init__(self) -> None:
        if self.nnodes is None:
            nnodes = 1
            if self.client is not None:
                nnodes = count_workers(self.client)
            object.__setattr__(self, "nnodes", nnodes)
        match = re.fullmatch(r"(?:(\d+):)?(\d+)", str(self.nnodes))
        is_valid = False
        if match:
            most = int(match[2])
            least = int(match[1] or most)
            is_valid = 1 <= least <= most
        if not is_valid:
            raise ConfigError(
                "nnodes: expected a number of machines such as 2, or a range such as 1:4, got "
                f"{self.nnodes!r}"
            )
        if not re.fullmatch(r"auto|gpu|cpu|[1-9]\d*", str(self.nproc_per_node)):
            raise ConfigError(
                "nproc_per_node: expected a number of ranks, gpu, cpu or auto, got "
                f"{self.nproc_per_node!r}"
            )
        stall_timeout = finite_number("stall_timeout", self.stall_timeout, above=0, unit="seconds")
        object.__setattr__(self, "stall_timeout", stall_timeout)
        object.__setattr__(self, "max_restarts", whole_number("max_restarts", self.max_restarts))
        object.__setattr__(
            self, "master_port", whole_number("master_port", self.master_port, maximum=65535)
        )

    @property
    def needs_cluster(self) -> bool:
        is_given = self.cluster is not None or self.client is not None
        return is_given or not re.fullmatch("(1:)?1", str(self.nnodes))

    def num_processes(self) -> int:
        """Return the number of ranks on this machine. Raises ConfigError for "gpu" without GPUs."""
        if self.nproc_per_node == "gpu" and not num_gpus():
            raise ConfigError(
                "nproc_per_node: expected a number or cpu on a machine without GPUs, got 'gpu'"
            )
        counts = {"auto": default_num_processes, "gpu": num_gpus, "cpu": num_cores}
        kind = str(self.nproc_per_node)
        if kind in counts:
            return counts[kind]()
        return int(kind)

    def cluster_config(self) -> ClusterConfig:
        """Return the cluster that the gang needs.

        Raises:
            ConfigError: `cluster` has an unknown field, a bad value, or a value that contradicts
                the gang.
        """
        given = self.cluster
        if given is None:
            given = {}
        if isinstance(given, ClusterConfig):
            return given
        check_object("cluster", given)
        least, _, most = str(self.nnodes).rpartition(":")
        values: dict[str, Any] = {"num_nodes": int(most), "max_restarts": self.max_restarts}
        if least:
            values["min_nodes"] = int(least)
        if self.client is not None:
            given = {"kind": "existing", **given}
        if str(self.nproc_per_node).isdigit():
            values["processes_per_node"] = int(self.nproc_per_node)
        elif self.nproc_per_node == "cpu":
            raise ConfigError(
                "nproc_per_node: expected a number, gpu or auto on several machines, got 'cpu'"
            )
        for name, value in values.items():
            if given.get(name, value) != value:
                names = {
                    "num_nodes": "nnodes",
                    "min_nodes": "nnodes",
                    "processes_per_node": "nproc_per_node",
                }
                raise ConfigError(
                    f"cluster.{name}: expected {value}, as {names.get(name, name)} has it, got "
                    f"{given[name]!r}"
                )
        return cluster_config({**given, **values})

    def check_allowed(self, allowed: Allowed) -> None:
        """Raise ConfigError if `allowed` does not permit the cluster of the gang."""
        from flyte_ddp.cluster.kubernetes.api import own_namespace

        if self.needs_cluster:
            check_allowed(self.cluster_config(), allowed, own_namespace())

    @contextlib.contextmanager
    def open_place(
        self,
        program: Program,
        name: str = "",
        report_wait: Callable[[str], None] = logger.info,
        checkpoints: str = "",
    ) -> Iterator[driver.Place]:
        """Yield the place of the gang's ranks, with a cluster for the length of the block if they
        need one.

        Args:
            name: name of the run, unique in a namespace. A new cluster on Kubernetes gets it.
            report_wait: gets what a new cluster waits for, about every ten seconds.
            checkpoints: place of the run's checkpoints. A new cluster on Kubernetes avoids the
                nodes that were slow in an earlier attempt.

        Raises:
            ConfigError: before anything is started, if `program` cannot run at this size, or the
                cluster is impossible.
            ClusterError: the cluster did not start.
        """
        if not self.needs_cluster:
            yield LocalPlace(self.num_processes(), self.max_restarts, self.master_port)
            return
        from flyte_ddp.cluster import connect
        from flyte_ddp.cluster.kubernetes.manifest import avoid_nodes
        from flyte_ddp.launch.nodes.dask.place import DaskPlace, check

        config = self.cluster_config()
        check(program, config)
        name = name or f"run-{os.urandom(4).hex()}"
        if checkpoints and config.resolved_kind == "kubernetes":
            config = avoid_nodes(config, read_slow_nodes(checkpoints))
        with contextlib.ExitStack() as stack:
            client = self.client or stack.enter_context(
                connect.open_cluster(config, name, report_wait)
            )
            yield DaskPlace(client, config, name)

    @property
    def is_on_this_machine(self) -> bool:
        """True if the gang starts no ranks on other machines."""
        return not self.needs_cluster or (
            self.client is None and self.cluster_config().resolved_kind == "local"
        )


def count_workers(client: Client) -> int:
    """Return the number of workers of a cluster. Raises ConfigError if it has none."""
    # Not `scheduler_info`: another thread of the client forgets its workers every two seconds.
    num_workers = len(client.nthreads())
    if not num_workers:
        raise ConfigError(
            "client: expected a cluster with workers, got one without any; give nnodes, and the "
            "run waits for as many"
        )
    return num_workers


@dataclass(frozen=True)
class RunResult:
    """The result of `run` with `raise_errors=False`.

    Example:
        # after the ranks have ended
        result = flyte_ddp.run(train, nproc_per_node=2, raise_errors=False)
        if result.error is not None:
            print("failed:", result.error)
    """

    value: Any  # value of rank 0; None after a failure of a rank
    error: Exception | None  # error of a rank, or of `results`; None without an error


def run(
    function: Callable[..., T],
    *arguments: Any,
    nnodes: int | str | None = None,
    nproc_per_node: int | str = 1,
    max_restarts: int = 0,
    cluster: ClusterConfig | Mapping[str, Any] | None = None,
    client: Client | None = None,
    checkpoints: str = "",
    run_id: str = "",
    stall_timeout: float = Needs.stall_timeout,
    listeners: Sequence[events.Listener] = (),
    progress: bool = True,
    results: Destination | None = None,
    raise_errors: bool = True,
) -> T:
    """Call `function(*arguments)` in every rank, in torchrun's environment, and return rank 0's
    value.

    Args:
        function: any function that cloudpickle can pickle; its module's code travels with it. For
            keyword arguments give a `functools.partial`.
        nnodes, nproc_per_node, max_restarts, cluster, client, stall_timeout: see `Gang`.
        checkpoints: directory or URL for `session.save`, which all machines reach. An unfinished
            run there goes on. If all ranks are on this machine, the default is a directory for the
            length of the run.
        run_id: the same text for all attempts of this run, and for no other run. With it, a retry
            on another machine takes the checkpoints over at once. Without it, the retry waits for
            the lease of a killed attempt.
        listeners: receive every event of the run.
        progress: show the values of `session.report` and the ranks' lines on standard error.
        results: directory or URL for the files that `session.submit_result` sends, or a function
            `results(path, data: bytes)`. The function is called here in a thread, for one file at a
            time. Its first error is logged at once, and raised when the ranks have ended.
        raise_errors: False to return a `RunResult` with the error in place of raising it. A stop of
            the run is always raised.

    Raises:
        ConfigError: bad input, before anything is started, such as a function that cannot be
            pickled.
        RankFailure: a rank raised, was killed, or hung. The message has its number and traceback.
        GangLost, ClusterError: machines were lost, or did not start.
        TrainingStopped: SIGINT or SIGTERM ended the run.

    Example:
        # starts two processes on this machine
        import torch
        import torch.distributed as dist

        def add_ranks():
            dist.init_process_group("gloo")
            total = torch.tensor(dist.get_rank() + 1)
            dist.all_reduce(total)
            return total.item()

        assert flyte_ddp.run(add_ranks, nproc_per_node=2) == 3
    """
    gang = Gang(nnodes, nproc_per_node, max_restarts, cluster, stall_timeout, client=client)
    program = function_program(function, arguments, {}, stall_timeout)
    bars: list[ProgressBar] = []
    relay = None
    if progress:
        bars.append(ProgressBar())
        relay = bars[0].write
    state = events.RunState(keep_reports=False)
    failure: Exception | None = None
    listeners = [*bars, *listeners]
    try:
        with show_resume_command(bool(checkpoints)):
            job = Job(program, checkpoints, run=run_id)
            run_job(job, gang, None, listeners, relay, results, state)
    except Exception as error:
        if raise_errors or isinstance(error, TrainingStopped):
            raise
        failure = error
    value: Any = cloudpickle.loads(returned_value(state))
    if not raise_errors:
        value = RunResult(value, failure)
    return value  # type: ignore[no-any-return]


def function_program(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    stall_timeout: float = Needs.stall_timeout,
) -> Program:
    """Return the program that calls `function`.

    Raises:
        ConfigError: `function` cannot be pickled, or its call would run nothing.
    """
    function = plain_function(function)
    code = getattr(function, "func", function)  # the function in a partial
    name = getattr(code, "__qualname__", repr(code))
    call = pickle(FunctionCall(function, tuple(arguments), keywords), function, "function")
    packages = packages_beside(code.__module__ or "__main__")
    return Program(
        name,
        call,
        packages,
        named_arguments=name_arguments(function, arguments, keywords),
        needs=Needs(stall_timeout),
        logging=CallerLogging.read(),
    )


def plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that `function` stands for: `dask.delayed` and partials are unwrapped.

    Raises:
        ConfigError: a call of it would run nothing.
    """
    if isinstance(function, functools.partial):
        plain = plain_function(function.func)
        return functools.partial(plain, *function.args, **function.keywords)
    if hasattr(type(function), "__dask_graph__"):
        function = getattr(function, "__wrapped__", function)
    if not callable(function):
        raise ConfigError(f"function: expected one to call, got {function!r:.200}")
    kind = _kind_of_nothing(function)
    if kind:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise ConfigError(f"function: {RUNS_NOTHING}, got {name}, {kind}")
    return function


def _kind_of_nothing(function: Callable[..., Any]) -> str:
    """Return the kind of value that a call of `function` makes unrun; "" if the call runs it."""
    if hasattr(type(function), "__dask_graph__"):
        return "a value of Dask's that is not computed"
    for code in (function, inspect.getattr_static(type(function), "__call__")):
        if inspect.iscoroutinefunction(code):
            return "whose call makes a coroutine"
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            return "whose call makes a generator"
    return ""


def _check_value(value: Any) -> None:
    """Raise ConfigError if a function's value shows that nothing has run."""
    has_graph = hasattr(type(value), "__dask_graph__")
    if has_graph or inspect.isawaitable(value) or inspect.isgenerator(value):
        raise ConfigError(
            f"function: {RUNS_NOTHING}, got one that returns a {type(value).__name__}"
        )
    if inspect.isasyncgen(value):
        raise ConfigError(f"function: {RUNS_NOTHING}, got one that returns an async generator")


def run_job(
    job: Job,
    gang: Gang,
    data: Callable[[], str] | None = None,
    listeners: Sequence[events.Listener] = (),
    relay: Callable[[str], None] | None = None,
    results: Destination | None = None,
    state: events.RunState | None = None,
    name: str = "",
) -> events.RunState:
    """Run the program of `job` in the ranks of `gang`, start to end. `run`, `driver.run` and
    `Gang.open_place` describe the arguments and errors.

    If the job has no place for checkpoints, it gets a directory for the length of the run if all
    ranks are on this machine.
    """
    check_run_id(job.run)
    checkpoints = job.checkpoints
    with (
        gang.open_place(job.program, name, checkpoints=checkpoints) as place,
        contextlib.ExitStack() as stack,
    ):
        is_kept = job.is_kept and bool(checkpoints)
        if not checkpoints and gang.is_on_this_machine:  # restarts within the run need a place
            checkpoints = stack.enter_context(temporary_directory("checkpoints-"))
        job = dataclasses.replace(
            job, checkpoints=checkpoints, launched_at=time.time(), is_kept=is_kept
        )
        return driver.run(job, place, data, listeners, relay, results=results, state=state)


def returned_value(state: events.RunState) -> bytes:
    """Return the pickled value of rank 0's call: None if rank 0 ended by `os._exit(0)`."""
    if state.finished is None:
        return dumps(None)
    return state.finished.value


def script_program(
    script: str,
    arguments: Sequence[str],
    is_module: bool = False,
    outputs: str = "",
) -> Program:
    """Return the program that runs a script as Python does, or a module as `python -m` does, with
    `arguments`.

    A script is also a zip file or a directory with `__main__.py`. A link stands for its target. The
    script's directory is shipped to every node.

    Args:
        outputs: directory or URL for output files. In the arguments, `OUTPUTS` is replaced by a
            local directory, and its files are copied to `outputs`.

    Raises:
        ConfigError: the file or module does not exist.
    """
    packages: tuple[str, ...] = ()
    directory = name = ""
    if is_module:
        package = script.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"script: expected a module that Python finds here, got {script!r}")
        packages = (package,)
    else:
        path = Path(script).resolve()
        if not (path.is_file() or (path / "__main__.py").is_file()):
            raise ConfigError(
                f"script: expected a file, or a directory with __main__.py, got {script!r}"
            )
        directory = str(path)
        if not path.is_dir():
            directory, name = str(path.parent), path.name
    call = _Script(script, directory, name, tuple(arguments), os.getcwd(), outputs)
    name = Path(script).name or Path(directory).name
    return Program(name, dumps(call), packages, directory, shlex.join(arguments))


def command_program(command: Sequence[str]) -> Program:
    """Return the program that runs another program, with its arguments, in a process of every rank.

    Raises:
        ConfigError: the other program does not exist.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"script: expected a program that can be executed, got {command[0]!r}")
    call = dumps(_Command(tuple(command), os.getcwd()))
    name, arguments = Path(command[0]).name, shlex.join(command[1:])
    return Program(name, call, arguments=arguments, kind=Kind.COMMAND)


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function, whose value is pickled on rank 0."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(factory=dict)

    def __call__(self) -> bytes:
        function = plain_function(self.function)  # a name may stand for the wrapper again
        value = _call_to_exit(functools.partial(function, *self.arguments, **self.keywords))
        _check_value(value)
        if os.environ["RANK"] != "0":
            return b""
        return dumps(value)


@dataclass(frozen=True)
class _Script:
    """A run of a script, as torchrun starts it: as `__main__`, with its arguments, in the caller's
    directory.

    On another machine, the shipped copy of the script's directory takes the place of that
    directory.
    """

    script: str
    directory: str  # "" for a module
    name: str  # name of the file in the directory; "" for the directory itself
    arguments: tuple[str, ...]
    working_directory: str
    outputs: str

    def __call__(self) -> bytes:
        with outputs_directory(self.outputs) as outputs:
            arguments = list(self.arguments)
            if outputs:
                arguments = [each.replace(OUTPUTS, outputs) for each in arguments]
            self._run(arguments)
        return b""

    def _run(self, arguments: Sequence[str]) -> None:
        shipped = Path(__file__).parents[2] / SCRIPT_DIRECTORY
        directory = Path(self.directory)
        main_name = self.name or "__main__.py"
        given = directory / main_name
        if self.directory and shipped.is_dir():
            directory = shipped
        file, main = directory / self.name, directory / main_name
        is_here = not self.directory or (
            given.is_file() and given.read_bytes() == main.read_bytes()
        )
        if is_here and os.path.isdir(self.working_directory):
            os.chdir(self.working_directory)
        elif self.directory:
            os.chdir(directory)
        sys.argv = [str(file), *arguments]
        if is_here:
            sys.argv[0] = self.script
        # Files in the working directory hide no installed package, as under torchrun.
        others = [entry for entry in sys.path if entry not in ("", self.working_directory)]
        run: Callable[[], object]
        if not self.directory:
            sys.path[:] = [os.getcwd(), *others]
            run = functools.partial(
                runpy.run_module, self.script, run_name="__main__", alter_sys=True
            )
        else:
            place = os.path.abspath(self.script)
            if os.path.realpath(place) != str(file):  # Python resolves no link in __file__
                place = str(file)
            importer = pkgutil.get_importer(place)  # None unless it is a directory or a zip file
            first = str(directory)
            if importer:
                first = place
            sys.path[:] = [first, *others, self.working_directory]
            run = functools.partial(_run_as_main, place, importer)
        _call_to_exit(run)


@contextlib.contextmanager
def outputs_directory(url: str) -> Iterator[str]:
    """Yield a directory of this machine in a rank, and copy its files to `url` when rank 0 leaves
    the block.

    All ranks of a node get the same directory. A local `url` is the directory itself. "" yields "".

    Raises:
        StorageUnavailable, StorageDenied: the files cannot be copied.
    """
    directory = url
    if "://" in url:
        directory = os.environ[OUTPUTS_VARIABLE]
    if directory:
        os.makedirs(directory, exist_ok=True)
    yield directory
    if directory != url and os.environ["RANK"] == "0":
        for file in sorted(Path(directory).rglob("*")):
            if file.is_file():
                write_file(
                    f"{url.rstrip('/')}/{file.relative_to(directory).as_posix()}",
                    file.read_bytes(),
                    "outputs",
                )


@dataclass(frozen=True)
class _Command:
    """A run of a program that is no Python script. It runs in the caller's directory if the machine
    has this directory.
    """

    command: tuple[str, ...]
    working_directory: str

    def __call__(self) -> bytes:
        directory = None
        if os.path.isdir(self.working_directory):
            directory = self.working_directory
        process = subprocess.Popen(self.command, cwd=directory)
        for name in STOP_SIGNALS:
            signal.signal(signal.Signals[name], lambda number, frame: process.send_signal(number))
        code = process.wait()
        if code < 0:
            code = 128 - code
        if code:
            sys.exit(code)
        return b""


def _run_as_main(file: str, importer: Any) -> None:
    """Run a script as Python itself does. Its threads may use its module until the process ends."""
    main: Any = types.ModuleType("__main__")
    if importer:
        main.__spec__ = importer.find_spec("__main__")
        main.__file__, main.__loader__ = main.__spec__.origin, main.__spec__.loader
        main.__package__ = ""
        code = main.__loader__.get_code("__main__")
    else:
        main.__file__, main.__loader__ = file, SourceFileLoader("__main__", file)
        code = main.__loader__.source_to_code(Path(file).read_bytes(), file)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _call_to_exit(call: Callable[[], T]) -> T | None:
    """Return the value of `call`; None if it exits with code 0. Raises SystemExit if it exits with
    another code.
    """
    try:
        return call()
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        raise
