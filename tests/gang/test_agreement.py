"""Facts that all ranks must have in common are compared: a split, class numbers, names."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.rank.agreement import (
    check_checkpoint,
    check_ranks,
    describe_samples,
    find_difference,
    summarize,
)
from flyte_ddp.rank.data import open_samples, take_sample
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.training.contract import open_datasets
from flyte_ddp.world import ALONE, World
from tests.support.runs import new_run

MODULE = "tests.support.splits"


class Rank(World):
    """Rank 1 of 2, to which rank 0 has sent `first`."""

    def broadcast_object(self, value, source=0):
        return self.first


def rank_1(first):
    world = Rank(1, 2, torch.device("cpu"))
    object.__setattr__(world, "first", first)
    return world


def open_recipe(name, seed=0, **config):
    """The recipe of this name, its configuration and a function that reads its facts, in a process
    of its own seed.
    """
    recipe, config = get_recipe(f"{MODULE}.{name}"), config_of(f"{MODULE}.{name}", config)
    for draw in (random.seed, numpy.random.seed, torch.manual_seed):
        draw(seed)
    train, test = open_datasets(recipe, Path(), config)
    samples = open_samples([take_sample(train, config), test], recipe, config, ALONE)
    return recipe, config, functools.partial(describe_samples, recipe, config, *samples)


@pytest.mark.parametrize("name", ["Split", "SplitByRandom", "SplitByNumPy"])
def test_a_split_without_a_seed_is_the_same_in_each_process_and_leaves_its_draws_alone(name):
    def split(process, seed=0):
        for draw in (random.seed, numpy.random.seed, torch.manual_seed):
            draw(process)
        config = config_of(f"{MODULE}.{name}", {"seed": seed})
        parts = open_datasets(get_recipe(f"{MODULE}.{name}"), Path(), config)
        drawn = random.random(), numpy.random.rand(), torch.rand(()).item()
        return [part.tensors[0].flatten().tolist() for part in parts], drawn

    (one, drawn), (other, _), (another, again) = split(1), split(2), split(1, seed=1)
    assert one == other != another
    assert sorted(sum(one, [])) == list(range(64))
    assert drawn == again, "the process's own draws have changed"


MESSAGES = {
    "Split": None,
    "Noisy": None,
    "SplitByNobody": (
        r"splits.py:\d+: SplitByNobody.datasets: training sample \d+: expected the "
        r"same on all ranks, as"
    ),
    "NumberedBySet": (
        r"training sample \d+: expected the same on all .*, as on rank 0, got "
        r"another one on rank 1"
    ),
    "NamedBySet": (
        r"class_names: expected \['class .* on all ranks, as on rank 0, got \['class .* "
        r"on rank 1"
    ),
}


@pytest.fixture(scope="module")
def facts_elsewhere():
    """The facts of each recipe in a process with other hashes."""
    code = (
        "from tests.gang.test_agreement import *; print(json.dumps({name: open_recipe(name)[2]() "
        "for name in MESSAGES}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "11"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MESSAGES)
def test_facts_are_compared_with_those_of_another_process(name, facts_elsewhere):
    recipe, _, read = open_recipe(name, seed=5)
    first, message = rank_1(facts_elsewhere[name]), MESSAGES[name]
    if message is None:
        check_ranks(recipe, read(), read, first)
        return
    with pytest.raises(ConfigError, match=rf"{message}[^\n]*$"):
        check_ranks(recipe, read(), read, first)
    message = message.partition(" on all ")[0] + ".*, with which PLACE was written, got "
    checkpoint = {"data_facts": facts_elsewhere[name], "progress": {"step": 0}}
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(recipe, read(), read, checkpoint, "PLACE")


def test_other_options_explain_other_samples_and_no_other_weights():
    recipe, _, _ = open_recipe("Split")
    theirs = {"number of training samples": 20, "training weights from step 0": "a 0.5, b 0.5"}
    checkpoint = {"data_facts": theirs, "progress": {"step": 4}}
    own = {**theirs, "number of training samples": 30, "training weights from step 4": "a 1, b 0"}
    check_checkpoint(recipe, own, dict, checkpoint, "PLACE", weights_alone=True)
    with pytest.raises(ConfigError, match="number of training samples: expected 20, .* got 30"):
        check_checkpoint(recipe, own, dict, checkpoint, "PLACE")
    own["training weights from step 0"] = "a 0.4, b 0.6"
    with pytest.raises(ConfigError, match="weights from step 0: expected a 0.5.* got a 0.4"):
        check_checkpoint(recipe, own, dict, checkpoint, "PLACE", weights_alone=True)


def test_the_number_of_samples_is_compared():
    recipe, _, read = open_recipe("Split")
    first = rank_1({**read(), "number of held-out samples": 15})
    expected = "number of held-out samples: expected 15 on all .* 0, got 16 on rank 1"
    with pytest.raises(ConfigError, match=expected):
        check_ranks(recipe, read(), read, first)


DATA = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
SAMPLES = [
    DATA,
    DATA.double(),
    DATA.to(torch.bfloat16),
    DATA.to(torch.uint8),
    DATA.long(),
    DATA > 3,
    DATA.to(torch.complex64),
    DATA.transpose(0, 2),
    (DATA + 1).numpy(),
    {"a": DATA, "b": [1, 2.5, "text", None]},
    (DATA, "text"),
    b"bytes",
    DATA.to_sparse(),
    torch.tensor(float("nan")),
    torch.zeros(0),
    numpy.float32(3),
    True,
    object(),
]


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_a_sample_of_any_kind_has_plain_facts_that_are_its_own(number):
    sample = SAMPLES[number]
    facts = summarize(sample)
    assert json.loads(json.dumps(facts)) == facts

    def read():
        return {"sample": summarize(sample)}

    assert find_difference({"sample": facts}, read(), read) is None
    for other, each in enumerate(SAMPLES):
        differs = find_difference({"sample": summarize(each)}, read(), read)
        assert (differs is not None) == (other != number), each


def test_numbers_may_differ_in_their_last_digits_where_processors_differ_and_no_label_may():
    def differs(one, other):
        return (
            find_difference({"sample": summarize(one)}, {"sample": summarize(other)}, dict)
            is not None
        )

    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert not differs(image, image * (1 + 1e-6))
    assert differs(image, image.flip(-1))
    assert differs(image, image.transpose(1, 2).contiguous())
    assert differs(100_000, 100_001)
    assert differs(torch.tensor([100_000, 7]), torch.tensor([7, 100_000]))


def test_ranks_that_split_for_themselves_end_in_one_line_before_the_first_step(tmp_path):
    run = new_run(tmp_path, f"{MODULE}.SplitByRank")
    message = (
        r"number of training samples: expected 48 on all ranks, as on rank 0, got 47 on "
        r"rank 1"
    )
    with pytest.raises((ConfigError, RankFailure), match=message):
        run.train()
    assert run.last_step == 0


def test_data_that_have_changed_are_refused_at_a_resume(tmp_path):
    run = new_run(tmp_path, f"{MODULE}.SplitByNobody")
    run.train(epochs=1, num_processes=1)
    message = r"training sample \d+: expected the same, with which .* was written"
    with pytest.raises((ConfigError, RankFailure), match=message):
        run.train(epochs=2, num_processes=1)
