"""One rank, from the first line of its process to the last: what `spawn` starts, and what runs the loop in it.

The top of this module imports nothing heavy: a rank must be killable, and its parent's death noticed, before the
seconds that torch takes to import.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import io
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
import types
import typing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import StopRequested
from flyte_ddp.prepare import describe_data
from flyte_ddp.storage import Storage

if TYPE_CHECKING:
    from flyte_ddp.rank.trainer import Trainer
    from flyte_ddp.rank.world import World

MODEL_STATE = "model_state.pt"  # beside the checkpoints

# What gloo, NCCL and the store say on a rank whose peer has died: a consequence, never the cause.
PEER_FAILURE = re.compile(
    r"gloo|NCCL|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|recvValue|sendBytes|failed to recv"
)


@dataclass(frozen=True)
class Job:
    """What all ranks of a run are started from: names and values, which any process on any machine understands."""

    recipe: str
    config: TrainingConfig
    checkpoints: str  # fsspec URL of a directory; `MODEL_STATE` is left there too
    launched_at: float  # seconds since the epoch
    initial_state: str = ""  # fsspec URL of the state dict that a new run starts from; "" for fresh weights
    timed_batch_sizes: tuple[int, ...] = ()  # samples per rank and step at which `costs` are timed after the training


@dataclass(frozen=True)
class Place:
    """Where the ranks of one node stand in the gang, and where the gang meets."""

    first_rank: int
    num_ranks: int  # on this node
    world_size: int
    host: str  # of the rendezvous, as this node reaches it
    port: int
    interface: str  # network interface for the collectives
    use_gpus: bool
    num_threads: int  # CPU threads of each rank


class SupervisorLink:
    """The rank's end of the two pipes to its supervisor, and its slot in the memory they share.

    A thread waits for the supervisor's words. When the pipe ends instead, the supervisor is dead, and this process and
    all it started end themselves: nobody is left who could.
    """

    def __init__(self, up: Connection, down: Connection, beats: Any, local_rank: int) -> None:
        self._up = up
        self._down = down
        self._beats = beats
        self._local_rank = local_rank
        self._stop = threading.Event()
        self._has_data = threading.Event()
        self._data = ""
        threading.Thread(target=self._listen, name="supervisor-link", daemon=True).start()

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def beat(self, step: int) -> None:
        self._beats[2 * self._local_rank] = time.monotonic()  # one clock for all processes of a machine
        self._beats[2 * self._local_rank + 1] = step

    def emit(self, event: events.Event) -> None:
        self.send("event", events.to_dict(event))

    def send(self, kind: str, *values: Any) -> None:
        self._up.send((kind, *values))

    def wait_for_data(self) -> Path:
        """The directory of the prepared data, once the supervisor has it."""
        self._has_data.wait()
        return Path(self._data)

    def _listen(self) -> None:
        while True:
            try:
                kind, *values = self._down.recv()
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)
            if kind == "data":
                self._data = values[0]
                self._has_data.set()
            elif kind == "stop":
                self._stop.set()


def main(
    job: Job,
    place: Place,
    local_rank: int,
    listener: socket | None,
    up: Connection,
    down: Connection,
    beats: Any,
    logs: str,
) -> None:
    """Be rank `place.first_rank + local_rank`, and say over `up` how it ended: "done", "stopped" or "error"."""
    os.setpgid(0, 0)  # so that the supervisor can end this process with all that it starts, such as loader workers
    rank = place.first_rank + local_rank
    output = os.open(rank_log(logs, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # A print appears while the rank runs, and before it is killed.
    typing.cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    # Written in C, so that it also works while the rank hangs in a collective.
    stacks = open(rank_stacks(logs, rank), "w")  # noqa: SIM115 - open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable()
    link = SupervisorLink(up, down, beats, local_rank)
    try:
        _keep_freed_memory()
        # Read by torch and its libraries when they are imported.
        os.environ["OMP_NUM_THREADS"] = str(place.num_threads)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = place.interface
        if job.config.deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        _run(job, place, local_rank, listener, link)
    except BaseException as error:
        if isinstance(error, StopRequested):
            link.send("stopped")
        else:
            text = traceback.format_exc()
            print(text, file=sys.stderr)  # noqa: T201 - the rank's own log
            is_consequence = isinstance(error, (RuntimeError, OSError)) and bool(PEER_FAILURE.search(str(error)))
            link.send("error", type(error).__name__, str(error), text, is_consequence)
    else:
        gc.collect()  # ends loader processes, which would else leave their semaphores to the resource tracker
        link.send("done")
    # Not a normal exit: after an error it would wait for threads that wait for dead peers, and after a good run gloo's
    # threads now and then abort the interpreter on its way out. The supervisor ends what is left of the group.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def rank_log(directory: str, rank: int) -> str:
    """The file with all that the rank printed."""
    return os.path.join(directory, f"rank-{rank}.log")


def rank_stacks(directory: str, rank: int) -> str:
    """The file where the rank writes its Python stacks on SIGUSR1."""
    return os.path.join(directory, f"rank-{rank}.stacks")


def _run(job: Job, place: Place, local_rank: int, listener: socket | None, link: SupervisorLink) -> None:
    import torch

    from flyte_ddp.rank.world import World, process_group

    rank = place.first_rank + local_rank
    config = job.config
    torch.set_num_threads(place.num_threads)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)  # also the call with False imports torch's compiler
    device = torch.device("cuda", local_rank) if place.use_gpus else torch.device("cpu")
    if place.use_gpus:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = not config.deterministic
    if not config.compile:
        _spare_dynamo()
    world = World(rank, local_rank, place.world_size, device)
    link.beat(0)
    if world.world_size == 1:
        _train(job, world, place, link)
        return
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        place.host,
        place.port,
        world.world_size,
        is_master=listener is not None,
        timeout=timedelta(seconds=config.collective_timeout),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    with process_group(world, config.backend, store, config.collective_timeout):
        _train(job, world, place, link)


def _train(job: Job, world: World, place: Place, link: SupervisorLink) -> None:
    import torch

    from flyte_ddp.rank.checkpoint import CheckpointStore, save_state
    from flyte_ddp.rank.data import open_samples
    from flyte_ddp.rank.trainer import Trainer
    from flyte_ddp.recipes import get_recipe

    config = job.config
    recipe = get_recipe(job.recipe, config.recipe_options)
    directory = link.wait_for_data()
    data = describe_data(directory)
    train, test = (open_samples(dataset, recipe, config, world) for dataset in recipe.datasets(directory))
    link.beat(0)
    torch.manual_seed(config.seed)
    model = recipe.model().to(world.device)
    if config.sync_batch_norm and world.world_size > 1:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    checkpoints = CheckpointStore(job.checkpoints, config.checkpoints_to_keep)
    trainer = Trainer(
        recipe, config, world, model, train, test, checkpoints, link, data["fingerprint"], job.initial_state
    )
    url, skipped = trainer.resume()
    link.beat(trainer.progress.step)
    if world.is_first:
        link.emit(_run_started(job, place, world, trainer, data["description"], url, skipped))

    progress = trainer.fit()

    checkpoints.close()
    finished: events.Event | None = None
    if world.is_first:
        link.emit(trainer.predict())
        link.beat(progress.step)
        model_state = Storage(job.checkpoints).join(MODEL_STATE)
        save_state(model_state, trainer.model_state())
        best = progress.best
        assert best is not None  # a config has at least one epoch
        finished = events.RunFinished(
            step=progress.step,
            model_state_url=model_state,
            seconds=time.time() - job.launched_at,
            best_epoch=best.epoch,
            best_accuracy=best.accuracy,
            peak_memory_bytes=_peak_memory(world),
            first_step_seconds=max(0.0, trainer.first_step_at - job.launched_at),
        )
    if job.timed_batch_sizes:
        from flyte_ddp.rank.step_timing import time_costs

        costs = time_costs(trainer, job.timed_batch_sizes)
        if world.is_first:
            link.emit(costs)
    if finished:
        link.emit(finished)


def _run_started(
    job: Job, place: Place, world: World, trainer: Trainer, data: str, url: str, skipped: list[str]
) -> events.RunStarted:
    import dataclasses
    import platform

    import torch

    from flyte_ddp.rank.inspection import layers_of

    on_gpu = world.device.type == "cuda"
    sample, _ = next(iter(trainer.test.batches([torch.zeros(1, dtype=torch.int64, device=world.device)], epoch=0)))
    backend = job.config.backend if job.config.backend != "auto" else "nccl" if on_gpu else "gloo"
    return events.RunStarted(
        recipe=job.recipe,
        data=data,
        config=dataclasses.asdict(job.config),
        world_size=world.world_size,
        device=torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        backend=backend if world.world_size > 1 else "none",
        num_threads=place.num_threads,
        num_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        num_train_samples=len(trainer.train),
        num_test_samples=len(trainer.test),
        num_steps=trainer.num_steps,
        layers=layers_of(trainer.model, trainer.prepared(sample)),
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
        resumed_step=trainer.progress.step,
        resumed_from=url,
        previous_epochs=trainer.progress.epochs,
        skipped_checkpoints=skipped,
    )


def _peak_memory(world: World) -> int:
    if world.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _spare_dynamo() -> None:
    """Keep torch from importing its compiler (4 s of CPU and 150 MB) in a process that compiles nothing.

    Three places in torch 2.15 import torch._dynamo only to ask or tell it something: functions that it is to stay out
    of (they remember the answer in `__dynamo_disable`, so it can be put there first: themselves, unchanged), the
    wrapper of every optimizer's `step`, which breaks the graph, and the constructor of DistributedDataParallel,
    which asks for a setting. A torch that does this in another way just imports its compiler as before.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import SGD, Adam, Optimizer

    for owner in (Optimizer, DistributedDataParallel):
        for function in vars(owner).values():
            while (function := getattr(function, "__wrapped__", None)) is not None:
                if hasattr(function, "__dict__"):
                    function.__dict__.setdefault("__dynamo_disable", function)
    for optimizer in (SGD, Adam):  # AdamW is an Adam
        step: Any = optimizer.step
        if getattr(step, "__code__", None) and step.__code__.co_name == "_use_grad":
            optimizer.step = torch.no_grad()(step.__wrapped__)  # type: ignore[method-assign]
    if "torch._dynamo" not in sys.modules:
        utils = _Understudy("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # torch's default
        vars(torch)["_dynamo"] = _Understudy("torch._dynamo", utils=utils)  # an import of the real one replaces it


class _Understudy(types.ModuleType):
    """Has the given attributes of a module that is not imported. To be asked for another one imports the module."""

    def __init__(self, name: str, **attributes: object) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def _keep_freed_memory() -> None:
    """Keep glibc from giving a step's activations back to the kernel, only to fault them in again in the next step.

    It maps large blocks one by one and trims the heap's end, until it has seen larger ones freed: up to 5,000 page
    faults and a quarter of the time of a step of `mnist`. The process keeps its peak instead, which it will need again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        for option in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h, in bytes
            mallopt(option, 1 << 30)
