"""A recipe trains with two processes, by the task that is deployed too."""

import flyte
from workflows.flyte2 import train


def test_a_recipe_learns(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    flyte.init()
    run = flyte.run(train, recipe="recipes.wine.Wine", config={"epochs": 5}, num_processes=2)
    assert max(run.outputs()[0]) > 0.8
