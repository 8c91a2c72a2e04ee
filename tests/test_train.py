"""`flyte_ddp.train`: a recipe from Python, without a Flyte."""

from __future__ import annotations

import pytest
import torch

import flyte_ddp
from flyte_ddp.errors import ConfigError


def states_equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def test_it_ends_in_the_weights_of_the_workflow_and_resumes_from_its_place(tmp_path, finished_run):
    whole = finished_run("Tiny", 2)
    recipe, place = "tests.support.recipes.Tiny", str(tmp_path / "run")
    part = flyte_ddp.train(recipe, {"epochs": 1}, nproc_per_node=2)
    assert (len(part.epochs), part.model_state_url) == (1, "")
    trained = flyte_ddp.train(recipe, nproc_per_node=2, checkpoints=place)
    assert states_equal(trained.model_state, whole.state())
    assert [each.metrics for each in trained.epochs] == [
        each.metrics for each in whole.result.epochs
    ]
    assert trained.best.epoch == whole.result.finished.best_epoch
    assert trained.model_state_url == f"{place}/model_state.pt"
    again = flyte_ddp.train(recipe, nproc_per_node=2, checkpoints=place)  # nothing is left to do
    assert states_equal(again.model_state, whole.state())
    fine_tuned = flyte_ddp.train(
        recipe, {"epochs": 1}, nproc_per_node=1, initial_model_state=trained.model_state_url
    )
    assert fine_tuned.epochs[0].train_loss < trained.epochs[0].train_loss


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("dgits",), "recipe: "),
        (("digits", {"epoch": 1}), "did you mean epochs"),
        (("digits", {"global_batch_size": 33}), "global_batch_size: "),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_starts(arguments, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        flyte_ddp.train(*arguments, nproc_per_node=2)
    assert "\n" not in str(caught.value)


def test_several_machines_need_a_place_for_checkpoints():
    cluster = {"kind": "existing", "scheduler_address": "tcp://127.0.0.1:1"}
    with pytest.raises(
        ConfigError, match="checkpoints: expected a URL that all machines reach, got none"
    ):
        flyte_ddp.train("digits", nnodes=2, nproc_per_node=1, cluster=cluster)
