"""A profile of the next steps of this rank, on request: a trace, and what the GPU's memory holds.

The trace begins and ends between two optimizer steps, in the thread that takes them. So a script
needs no session for it. Whatever fails, the program goes on. Nothing of the profiler stays in the
process. Imports no torch before a request comes.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyte_ddp.errors import in_one_line
from flyte_ddp.launch.protocol.messages import Profile, Profiled
from flyte_ddp.launch.protocol.requests import MAX_PROFILE_SECONDS
from flyte_ddp.process.interpreter import has_imported
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.storage import SHORT_TIMEOUT, Storage

MAX_BYTES = 256 << 20  # largest file before it is compressed, to a tenth or so
PACKING = 5  # level of gzip: a higher level takes longer and saves little
STEP = "Optimizer.step#"  # torch records each step under this name


def answer_profile(request: Profile, send: Callable[[Any], None]) -> None:
    """Profile the next steps of this process, and send the answer to the agent."""
    files: list[str] = []
    problem = ""
    try:
        with temporary_directory("profile-") as directory:
            for file in profile_steps(request, directory):
                files.append(store_packed(file, request.place))
    except Exception as error:
        problem = in_one_line(error)
    send(Profiled(request.id, files, problem))


def profile_steps(request: Profile, directory: str) -> list[Path]:
    """Return the files of a profile, which are in `directory`."""
    if not has_imported("torch"):
        raise RuntimeError("the process of this rank has not imported torch, so far")
    from flyte_ddp.rank.fast_start import dump_gpu_memory

    trace = Path(directory, f"trace-rank-{request.rank}.json")
    Recording(request.num_steps).record().export_chrome_trace(str(trace))
    return [trace, *dump_gpu_memory(Path(directory, f"memory-rank-{request.rank}.pickle"))]


@dataclass(eq=False)
class Recording:
    """A recording of steps by torch's profiler."""

    num_steps: int
    _profiler: Any = None  # None before the first step ends
    _num_recorded: int = 0
    _is_late: bool = False  # nobody waits for it: the next step ends it
    _error: Exception | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    def record(self) -> Any:
        """Return torch's profiler after the last step.

        A step may run meanwhile in another thread. So nothing is added to torch's hooks of
        optimizers, which the step may read: the class that marks each step in a trace is replaced,
        and put back.

        Raises:
            TimeoutError: the steps took longer than `MAX_PROFILE_SECONDS`.
        """
        import torch.autograd.profiler as module

        original: Any = module.record_function
        end_step = self.end_step

        class Recorded(original):  # type: ignore[misc]
            def __exit__(self, *error: Any) -> None:
                super().__exit__(*error)
                if self.name.startswith(STEP) and end_step():
                    module.record_function = original  # type: ignore[misc]

        module.record_function = Recorded  # type: ignore[misc]
        if not self._is_over.wait(MAX_PROFILE_SECONDS):
            self._is_late = True
            raise TimeoutError(
                f"expected {self.num_steps} optimizer steps within {MAX_PROFILE_SECONDS:g} s, got "
                f"{self._num_recorded}"
            )
        if self._error:
            raise self._error
        return self._profiler

    def end_step(self) -> bool:
        """Note the end of a step, in the thread that took it. Return whether the recording is over.
        Does not raise.
        """
        try:
            is_over = self._is_over.is_set() or self._advance()
        except Exception as error:
            self._error, is_over = error, True
        if is_over:
            self._is_over.set()
        return is_over

    def _advance(self) -> bool:
        if self._profiler is None and not self._is_late:
            self._profiler = start_profiler()
            return False
        self._num_recorded += 1
        if self._num_recorded < self.num_steps and not self._is_late:
            self._profiler.step()
            return False
        if self._profiler:
            self._profiler.stop()
        return True


def start_profiler() -> Any:
    """Return a profiler of torch that has begun to record in this thread."""
    from torch.profiler import ProfilerAction, profile

    # With a schedule, the trace shows where each step begins.
    started = profile(schedule=lambda step: ProfilerAction.RECORD)
    started.start()
    return started


def store_packed(file: Path, place: str) -> str:
    """Compress a file, and put it into a directory of a store. Return its name there.

    Raises:
        ValueError: the file is larger than `MAX_BYTES`.
        StorageDenied, StorageUnavailable: it cannot be written.
    """
    size, name = file.stat().st_size, f"{file.name}.gz"
    if size > MAX_BYTES:
        raise ValueError(
            f"expected so few steps that {file.name} has at most {MAX_BYTES >> 20} MiB, got "
            f"{size >> 20} MiB"
        )
    packed = gzip.compress(file.read_bytes(), PACKING)  # the training runs meanwhile
    Storage(place, timeout=SHORT_TIMEOUT).write(name, packed)
    return name
