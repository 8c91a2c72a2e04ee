"""Trainers in the test's own process: one rank, without launcher and supervisor."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from flyte_ddp.launch.process.programs import Job, Program
from flyte_ddp.launch.process.session import Session
from flyte_ddp.rank.data import open_samples, take_sample
from flyte_ddp.rank.parallel import build_model
from flyte_ddp.rank.trainer import Trainer
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.world import World
from tests.support.gang import NO_MEMORY

CPU = torch.device("cpu")


class Link:
    """A rank's link that keeps the events and asks to stop after `stop_after` beats; 0 never
    does.
    """

    def __init__(self, stop_after):
        self.stop_after = stop_after
        self.num_beats = 0
        self.events = []

    @property
    def stop_requested(self):
        return 0 < self.stop_after <= self.num_beats

    def beat(self, step):
        self.num_beats += 1

    def emit(self, event):
        self.events.append(event)

    def set_writing(self, is_writing):
        pass

    def set_stoppable(self):
        pass

    def set_pace(self, num_steps, seconds):
        pass


def new_session(checkpoints, stop_after=0):
    """The session of the only rank of a recipe's run."""
    program = Program("test", b"", can_resume=True)
    node = SimpleNamespace(world_size=1, num_nodes=1, num_restarts=0)
    job = Job(program, str(checkpoints), time.time())
    process = SimpleNamespace(job=job, node=node, rank=0, link=Link(stop_after), **NO_MEMORY)
    return Session(process, lambda: None)


def new_trainer(run, initial_state="", stop_after=0, source="", **config):
    """A trainer of the recipe of `run`, with its data and its checkpoints."""
    config = config_of(run.recipe, config)
    recipe, world = get_recipe(run.recipe, config.recipe_options), World(0, 0, 1, CPU)
    train_data, test_data = recipe.datasets(run.data(source))
    train, test = open_samples([take_sample(train_data, config), test_data], recipe, config, world)
    torch.manual_seed(config.seed)
    model = build_model(recipe, config, world)
    session = new_session(run.checkpoints, stop_after)
    session.open_checkpoints(config.checkpoints_to_keep)
    return Trainer(recipe, config, world, model, train, test, session, initial_state=initial_state)
