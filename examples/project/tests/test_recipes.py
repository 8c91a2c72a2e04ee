"""Each recipe trains with two processes, by the workflow that is registered too."""

from __future__ import annotations

import pytest

from flyte_ddp import flyte
from workflows.single_node import single_node_training_wf


@pytest.mark.parametrize(("recipe", "epochs", "accuracy"), [("recipes.wine.Wine", 5, 0.8)])
def test_a_recipe_learns(recipe, epochs, accuracy, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    outputs = single_node_training_wf(
        recipe=recipe, config=flyte.make_overrides({"epochs": epochs}), num_processes=2
    )
    assert len(outputs.epoch_accuracies) == epochs
    assert max(outputs.epoch_accuracies) > accuracy
