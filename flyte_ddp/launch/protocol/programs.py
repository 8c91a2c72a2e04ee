"""A run and its program: a call that every rank makes, and what its launcher must know of it.
Imports no torch.

A recipe's training, a user's function and a script are all such calls. They differ in the fields of
`Program`.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyte_ddp.cluster.config import termination_grace
from flyte_ddp.code.source_code import compute_digest_of_files, files_below, source_files
from flyte_ddp.config.training import Needs
from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.launch.protocol.caller_logging import CallerLogging

# torch.compile takes g++ or CXX for CPUs, gcc, clang or CC for GPUs
COMPILERS = ("g++", "gcc", "clang")
CUDA_OUT_OF_MEMORY = "OutOfMemoryError"  # class name of torch.cuda.OutOfMemoryError
# seconds of a pod's grace after the last checkpoint: for closing a client and deleting a cluster
END_RESERVE = 2 * ANSWER_TIMEOUT
# directory of a script among the source files on a node
SCRIPT_DIRECTORY = "flyte_ddp_script"
# variable in ranks: the node's directory for a script's outputs, which is removed after the run
OUTPUTS_VARIABLE = "FLYTE_DDP_OUTPUTS"
MAX_RUN_ID = 256  # characters


def stop_grace() -> float:
    """Return the seconds for a final checkpoint after SIGTERM: what the pod has until it is killed,
    less a reserve.
    """
    return max(END_RESERVE, termination_grace() - END_RESERVE)


class Kind(str, enum.Enum):
    """The code that a program runs in its ranks: this library's, or the user's."""

    # The training loop of this library: it emits its start with what it knows of the run, saves its
    # state whenever it has to end, never ends its process, and would repeat an exception.
    RECIPE = "recipe"
    # A function or script of the user's. A process that it ends with code 0 has succeeded, and an
    # exception is answered by a restart, as by torchrun.
    FUNCTION = "function"
    # The same in a process below the rank's, which imports no torch itself.
    COMMAND = "command"


@dataclass(frozen=True)
class Program:
    """A program that every rank runs, with the environment variables that torchrun sets."""

    name: str  # name of the recipe, the function or the script, for people
    # a callable without arguments that returns bytes, by cloudpickle
    call: bytes = field(repr=False)
    # top-level packages and modules that it imports from, besides this one
    packages: tuple[str, ...] = ()
    directory: str = ""  # directory of a script, which needs the files beside it
    arguments: str = ""  # arguments of a script, as for a shell
    # plain arguments of a function, by the names of its parameters; see `name_arguments`
    named_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # When a rank has ended with code 0 and all other ranks wait in collectives for so many seconds,
    # the run is ended.
    left_timeout: float = 30.0
    kind: Kind = Kind.FUNCTION
    # seconds from the request to stop until the ranks are killed
    stop_grace: float = field(default_factory=stop_grace)
    shows_ranks: bool = True  # a line that a rank prints begins with its number
    # Slow modules of other packages that every rank imports. The ranks are forked from a process
    # that has imported them. Without any, each rank is a fresh process. Its program may then set
    # variables before it imports torch.
    slow_imports: tuple[str, ...] = ()
    needs: Needs = field(default_factory=Needs)
    # The error if the initial state does not exist; "" if it exists, or none is given. A run that
    # resumes does not need the initial state.
    missing_state: str = ""
    logging: CallerLogging | None = None  # logging of the ranks; None: the program's own

    def check(self, world_size: int, has_gpus: bool) -> None:
        """Raise ConfigError if the program's batch cannot be split evenly over the ranks, or if it
        lacks GPUs.
        """
        self.check_world_size(world_size)
        if self.needs.gpus and world_size > 1 and not has_gpus:
            raise ConfigError(self.needs.gpus)

    def check_world_size(self, world_size: int) -> None:
        """Raise ConfigError if the batch cannot be split evenly over `world_size` ranks."""
        if self.needs.batch:
            self.needs.batch.size_per_rank(world_size)

    def check_compiler(self) -> None:
        """Raise ConfigError if this machine lacks the C++ compiler that the program needs."""
        named = {os.environ.get(variable, "") for variable in ("CXX", "CC")}
        if self.needs.compiler and not any(
            shutil.which(name) for name in (*named, *COMPILERS) if name
        ):
            raise ConfigError(
                "compile: expected false, or a C++ compiler (an image built with --build-arg "
                "COMPILER=1), got true and no compiler"
            )

    def with_smaller_batches(self, failure: RankFailure, world_size: int) -> Program | None:
        """Return the program with twice the micro-batches per step, if a GPU ran out of memory and
        the user allows it.

        Returns:
            None if `failure` has another cause, or the batch cannot be split further over
            `world_size` ranks.
        """
        batch = self.needs.batch
        if batch is None or not batch.may_split or failure.error_name != CUDA_OUT_OF_MEMORY:
            return None
        num_parts = 2 * batch.num_parts
        if batch.size % (world_size * num_parts):
            return None
        return self.with_needs(batch=dataclasses.replace(batch, num_parts=num_parts))

    def with_needs(self, **changes: Any) -> Program:
        """Return the program with other needs, by the fields of `Needs`."""
        return dataclasses.replace(self, needs=dataclasses.replace(self.needs, **changes))

    def source_files(self) -> dict[str, Path]:
        """Return the files that the ranks import or read, by their names relative to an entry of
        sys.path.
        """
        files = source_files(sorted({"flyte_ddp", *self.packages}))
        if self.directory:
            files |= {
                f"{SCRIPT_DIRECTORY}/{name}": file
                for name, file in files_below(Path(self.directory)).items()
            }
        return files

    def compute_code_version(self) -> str:
        """Return a SHA-256 of the code: the library, the packages, and the Python files beside a
        script and one level below it, where no outputs and data lie.
        """
        files = source_files(sorted({"flyte_ddp", *self.packages}))
        for pattern in ("*.py", "*/*.py") if self.directory else ():
            for file in sorted(Path(self.directory).glob(pattern)):
                files[f"{SCRIPT_DIRECTORY}/{file.relative_to(self.directory)}"] = file
        return compute_digest_of_files(files)


@dataclass(frozen=True)
class Job:
    """One run: the same for all of its ranks."""

    program: Program  # the program that each rank runs
    # fsspec URL of a directory, for `MODEL_STATE` too; "" for a function that keeps none
    checkpoints: str = ""
    launched_at: float = 0.0  # seconds since the epoch; 0 until `run_job` starts the job
    # the same for all attempts of a run, such as Flyte's execution and node; "" for a local run
    run: str = ""
    # token of the driver that owns the checkpoints; see flyte_ddp/checkpoints/ownership.py
    owner: str = ""
    is_kept: bool = True  # the checkpoints outlive the run
    # Place that the user named, for errors, if the checkpoints are below it; otherwise "".
    output: str = ""
    # SHA-256 of the library with which the driver has started; "" until `run_job` starts the job
    library: str = ""
    # steps of checkpoints after the last attempt, as far as the driver knows
    stored: tuple[int, ...] = ()
    # the nodes have a state from which to go on that is newer than the store's
    is_in_memory: bool = False
    # An attempt of this run ran out of memory. So states are kept in memory only on request.
    ran_out_of_memory: bool = False
    # failure of an attempt in an earlier process, which could not report it
    earlier_failure: RankFailure | None = None


def check_run_id(run_id: str) -> None:
    """Raise ConfigError if `run_id` is not one line of text. "" stands for a run without an id."""
    if not isinstance(run_id, str) or not run_id.isprintable() or len(run_id) > MAX_RUN_ID:
        raise ConfigError(
            f"run_id: expected one line of at most {MAX_RUN_ID} characters, got {run_id!r:.80}"
        )
