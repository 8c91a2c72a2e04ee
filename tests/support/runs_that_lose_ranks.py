"""Runs of a recipe that loses its ranks where a test orders it: see recipe_that_loses_ranks.py."""

from __future__ import annotations

import time

from flyte_ddp import events
from flyte_ddp.config import resolve
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes import get_recipe
from tests.support.dask_runs import events_of
from tests.support.runs import new_run

RECIPE = "tests.support.recipe_that_loses_ranks.Bereaved"  # 9 steps an epoch
CONFIG = {"momentum": 0.9, "log_interval": 1, "model_state": "last"}


def train(directory, place, *orders, checkpoints="", listeners=(), **config):
    """Train, and return what was seen of the run and the steps and places that it was resumed
    from.
    """
    (directory / "orders").mkdir(parents=True)
    for number, order in enumerate(orders):
        (directory / "orders" / f"{number}-{order}").touch()
    run = new_run(directory, RECIPE)
    options = {"orders": str(directory / "orders") if orders else ""}
    values = {**CONFIG, "checkpoint_interval": 1000, "recipe_options": options, **config}
    program = recipe_program(RECIPE, resolve(get_recipe(RECIPE, {}).defaults, values))
    job = Job(program, checkpoints or str(directory / "checkpoints"), time.time())
    run.result = driver.run(job, place, lambda: str(run.data()), [run, *listeners], run.relay)
    loaded = [
        (event.step, event.url) for event in events_of(run, events.CheckpointLoaded) if event.step
    ]
    return run, loaded
