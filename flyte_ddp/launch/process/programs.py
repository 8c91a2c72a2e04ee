"""The programs that a rank can run: a recipe's training, or a function of the user's. Imports no torch.

The launchers start either kind in the same way. They ask a program for its limits and its source files, and have it
checked; the rank's process calls its `entry`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.source_code import files_below, packages_of, source_files
from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.launch.process.output import Output
from flyte_ddp.recipes import BUILTIN, get_recipe

COMPILERS = ("g++", "gcc", "clang")  # torch.compile takes g++ or CXX for CPUs, gcc, clang or CC for GPUs
CUDA_OUT_OF_MEMORY = "OutOfMemoryError"  # class name of torch.cuda.OutOfMemoryError
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # that end a run early, as torchrun's
STOP_GRACE = 20.0  # seconds to write a last checkpoint in; Kubernetes kills a pod 30 s after SIGTERM
SCRIPT_DIRECTORY = "flyte_ddp_script"  # among the source files on a node: the directory of a script


@dataclass(frozen=True)
class RecipeProgram:
    """The training of a recipe by `flyte_ddp.rank.main`."""

    entry: ClassVar[str] = "flyte_ddp.rank.main:main"  # what a rank's process calls with the program and itself
    recipe: str
    config: TrainingConfig
    initial_state: str = ""  # fsspec URL of the state dict that a new run starts from; "" for fresh weights
    may_exit: typing.ClassVar[bool] = False  # a rank that ends its process itself, with code 0, has succeeded
    repeats_bugs: typing.ClassVar[bool] = False  # an exception that would repeat is answered by a restart too

    signals: ClassVar[tuple[str, ...]] = STOP_SIGNALS
    stop_grace: ClassVar[float] = STOP_GRACE
    output: ClassVar[Output] = Output()
    virtual_local_rank: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.recipe

    @property
    def stall_timeout(self) -> float:
        return self.config.stall_timeout

    @property
    def store_timeout(self) -> float:
        return self.config.store_timeout

    @property
    def slow_imports(self) -> tuple[str, ...]:
        """Modules of others that every rank imports, in seconds; its ranks are forked from a process that has them."""
        # With fsdp torch imports its compiler too, to leave the gathering of weights out of graphs.
        needs_compiler = self.config.compile or self.config.parallel == "fsdp"
        return ("torch", "torch._dynamo") if needs_compiler else ("torch",)

    @property
    def uses_nccl(self) -> bool:
        """True if ranks with GPUs talk by NCCL."""
        return self.config.backend != "gloo"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that torch's libraries read when they are imported."""
        return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if self.config.deterministic else {}

    def check(self, world_size: int, has_gpus: bool) -> None:
        """Check the program before anything is started for it.

        Raises:
            ConfigError: an unknown recipe or option of it, a batch that cannot be split evenly, missing GPUs.
        """
        config = self.config
        get_recipe(self.recipe, config.recipe_options)
        self.check_world_size(world_size)
        if config.backend == "nccl" and not has_gpus:
            raise ConfigError("backend: expected auto or gloo for ranks without GPUs, got 'nccl'")
        if config.sync_batch_norm and world_size > 1 and not has_gpus:
            raise ConfigError("sync_batch_norm: expected false for ranks without GPUs, got true")

    def check_world_size(self, world_size: int) -> None:
        """Raise ConfigError if the global batch cannot be split evenly over `world_size` ranks."""
        self.config.batch_size_per_rank(world_size)

    def with_smaller_batches(self, failure: RankFailure, world_size: int) -> RecipeProgram | None:
        """Return the program with twice the micro-batches per step, if a GPU ran out of memory and the user allows it.

        Returns:
            None if `failure` is another one, or the global batch cannot be split further over `world_size` ranks.
        """
        config = self.config
        if not config.grow_accumulation_on_oom or failure.error_name != CUDA_OUT_OF_MEMORY:
            return None
        accumulation = 2 * config.gradient_accumulation
        if config.global_batch_size % (world_size * accumulation):
            return None
        return dataclasses.replace(self, config=dataclasses.replace(config, gradient_accumulation=accumulation))

    def source_files(self) -> dict[str, Path]:
        """Return the files that the ranks import, by their names relative to an entry of sys.path."""
        return source_files(packages_of(BUILTIN.get(self.recipe, self.recipe).replace(":", ".")))


