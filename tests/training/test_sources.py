"""The loss of each source of a mixture, and its schedule, in a recipe at any number of ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.training.contract import open_datasets
from flyte_ddp.training.sources import SourceLosses
from flyte_ddp.world import ALONE
from tests.support.errors import raises_one_line
from tests.support.gang import run_gang, train_recipe
from tests.support.mixed import Mixed, find_losses
from tests.support.runs import new_run

MIXED = "tests.support.mixed.Mixed"
WEIGHTS = [[0, {"a": 1, "b": 0}], [1, {"a": 1, "b": 1}]]  # an epoch has 12, 12 and 2 samples


def config_with(weights, **fields):
    return config_of(MIXED, {"recipe_options": {"weights": json.dumps(weights)}, **fields})


def losses_of(events):
    """The reported losses of each source, by step."""
    found = {}
    for event in events:
        if "values" in event:
            values = event["values"].items()
            found[event["step"]] = {name: each for name, each in values if "/" in name}
    return [found[step] for step in sorted(found)]


@pytest.mark.long
def test_losses_of_sources_are_exact_and_a_resumed_run_may_change_weights_ahead(tmp_path):
    run = new_run(tmp_path, MIXED)
    data, place = str(run.data()), str(tmp_path / "checkpoints")
    config = config_with(WEIGHTS)
    mixture = get_recipe(MIXED, config.recipe_options).datasets(run.data())[0]
    expected = find_losses(mixture, config, 1)
    assert [sorted(step) for step in expected[:2]] == [["loss/a"], ["loss/a", "loss/b"]]
    found = losses_of(run_gang(2, train_recipe, MIXED, config, data, place)[0])
    assert found == [pytest.approx(step) for step in expected]

    past = config_with([[0, {"a": 1, "b": 0}], [1, {"a": 1, "b": 2}]], epochs=2)
    message = "training weights from step 1: expected a 0.5, b 0.5, with which .*, got a 0.33"
    with pytest.raises(AssertionError, match=message):
        run_gang(1, train_recipe, MIXED, past, data, place)

    ahead = config_with([*WEIGHTS, [4, {"a": 0, "b": 1}]], epochs=2)
    mixture = get_recipe(MIXED, ahead.recipe_options).datasets(run.data())[0]
    expected = find_losses(mixture, ahead, 2)[3:]
    found = losses_of(run_gang(3, train_recipe, MIXED, ahead, data, place)[0])
    assert found == [pytest.approx(step) for step in expected]
    assert [sorted(step) for step in expected[:2]] == [["loss/a", "loss/b"], ["loss/b"]]


def test_a_schedule_of_held_out_data_is_one_line(tmp_path):
    class HeldOut(Mixed):
        def datasets(self, directory):
            data, _ = super().datasets(directory)
            return data, data

    directory, config = new_run(tmp_path, MIXED).data(), config_with(WEIGHTS)
    with raises_one_line(ConfigError, match="got a held-out mixture by a schedule, which needs"):
        open_datasets(HeldOut(json.dumps(WEIGHTS)), directory, config)


def test_batches_whose_samples_are_not_known_have_no_loss_of_a_source():
    samples = SimpleNamespace(last_read=[0, 1, 2], source_names=["a", "b"])
    samples.find_sources = lambda: torch.tensor([0, 0, 1])
    losses = SourceLosses(samples, SimpleNamespace(recipe=Mixed(), world=ALONE))
    targets = torch.tensor([[5, 1], [7, 2], [8, 1]])
    sums = losses.sum(torch.tensor([5.0, 7.0, 8.0]), None, targets)
    assert losses.average(sums) == {"loss/a": 4, "loss/b": 8}
    assert losses.average(0.0) == {}
    for values, kept in ((torch.tensor(5.0), targets), (torch.ones(2), targets[:2])):
        assert losses.average(sums + losses.sum(values, None, kept)) == {}
