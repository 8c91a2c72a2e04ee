"""One rank of a recipe's training, from its process group to its results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from flyte_ddp import events, session
from flyte_ddp.checkpoints import EXPORT, EXPORTED_STATE, MODEL_STATE
from flyte_ddp.checkpoints.files import portable
from flyte_ddp.checkpoints.peers import Peers
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.training import Needs
from flyte_ddp.config.waits import BEAT_INTERVAL
from flyte_ddp.errors import log_failures
from flyte_ddp.launch.protocol.messages import Device
from flyte_ddp.launch.protocol.ranks import choose_threads
from flyte_ddp.process.threads import start_thread
from flyte_ddp.rank.agreement import check_ranks, describe_samples
from flyte_ddp.rank.data import open_samples, take_sample, weigh_samples
from flyte_ddp.rank.fast_start import call_around_compilations
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.rank.session import Session
from flyte_ddp.rank.sharding import count_own_parameters, whole_state
from flyte_ddp.rank.snapshot import unchanged
from flyte_ddp.rank.step_timer import device_name
from flyte_ddp.recipes import Recipe, get_recipe, list_class_names
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.storage import SHORT_TIMEOUT, Storage
from flyte_ddp.storage.state_dict_file import save_safetensors, with_class_names
from flyte_ddp.training.checkpointer import RunNotes
from flyte_ddp.training.contract import check_contract, open_datasets, open_model
from flyte_ddp.training.inspection import describe_layers, make_predictions, sample_inputs
from flyte_ddp.training.parallel import Parallelism, choose_parallelism, count_parameters
from flyte_ddp.training.trainer import Trainer
from flyte_ddp.training.trial import check_resuming
from flyte_ddp.world import World, process_group

TrainerT = TypeVar("TrainerT", bound=Trainer)

# seconds after which an operation that reports no progress counts as a stall, as a function's
MAX_OPERATION_SECONDS = Needs.stall_timeout


def main(
    recipe: str | type[Recipe],
    config: TrainingConfig,
    work: Callable[[Parallelism, Session], Any] | None = None,
) -> Any:
    """Join the other ranks of this process's session, and train a recipe.

    Args:
        recipe, config: see `recipe_program`.
        work: called in place of the training; its value is returned.
    """
    current = session.current()
    program = current.process.job.program
    program.check_compiler()  # a Dask worker's image may lack the compiler
    batch = program.needs.batch
    if batch:  # a launcher may split the batch further than the config does
        config = dataclasses.replace(config, gradient_accumulation=batch.num_parts)
    current.reporter.beat(0)
    parallelism = prepare_torch(recipe, config, current.process)
    world = parallelism.world
    current.process.link.send(Device(device_name(world.device)))
    with contextlib.ExitStack() as stack:
        if world.world_size > 1:
            store = current.process.open_store()
            store.set_timeout(timedelta(seconds=config.collective_timeout))
            stack.enter_context(
                process_group(world, config.backend, store, config.collective_timeout)
            )
        return (work or train)(parallelism, current)


def prepare_torch(
    name: str | type[Recipe], config: TrainingConfig, process: RankProcess
) -> Parallelism:
    """Set torch's options for this process, and return how the ranks hold the model."""
    node = process.node
    torch.set_num_threads(choose_threads(node.num_threads))
    if config.deterministic:
        # Even the call with False imports torch's compiler, so it is left out.
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    world = World(process.rank, node.world_size, process.choose_device())
    parallelism = choose_parallelism(get_recipe(name, config.recipe_options), config, world)
    parallelism.prepare_process()
    return parallelism


