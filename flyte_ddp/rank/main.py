"""One rank of a recipe's training, from its process group to its results."""

from __future__ import annotations

import dataclasses
import functools
import platform
import resource
import sys
import time

import torch
import torch.distributed as dist

from flyte_ddp import events
from flyte_ddp.checkpoints import MODEL_STATE
from flyte_ddp.checkpoints.files import portable
from flyte_ddp.checkpoints.peers import Peers
from flyte_ddp.launch.process.entry import RankProcess, SupervisorLink
from flyte_ddp.launch.process.job import Job
from flyte_ddp.launch.process.malloc import return_freed_memory
from flyte_ddp.launch.process.programs import RecipeProgram, check_compiler
from flyte_ddp.launch.process.ranks import NodeRanks
from flyte_ddp.rank.data import open_samples, take_sample
from flyte_ddp.rank.fast_start import avoid_importing_dynamo
from flyte_ddp.rank.inspection import layers_of, predictions_of, sample_inputs, shown
from flyte_ddp.rank.parallel import build_model
from flyte_ddp.rank.sharding import count_own_parameters, whole_state
from flyte_ddp.rank.supervision import beat_while_compiling, keep_beating
from flyte_ddp.rank.trainer import Trainer
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.session import Session, open_session
from flyte_ddp.world import World, process_group


def main(program: RecipeProgram, process: RankProcess) -> None:
    """Join the other ranks and train the recipe of `program`."""
    check_compiler(program)  # on a Dask worker, whose image the driver has not seen
    config, node, link = program.config, process.node, process.link
    if config.parallel == "fsdp":
        return_freed_memory()
    torch.set_num_threads(node.num_threads)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)  # also the call with False imports torch's compiler
    device = torch.device("cpu")
    if node.use_gpus:
        # A rank on a MIG slice sees that slice alone, as device 0.
        device = torch.device("cuda", process.local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = not config.deterministic
    if not config.compile and config.parallel == "ddp":
        avoid_importing_dynamo()
    world = World(process.rank, process.local_rank, node.world_size, device)
    link.beat(0)
    open_store = functools.cache(lambda: process.open_store(config.collective_timeout))
    session = open_session(process, open_store)
    session.can_resume = True  # the loop saves its state whenever it is asked to stop
    if world.world_size == 1:
        train(program, process.job, world, node, link, session)
        return
    peers = Peers(world, open_store()) if config.parallel == "fsdp" else None
    with process_group(world, config.backend, open_store(), config.collective_timeout):
        train(program, process.job, world, node, link, session, peers)


def train(
    program: RecipeProgram,
    job: Job,
    world: World,
    node: NodeRanks,
    link: SupervisorLink,
    session: Session,
    peers: Peers | None = None,
) -> None:
    """Train the recipe, and report and save its results.

    Args:
        peers: the ranks, where each of them writes a part of every checkpoint.
    """
    # Data and model: every rank has the same weights, and its own shard of each batch
    config = program.config
    recipe = get_recipe(program.recipe, config.recipe_options)
    directory = link.wait_for_data()
    data = describe_data(directory)
    train_data, test_data = recipe.datasets(directory)
    train, test = open_samples([take_sample(train_data, config), test_data], recipe, config, world)
    link.beat(0)
    torch.manual_seed(config.seed)
    model = build_model(recipe, config, world)

    # Where to start: at the newest checkpoint, if there is one
    store = session.open_checkpoints(config.checkpoints_to_keep, peers)
    fingerprint = data["fingerprint"]
    trainer = Trainer(recipe, config, world, model, train, test, store, session, fingerprint, program.initial_state)
    if config.compile:
        beat_while_compiling(lambda: link.beat(trainer.progress.step))
    with keep_beating(lambda: link.beat(trainer.progress.step)):  # a large checkpoint takes its time
        url, skipped = trainer.resume()
    if world.is_first or trainer.is_sharded:
        run_started = _run_started(program, node, trainer, data["description"])
        if world.is_first:
            link.emit(run_started)
            link.emit(events.CheckpointLoaded(trainer.progress.step, url, trainer.progress.epochs, skipped))

    # Go!
    with store.finish_on_error(trainer.beat):
        progress = trainer.fit()

    # Results: predictions to look at, the trained weights, and the run's figures
    store.memory.clear()  # which rank 0 may need for the whole model
    state = model.state_dict()
    num_parameters = [int(each) for each in world.all_gather(count_own_parameters(model))]
    if world.is_first or trainer.is_sharded:
        with shown("predictions"):
            predictions = events.PredictionsMade(progress.epoch - 1, predictions_of(model, recipe, test, config))
            if world.is_first:
                link.emit(predictions)
        link.beat(progress.step)
        state = whole_state(state, keep=world.is_first)
    peak_memory = [int(each) for each in world.all_gather(_peak_memory(world))]
    if world.is_first:
        model_state = store.save_file(MODEL_STATE, portable(state), trainer.beat)
        finished = _run_finished(job, trainer, model_state, [_peak_memory(world), *peak_memory[1:]], num_parameters)
        link.emit(finished)


def _run_started(program: RecipeProgram, node: NodeRanks, trainer: Trainer, data: str) -> events.RunStarted:
    recipe, world, model = trainer.recipe, trainer.world, trainer.model
    on_gpu = world.device.type == "cuda"
    layers: list[events.LayerDescribed] = []
    with shown("layers"):
        layers = layers_of(model, sample_inputs(recipe, trainer.test, program.config))
    return events.RunStarted(
        name=program.recipe,
        world_size=world.world_size,
        num_nodes=node.num_nodes,
        num_restarts=node.num_restarts,
        data=data,
        config=dataclasses.asdict(program.config),
        device=torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        backend=dist.get_backend() if world.world_size > 1 else "none",
        num_threads=node.num_threads,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_train_samples=len(trainer.train),
        num_test_samples=len(trainer.test),
        num_steps=trainer.num_steps,
        layers=layers,
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
    )


def _run_finished(
    job: Job, trainer: Trainer, model_state: str, peak_memory: list[int], num_parameters: list[int]
) -> events.RunFinished:
    best = trainer.progress.best
    assert best is not None  # a config has at least one epoch
    return events.RunFinished(
        step=trainer.progress.step,
        model_state_url=model_state,
        seconds=time.time() - job.launched_at,
        best_epoch=best.epoch,
        best_accuracy=best.accuracy,
        peak_memory_bytes=peak_memory[0],
        rank_peak_memory_bytes=peak_memory,
        rank_num_parameters=num_parameters,
        first_step_seconds=max(0.0, trainer.first_step_at - job.launched_at),
    )


def _peak_memory(world: World) -> int:
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
