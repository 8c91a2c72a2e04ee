"""A recipe trains with two processes, by the workflow that is registered too."""

from flyte_ddp import flyte
from workflows.single_node import single_node_training_wf


def test_a_recipe_learns(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config = flyte.make_overrides({"epochs": 5})
    outputs = single_node_training_wf(recipe="recipes.wine.Wine", config=config, num_processes=2)
    assert max(outputs.epoch_accuracies) > 0.8
