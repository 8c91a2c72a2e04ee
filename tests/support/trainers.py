"""Trainers in the test's own process: one rank, without launcher and supervisor."""

from __future__ import annotations

import torch

from flyte_ddp.launch.protocol.programs import Kind
from flyte_ddp.rank.data import open_samples, take_sample, weigh_samples
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.training.contract import open_model
from flyte_ddp.training.parallel import choose_parallelism
from flyte_ddp.training.trainer import Trainer
from flyte_ddp.world import World
from tests.support.gang import Link, session_of

CPU = torch.device("cpu")


class StoppingLink(Link):
    """Asks to stop after `stop_after` beats; 0 never does."""

    stop_after = 0

    @property
    def stop_requested(self):
        return 0 < self.stop_after <= len(self.beats)


def new_trainer(run, initial_state="", stop_after=0, source="", **config):
    """A trainer of the recipe of `run`, with its data and its checkpoints."""
    config = config_of(run.recipe, {"initial_model_state": initial_state, **config})
    recipe, world = get_recipe(run.recipe, config.recipe_options), World(0, 1, CPU)
    train_data, test_data = recipe.datasets(run.data(source))
    train_data = take_sample(train_data, config)
    train, test = open_samples([train_data, test_data], recipe, config, world)
    weigh_samples(train, train_data, recipe, config)
    torch.manual_seed(config.seed)
    parallelism = choose_parallelism(recipe, config, world)
    model = open_model(parallelism)
    link = StoppingLink()
    link.stop_after = stop_after
    session, _ = session_of(checkpoints=run.checkpoints, link=link, kind=Kind.RECIPE)
    session.saver.open(config.checkpoints_to_keep)
    trainer = Trainer(parallelism, model, train, test, session)
    trainer.checkpoints.notes.origin = {"code": {}, "num_ranks": 1}
    return trainer