def open_trainer(
    kind: type[TrainerT], parallelism: Parallelism, current: Session
) -> tuple[TrainerT, dict[str, Any]]:
    """Return this rank's trainer, with fresh weights, and the note about its data."""
    recipe, config, world = parallelism.recipe, parallelism.config, parallelism.world
    # Data and model: every rank has the same weights, and its own shard of each batch
    directory = current.process.link.wait_for_data()
    data = describe_data(directory)
    train_data, test_data = open_datasets(recipe, directory, config)
    train_data = take_sample(train_data, config)
    train, test = open_samples([train_data, test_data], recipe, config, world)
    weigh_samples(train, train_data, recipe, config)
    read = functools.partial(describe_samples, recipe, config, train, test)
    with unchanged(nn.Module(), recipe, train.dataset, test.dataset):
        facts = read()
        check_ranks(recipe, facts, read, world)
    current.reporter.beat(0)
    torch.manual_seed(config.seed)
    model = open_model(parallelism)

    peers = None
    if parallelism.is_collective:
        peers = Peers(world, current.process.open_store())
    current.saver.open(config.checkpoints_to_keep, peers)
    origin = {
        "recipe": current.process.job.program.name,
        "data": data["source"],
        "code": data["code"],
        "num_ranks": world.world_size,
        "num_threads": torch.get_num_threads(),
    }
    versions = data["fingerprint"], data["recipe_version"]
    notes = RunNotes(parallelism, *versions, facts, read, origin)
    trainer = kind(parallelism, model, train, test, current, notes)
    if config.compile:
        beat_while_compiling(trainer.beat)
    return trainer, data


def train(parallelism: Parallelism, current: Session) -> None:
    """Train the recipe, and report and save its results."""
    trainer, data = open_trainer(Trainer, parallelism, current)
    _start(trainer, data)
    trainer.fit()
    _save_results(trainer)


def _start(trainer: Trainer, data: Mapping[str, str]) -> None:
    """Go to the newest checkpoint, if there is one, and check what is new in this run."""
    parallelism, session = trainer.parallelism, trainer.session
    with keep_beating(trainer.beat):  # loading a large checkpoint may take minutes
        url, skipped = trainer.checkpoints.resume()
    state, num_ranks = trainer.state, parallelism.world.world_size
    progress = state.progress
    # Some things work on one rank alone, such as a metric that keeps its own counts.
    if progress.step == 0 or trainer.checkpoints.num_ranks_before != num_ranks:
        check_contract(state.model, trainer.train, parallelism, trainer.test)
        with keep_beating(trainer.beat):
            check_resuming(state.model, parallelism, state.schedule.num_steps)
    if parallelism.saves:
        session.reporter.emit_start(**describe_run(trainer, data, session.process))
        loaded = events.CheckpointLoaded(progress.step, url, progress.epochs, skipped)
        session.reporter.emit(loaded)


def _save_results(trainer: Trainer) -> None:
    """Save and report the results: predictions to look at, the trained weights, and the run's
    figures.
    """
    parallelism, session, checkpoints = trainer.parallelism, trainer.session, trainer.checkpoints
    model, store, world = trainer.state.model, checkpoints.store, parallelism.world
    kept, best = checkpoints.load_model_state(), trainer.state.best
    store.staging.clear()  # rank 0 may need this memory for the whole model
    state = model.state_dict()
    num_parameters = [int(each) for each in world.all_gather(count_own_parameters(model))]
    if parallelism.saves:
        # Predictions of a large model may take minutes.
        with log_failures("predictions", others=(SystemExit,)), keep_beating(trainer.beat):
            predictions = make_predictions(model, trainer.test, parallelism)
            session.reporter.emit(events.PredictionsMade(kept.epoch, predictions))
        trainer.beat()
        state = whole_state(state, keep=world.is_first)
    peak_memory = [int(each) for each in world.all_gather(_peak_memory(world))]
    if not world.is_first:
        return
    state = with_class_names(portable(state), list_class_names(parallelism.recipe))
    model_state = store.save_file(MODEL_STATE, state, trainer.beat)
    with keep_beating(trainer.beat):
        exported = export_model(parallelism.recipe, state, store.storage.url)
    peak_memory[0] = _peak_memory(world)
    figures = best.figures().values
    interval, launched_at = checkpoints.memory_interval, session.process.job.launched_at
    metric, first_step_at = parallelism.config.monitor.metric, trainer.measures.first_step_at
    session.results = {
        "model_state_url": model_state,
        **exported,
        "best_epoch": best.epoch,
        "best": {name: figures[name] for name in (metric, "test_loss")},
        "model_state_epoch": kept.epoch,
        "peak_memory_bytes": peak_memory[0],
        "rank_peak_memory_bytes": peak_memory,
        "rank_num_parameters": num_parameters,
        "memory_interval": interval.steps * interval.is_on,
        "first_step_seconds": max(0.0, first_step_at - launched_at),
    }