@dataclass(frozen=True)
class FunctionProgram:
    """A call of a function of the user's, in the environment that torchrun would give it."""

    entry: ClassVar[str] = "flyte_ddp.launch.process.function:call_function"
    name: str  # of the function or the script, for people
    call: bytes = dataclasses.field(repr=False)  # a callable without arguments that returns bytes, by cloudpickle
    packages: tuple[str, ...] = ()  # top-level packages and modules that it imports from
    directory: str = ""  # of a script, which needs the files beside it
    stall_timeout: float = 1800.0  # seconds; it counts from the first `session.report` on
    store_timeout: float = 600.0  # seconds without the checkpoints' store until the attempt ends recoverably
    may_exit: typing.ClassVar[bool] = True
    repeats_bugs: typing.ClassVar[bool] = True  # as torchrun's max_restarts
    variables: dict[str, str] = dataclasses.field(default_factory=dict)  # of the environment of every rank
    is_command: bool = False  # it runs another program, so torch is not imported in the rank's own process
    signals: tuple[str, ...] = STOP_SIGNALS  # that end the run early, and are passed on to the function
    stop_grace: float = STOP_GRACE  # seconds from the request to stop until the ranks are killed
    output: Output = dataclasses.field(default_factory=Output)
    uses_nccl: typing.ClassVar[bool] = False  # as far as is known: only the function knows its backend
    virtual_local_rank: bool = False  # each rank sees its own GPU alone, and has LOCAL_RANK 0

    @property
    def slow_imports(self) -> tuple[str, ...]:
        """Nothing: each rank is a fresh process, because the function may set variables before it imports torch."""
        return ()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the user's, and those that torchrun sets as well."""
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        signals = {"TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(self.signals)}
        local_rank = {"LOCAL_RANK": "0"} if self.virtual_local_rank else {}
        return {name: os.environ.get(name, "1"), **signals, **local_rank, **self.variables}

    def check(self, world_size: int, has_gpus: bool) -> None:
        """Do nothing: any function may run on any number of ranks."""

    def check_world_size(self, world_size: int) -> None:
        """Do nothing, as `check`."""

    def with_smaller_batches(self, failure: RankFailure, world_size: int) -> None:
        """Return None: only the function knows its batches."""

    def source_files(self) -> dict[str, Path]:
        """Return the files that the ranks import or read, by their names relative to an entry of sys.path."""
        files = source_files(sorted({"flyte_ddp", *self.packages}))
        if self.directory:
            files |= {f"{SCRIPT_DIRECTORY}/{name}": file for name, file in files_below(Path(self.directory)).items()}
        return files


Program = RecipeProgram | FunctionProgram


def check_compiler(program: Program) -> None:
    """Check that a program that compiles its model can do so on this machine.

    Raises:
        ConfigError: `compile` is set, and there is no C++ compiler.
    """
    if not isinstance(program, RecipeProgram) or not program.config.compile:
        return
    named = {os.environ.get(variable, "") for variable in ("CXX", "CC")}
    if not any(shutil.which(name) for name in (*named, *COMPILERS) if name):
        raise ConfigError(
            "compile: expected false, or a C++ compiler (an image built with --build-arg COMPILER=1), got true and no "
            "compiler"
        )


def to_dict(program: Program) -> dict[str, Any]:
    """Return `program` as plain values and bytes, with its kind under "kind"."""
    return {"kind": type(program).__name__, **dataclasses.asdict(program)}


def from_dict(values: dict[str, Any]) -> Program:
    """Return the program that `to_dict` made `values` from."""
    values = dict(values)
    kind: Any = {kind.__name__: kind for kind in typing.get_args(Program)}[values.pop("kind")]
    if kind is RecipeProgram:
        values |= {"config": TrainingConfig(**values["config"])}
    else:
        values |= {"output": Output(**_with_tuples(values["output"]))}
    program: Program = kind(**_with_tuples(values))
    return program


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
