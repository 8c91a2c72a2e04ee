"""Batches that do not begin with their samples, or lack some: the number of samples is what the
batch says.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from examples.recipes.graphs import Graphs
from flyte_ddp import session
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.prediction.job import PredictionJob
from flyte_ddp.prediction.model import Predictor
from flyte_ddp.rank.data import open_samples
from flyte_ddp.rank.plan import epoch_order
from flyte_ddp.recipes import Recipe, config_of, get_recipe
from flyte_ddp.training.contract import check_contract
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE
from tests.support.errors import raises_one_line
from tests.support.gang import run_gang, train_recipe
from tests.support.packed import Says, Sparse
from tests.support.runs import new_run

GRAPHS = "examples.recipes.graphs.Graphs"
PACKED = "tests.support.packed"
KINDS = (f"{PACKED}.Sparse", f"{PACKED}.TimeFirst", f"{PACKED}.Packed")


def train_all(world, store, data, directory):
    """Work of a gang: the weights and the epochs of each kind."""
    found = {}
    for kind in KINDS:
        place = f"{directory}/{world.world_size}/{kind}"
        events = train_recipe(world, store, kind, config_of(kind, {}), data, place)
        epochs = [each for each in events if "test_loss" in each]
        urls = [each["model_state_url"] for each in events if "model_state_url" in each]
        found[kind] = (urls, epochs)
    return found


def plain_loop(recipe):
    """Return the weights and the epochs' losses of a loop without any code of ours but the order of
    the samples.
    """
    config = config_of(f"{PACKED}.Sparse", {})
    train, _ = recipe.datasets(None)
    torch.manual_seed(config.seed)
    model = recipe.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    sizes, losses = [], []
    for epoch in range(1, config.epochs + 1):
        loss_sum = num_kept = 0
        for batch in epoch_order(len(train), config.seed, epoch).split(config.global_batch_size):
            kept = [train[index] for index in batch if not recipe.is_bad(train[index][0])]
            sizes.append(len(kept))
            if kept:
                inputs, targets = recipe.collate(kept, True)
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                loss_sum += float(loss) * len(kept)
                num_kept += len(kept)
        losses.append(loss_sum / num_kept)
    assert {*sizes} == {0, 1, 2, 3}, "also a batch without any sample"
    return model.state_dict(), losses


@pytest.mark.long
def test_batches_of_any_form_train_the_same_at_any_number_of_ranks(tmp_path):
    data = str(new_run(tmp_path, KINDS[0]).data())
    one, two = (run_gang(number, train_all, data, str(tmp_path))[0] for number in (1, 2))
    for kind in KINDS:
        (urls, epochs), (other_urls, other_epochs) = one[kind], two[kind]
        states = [torch.load(each[0], weights_only=True) for each in (urls, other_urls)]
        torch.testing.assert_close(*states)
        for figures, others in zip(epochs, other_epochs, strict=True):
            for name in ("train_loss", "test_loss", "metrics"):
                assert figures[name] == pytest.approx(others[name]), (kind, name)
    state = torch.load(one[KINDS[0]][0][0], weights_only=True)
    recipe = Sparse()
    expected, losses = plain_loop(recipe)
    torch.testing.assert_close({name: state[name] for name in state}, expected)
    assert [each["train_loss"] for each in one[KINDS[0]][1]] == pytest.approx(losses)
    num_bad = sum(recipe.is_bad(each) for part in recipe.datasets(None) for each, _ in part)
    assert [each["num_unreadable"] for each in one[KINDS[0]][1]] == [num_bad] * 2


@pytest.mark.parametrize("count", [0, -1, 9, None, 2.0])
def test_a_number_of_samples_that_cannot_be_is_one_line(count):
    recipe, config = Says(), config_of(GRAPHS, {"global_batch_size": 8})
    recipe.count = count
    samples, _ = open_samples(recipe.datasets(None), recipe, config, ALONE)
    expected = rf"Says.num_samples: expected 1 to 8 samples of a batch .*, got {count};"
    with raises_one_line(ConfigError, match=expected):
        check_contract(recipe.model(), samples, Parallelism(recipe, config, ALONE))


class Partial(Graphs):
    """Returns no batch of some samples, and has no number of samples."""

    num_samples = Recipe.num_samples
    kept = ()

    def collate(self, samples, training):
        return super().collate(samples, False) if samples[0][1] in self.kept else None


@pytest.mark.parametrize(
    ("kept", "error", "expected"),
    [
        ((1,), ConfigError, "Partial.collate: expected a batch, or a recipe with num_samples, got"),
        ((), DataError, "data: .* got none of 100 from sample 0 on .*or collate returned None"),
    ],
)
def test_no_batch_without_a_number_of_samples_is_one_line(kept, error, expected):
    recipe, config = Partial(), config_of(GRAPHS, {"global_batch_size": 8})
    recipe.kept = kept
    (train,) = open_samples([recipe.datasets(None)[0]], recipe, config, ALONE)
    with raises_one_line(error, match=expected):
        next(iter(train.batches([torch.arange(4)], epoch=1)))


def keep_even(samples):
    return (
        torch.tensor([each for each in samples if each % 2 == 0])
        if any(each % 2 == 0 for each in samples)
        else None
    )


def test_weights_of_a_functions_batches_count_what_is_kept(monkeypatch):
    sums = {}
    for world_size in (1, 2, 3):
        totals = None
        for rank in range(world_size):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(world_size))
            options = {"collate_fn": keep_even, "num_samples": len, "num_workers": rank % 2}
            mine = [
                float(batch.double().mean()) * weight / world_size
                for batch, weight in session.batches(list(range(40)), 4, 1, **options)
            ]
            totals = (
                mine if totals is None else [sum(each) for each in zip(totals, mine, strict=True)]
            )
        sums[world_size] = totals
    expected = []
    for batch in epoch_order(40, 0, 1).split(4):
        even = [number for number in batch.tolist() if number % 2 == 0]
        expected.append(sum(even) / 4)
    assert sums[1] == pytest.approx(expected)
    assert sums[2] == pytest.approx(expected)
    assert sums[3] == pytest.approx(expected)


@pytest.mark.parametrize("number", [0, 5])
def test_a_functions_number_of_samples_that_cannot_be_is_one_line(number, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    batches = session.batches(list(range(8)), 4, 1, num_samples=lambda batch: number)
    expected = f"session.batches: num_samples: expected 1 to 4 samples .*, got {number};"
    with raises_one_line(ConfigError, match=expected):
        next(iter(batches))


def test_an_iterable_has_no_sample_to_stand_in():
    with raises_one_line(ConfigError, match="session.batches: collate_fn: .*, got None"):
        list(session.batches(iter([1, 3, 5]), 2, None, collate_fn=keep_even))


def test_each_sample_is_predicted(tmp_path):
    recipe, config = get_recipe(f"{PACKED}.Sparse"), config_of(f"{PACKED}.Sparse", {})
    torch.save(recipe.model().state_dict(), tmp_path / "state.pt")
    given = (str(tmp_path / "state.pt"), str(tmp_path / "out"))
    job = PredictionJob(f"{PACKED}.Sparse", config, *given, 4, 4, {})
    expected = r"collate: expected all of \d samples, because each is predicted"
    with raises_one_line(ConfigError, match=expected):
        Predictor(job, str(tmp_path)).describe()
    job = PredictionJob(GRAPHS, config, *given, 4, 4, {})
    assert Predictor(job, str(tmp_path)).describe()["num_samples"] == 60