def describe_run(trainer: Trainer, data: Mapping[str, str], process: RankProcess) -> dict[str, Any]:
    """Return the fields of `events.RunStarted` that are known before the first step."""
    parallelism, notes, state = trainer.parallelism, trainer.checkpoints.notes, trainer.state
    recipe, world, model = parallelism.recipe, parallelism.world, state.model
    device, backend = "cpu", "none"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    if world.world_size > 1:
        backend = dist.get_backend()
    layers: list[events.LayerDescribed] = []
    with log_failures("layers"), unchanged(model, recipe, trainer.test.dataset):
        layers = describe_layers(model, sample_inputs(trainer.test, parallelism))
    return {
        "config": notes.config,
        "hidden": notes.hidden,
        "device": device,
        "backend": backend,
        "num_threads": choose_threads(process.node.num_threads),
        "num_parameters": count_parameters(model),
        "num_train_samples": len(trainer.train),
        "num_test_samples": len(trainer.test),
        "num_steps": state.schedule.num_steps,
        "layers": layers,
        "data": data["description"],
        "data_fingerprint": notes.data_fingerprint,
        "class_names": list_class_names(recipe),
        "data_license": data["license"],
        "recipe_version": notes.recipe_version,
    }


def export_model(recipe: Recipe, state: Mapping[str, Any], checkpoints: str) -> dict[str, Any]:
    """Write the state as safetensors and the files of `Recipe.export`; return the fields of
    `RunFinished` about them.

    The files are written from the state's own memory, because there may be none for a copy. The
    model is trained and saved by now. So errors are listed in the results and do not end the run:
    a state that safetensors cannot hold, a mistake in the recipe's `export`, or a full store.

    Args:
        checkpoints: URL of the checkpoints' directory. The files are stored below it.
    """
    storage = Storage(f"{checkpoints}/{EXPORT}", timeout=SHORT_TIMEOUT)
    written: list[str] = []
    problems: list[str] = []

    def write(make: Callable[[Path], object], what: str) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="export-") as place:
                make(Path(place))
                for file in sorted(file for file in Path(place).rglob("*") if file.is_file()):
                    name = file.relative_to(place).as_posix()
                    storage.write(name, file)
                    written.append(name)
        except Exception as error:  # any error is possible: `export` may be the user's
            problems.append(f"{what}: {' '.join(str(error).split()) or type(error).__name__}")

    write(lambda place: save_safetensors(state, place / EXPORTED_STATE), EXPORTED_STATE)
    write(lambda place: recipe.export(state, place), f"{type(recipe).__name__}.export")
    return {"export_url": storage.url, "exported": written, "not_exported": "; ".join(problems)}


@contextlib.contextmanager
def keep_beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` every second, from a thread, while a long block runs.

    The beats end after `MAX_OPERATION_SECONDS`, so that a block that hangs is found.
    """
    is_over = threading.Event()

    def beat_until_over() -> None:
        deadline = time.monotonic() + MAX_OPERATION_SECONDS
        while time.monotonic() < deadline and not is_over.wait(BEAT_INTERVAL):
            beat()

    beat()
    thread = start_thread("beats", beat_until_over)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def beat_while_compiling(beat: Callable[[], None]) -> None:
    """Call `beat` every second while torch compiles something in this process, such as the first
    step of a model.
    """
    running = contextlib.ExitStack()
    call_around_compilations(lambda: running.enter_context(keep_beating(beat)), running.close)


def _peak_memory(world: World) -> int:
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return 1024 * peak  # Linux counts in KiB
