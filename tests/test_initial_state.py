"""A run may start from given weights: exactly those, of exactly its model, and only where it has not begun yet."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest
import torch

from flyte_ddp.errors import ConfigError
from flyte_ddp.launch import driver
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.programs import Job, recipe_program
from flyte_ddp.rank.initial_state import load_initial_state
from flyte_ddp.recipes import config_of, get_recipe
from tests.support.runs import new_run
from tests.support.trainers import new_trainer


def state_of(seed, recipe="Tiny"):
    torch.manual_seed(seed)
    return get_recipe(f"tests.support.recipes.{recipe}").model().state_dict()


def test_every_rank_starts_from_the_given_weights(tmp_path):
    url, given = str(tmp_path / "given.pt"), state_of(7)
    torch.save(given, url)
    run = new_run(tmp_path)
    config = config_of(run.recipe, {"epochs": 1, "learning_rate": 1e-12, "momentum": 0.0})  # the weights stay
    job = Job(recipe_program(run.recipe, config, url), str(run.checkpoints), time.time())
    run.result = driver.run(job, LocalPlace(2), lambda: str(run.data()), [run], run.relay)

    assert all(torch.allclose(value, given[name], atol=1e-6) for name, value in run.state().items())


def weights_equal(trainer, state):
    return all(torch.equal(value, state[name]) for name, value in trainer.model.state_dict().items())


def test_a_checkpoint_overrides_the_initial_state(tmp_path):
    run, url = new_run(tmp_path), str(tmp_path / "given.pt")
    torch.save(state_of(7), url)
    first = new_trainer(run, url)
    assert first.resume() == ("", [])
    assert weights_equal(first, state_of(7))
    first.model.load_state_dict(state_of(8))
    first.progress.step = 5
    first.save_checkpoint(best=True)
    first.store.wait()

    Path(url).unlink()  # which nobody needs any more
    second = new_trainer(run, url)
    second.resume()
    assert second.progress.step == 5
    assert weights_equal(second, state_of(8))
    for other in ("", str(tmp_path / "other.pt")):
        with pytest.raises(ConfigError, match="^initial_state: expected .*; another one needs another place") as caught:
            new_trainer(run, other).resume()
        assert f"started, got {other!r};" in str(caught.value)
        assert f"expected {url!r}, from which" in str(caught.value)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda url: None, "cannot be read: FileNotFoundError"),
        (lambda url: Path(url).write_bytes(b"no state"), "cannot be read: UnpicklingError"),
        (lambda url: Path(url).write_bytes(b""), "cannot be read: EOFError"),
        (
            lambda url: torch.save(state_of(7, "Normed"), url),
            "does not fit the model: it lacks 2.weight, 2.bias; the model has no 1.weight, 1.bias, 1.running_mean, "
            "1.running_var, 1.num_batches_tracked and 2 more",
        ),
        (
            lambda url: torch.save({**state_of(7), "0.bias": torch.zeros(3)}, url),
            "other shapes at 0.bias (3,) instead of (16,)",
        ),
        (lambda url: torch.save([1], url), "does not fit the model: it is a list"),
    ],
    ids=["missing", "garbage", "empty", "other-model", "other-shape", "list"],
)
def test_a_state_of_another_model_is_refused_with_its_wrong_keys(tmp_path, write, expected):
    url = str(tmp_path / "given.pt")
    write(url)
    model = get_recipe("tests.support.recipes.Tiny").model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_initial_state(model, url)
    message = str(caught.value)
    assert message.startswith(
        f"initial_state: expected a state dict with exactly the model's keys and shapes, got {url!r}, which "
    )
    assert expected in message
    assert "\n" not in message
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_recipe_has_fresh_weights_by_default():
    assert inspect.signature(recipe_program).parameters["initial_state"].default == ""
