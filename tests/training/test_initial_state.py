"""A run may start from given weights: exactly those, of exactly its model, and only where it has
not begun yet.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import flyte_ddp
from flyte_ddp import events, flyte
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.storage import redact_url
from flyte_ddp.storage.state_dict_file import is_same_state, pin_state, split_pin, with_class_names
from flyte_ddp.studies.results import FINISHED
from flyte_ddp.studies.runner import TrialRunner
from flyte_ddp.studies.search import build_trials
from flyte_ddp.training.initial_state import freeze_layers, load_initial_state
from tasks.study import check_sweep
from tasks.train import prepare
from tests.support.emulators import s3, s3_bucket  # noqa: F401 - fixtures
from tests.support.errors import raises_one_line
from tests.support.foreign_states import FOREIGN, given_state, of_script
from tests.support.runs import new_run
from tests.support.trainers import new_trainer


def state_of(seed, recipe="Tiny"):
    torch.manual_seed(seed)
    return get_recipe(f"tests.support.recipes.{recipe}").model().state_dict()


def file_with(url, state):
    torch.save(state, contents := io.BytesIO())  # into a file of a name, torch writes that name too
    Path(url).write_bytes(contents.getvalue())
    return str(url)


def train_from(url, run, **options):
    """Train on two ranks from the state at `url`, and return the trained one."""
    return run.train(2, initial_model_state=str(url), epochs=1, **options).state()


def weights_of(trainer):
    return dict(trainer.state.model.state_dict())


def test_a_checkpoint_overrides_the_initial_state_and_is_of_its_contents_alone(tmp_path):
    run, url = new_run(tmp_path), file_with(tmp_path / "given.pt", state_of(7))
    given = pin_state(url)
    first = new_trainer(run, given)
    assert first.checkpoints.resume() == ("", [])
    torch.testing.assert_close(weights_of(first), dict(state_of(7)), rtol=0, atol=0)
    first.state.model.load_state_dict(state_of(8))
    first.state.progress.step = 5
    first.checkpoints.save(best=True)
    first.checkpoints.store.wait()

    moved = pin_state(file_with(tmp_path / "moved.pt", state_of(7)))
    Path(url).unlink()  # Nobody needs the file any more.
    for same in (given, moved, url):
        second = new_trainer(run, same)
        second.checkpoints.resume()
        assert second.state.progress.step == 5
        torch.testing.assert_close(weights_of(second), dict(state_of(8)), rtol=0, atol=0)
    for other in ("", pin_state(file_with(url, state_of(8)))):
        with pytest.raises(
            ConfigError, match="^initial_model_state: .* needs another place"
        ) as caught:
            new_trainer(run, other).checkpoints.resume()
        assert f"expected {given!r}, from which" in str(caught.value)
        assert f"started, got {other!r};" in str(caught.value)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (None, "which does not exist"),
        (b"no state", "cannot be read: UnpicklingError"),
        (b"", "cannot be read: EOFError"),
        (
            given_state(state_of(7, "Normed")),
            "does not fit the model: it lacks 2.weight, 2.bias; the model has no 1.weight, "
            "1.bias, 1.running_mean, 1.running_var, 1.num_batches_tracked and 2 more",
        ),
        (
            given_state({**state_of(7), "0.bias": torch.zeros(3)}),
            "other shapes at 0.bias (3,) instead of (16,)",
        ),
        (given_state([1]), "does not fit the model: it is a list"),
    ],
    ids=["missing", "garbage", "empty", "other-model", "other-shape", "list"],
)
def test_a_state_of_another_model_is_refused_with_its_wrong_keys(tmp_path, contents, expected):
    file = tmp_path / "given.pt"
    if contents is not None:
        file.write_bytes(contents)
    model = get_recipe("tests.support.recipes.Tiny").model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError) as caught:
        load_initial_state(model, str(file))
    message = str(caught.value)
    assert message.startswith("initial_model_state: expected a state dict with exactly the model's")
    assert f"got {str(file)!r}, which " in message
    assert expected in message
    assert "\n" not in message
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("form", FOREIGN)
def test_a_state_that_another_program_has_saved_is_read(form, tmp_path):
    (tmp_path / "given.pt").write_bytes(FOREIGN[form](with_class_names(state_of(7), "abc")))
    model = get_recipe("tests.support.recipes.Tiny").model()
    load_initial_state(model, str(tmp_path / "given.pt"), class_names=[*"abc"])
    torch.testing.assert_close(model.state_dict(), state_of(7), rtol=0, atol=0)
    with pytest.raises(ConfigError, match="its classes are a, b, c, those of the data are a, c, b"):
        load_initial_state(model, str(tmp_path / "given.pt"), class_names=[*"acb"])


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (
            given_state({"model": state_of(7), "ema": state_of(8)}),
            "initial_model_state: expected one state dict, got several, under model, ema: save the "
            "one that is meant alone, as torch.save(found['model'], file)",
        ),
        (
            given_state({**of_script(state_of(7)), "args": Namespace()}),
            "it has argparse.Namespace: expected ",
        ),
        (pickle.dumps({"args": Namespace()}), "it has argparse.Namespace: expected tensors and"),
        (pickle.dumps(os.system), "it has posix.system: expected tensors and plain values"),
    ],
    ids=["several", "object", "pickled-object", "pickled-call"],
)
def test_what_holds_no_single_state_is_refused_in_one_line(contents, expected, tmp_path):
    (tmp_path / "given.pt").write_bytes(contents)
    with raises_one_line(ConfigError) as caught:
        load_initial_state(get_recipe("tests.support.recipes.Tiny").model(), f"{tmp_path}/given.pt")
    assert expected in str(caught.value)


def test_a_state_counts_by_its_contents(tmp_path, monkeypatch):
    url = file_with(tmp_path / "given.pt", state_of(7))
    first = pin_state(url)
    digest = hashlib.sha256(Path(url).read_bytes()).hexdigest()
    assert first == f"{url} (sha256 {digest})"
    assert split_pin(first) == (url, digest)
    monkeypatch.chdir(tmp_path)
    assert pin_state("given.pt") == pin_state(first) == first
    signed = f"https://store/given.pt?X-Amz-Signature=ab/c (sha256 {digest})"
    assert is_same_state(first, signed)
    assert redact_url(signed) == signed.replace("ab/c", "...")
    replaced = pin_state(file_with(url, state_of(8)))
    assert not is_same_state(first, replaced)
    for without in ("", "torchvision:resnet18", "/none.pt"):
        assert pin_state(without) == without

    model = get_recipe("tests.support.recipes.Tiny").model()
    with pytest.raises(ConfigError, match=f"expected the contents with SHA-256 {digest}, which "):
        load_initial_state(model, first)


def test_a_replaced_state_is_another_trial_and_another_input_of_the_cache(tmp_path, monkeypatch):
    url, run = tmp_path / "given.pt", new_run(tmp_path)
    names, inputs = [], []
    monkeypatch.setattr(
        TrialRunner, "_train_waiting", lambda runner: setattr(runner.runs[0], "status", FINISHED)
    )
    for seed in (7, 8, 7):
        file_with(url, state_of(seed))
        given = {"initial_model_state": str(url)}
        trials = build_trials(run.recipe, given, [{"learning_rate": 0.1}])
        runner = TrialRunner(
            str(tmp_path),
            str(run.data()),
            None,
            ClusterConfig(),
            True,
        )
        names.append(runner.train(trials)[0].key)
        overrides = flyte.TrainingOverrides(**given)
        prepared = prepare(recipe=run.recipe, config=overrides).config.initial_model_state
        checked = check_sweep(
            recipe=run.recipe,
            config=overrides,
            grid={"learning_rate": [0.1]},
            num_models=0,
            seed=0,
            sampler="random",
            stop_early="none",
            cluster=None,
        )
        assert checked.config.initial_model_state == prepared
        inputs.append(prepared)
    assert names[0] == names[2] != names[1]
    assert inputs[0] == inputs[2] == pin_state(str(url)) != inputs[1]


@pytest.mark.parametrize("code", ["Tiny a1", "Tiny b2", "Dropping a1"])
def test_a_run_that_goes_on_with_other_code_says_so(code, tmp_path, caplog):
    run = new_run(tmp_path)
    first = new_trainer(run)
    first.checkpoints.notes.recipe_version = "a1"
    first.checkpoints.notes.origin["code"] = {"same.py": "1", "recipe.py": "2"}
    first.checkpoints.save(best=True)
    first.checkpoints.store.wait()
    second = new_trainer(run)
    name, second.checkpoints.notes.recipe_version = code.split()
    second.checkpoints.notes.origin["code"] = {"same.py": "1", "recipe.py": "3"}
    own = type(second.parallelism.recipe)
    second.parallelism.recipe = type(name, (own,), {"__module__": own.__module__})()
    assert second.checkpoints.resume()[0]
    told = f"goes on with other code: recipe {code}, before Tiny a1; changed: recipe.py"
    assert [told in line for line in caplog.messages] == [True] * (code != "Tiny a1")


HEADED = "tests.support.recipe_with_heads.Headed"


def headed_state(num_classes=3):
    torch.manual_seed(7)
    return get_recipe(HEADED, {"num_classes": num_classes}).model().state_dict()


def test_another_head_is_trained_on_a_frozen_body(tmp_path):
    given, run = headed_state(), new_run(tmp_path, HEADED)
    torch.save(given, tmp_path / "given.pt")
    options = {
        "recipe_options": {"num_classes": 5},
        "fresh_layers": ["head"],
        "frozen_layers": ["body"],
    }
    trained = train_from(tmp_path / "given.pt", run, **options)
    assert trained["head.weight"].shape == (5, 16)
    body = {name: value for name, value in given.items() if name.startswith("body.")}
    # The statistics of the BatchNorm are kept too.
    torch.testing.assert_close({name: trained[name] for name in body}, body, rtol=0, atol=0)

    url = pin_state(str(tmp_path / "given.pt"))
    note = {"num_classes": 5, "note": "which changes nothing that is trained"}
    trainer = new_trainer(run, url, **{**options, "recipe_options": note})
    trainer.checkpoints.notes.data_fingerprint = describe_data(run.data())["fingerprint"]
    assert trainer.checkpoints.resume()[0]
    # All that is trained is in the optimizer, and nothing else.
    assert [len(group["params"]) for group in trainer.state.optimizer.param_groups] == [2]
    for field, changes in {
        "recipe_options.num_classes: expected 5": {"recipe_options": {"num_classes": 4}},
        r"frozen_layers: expected \['body'\]": {"frozen_layers": []},
    }.items():
        with pytest.raises(ConfigError, match=f"^{field}, with which .* needs another place"):
            new_trainer(run, url, **{**options, **changes}).checkpoints.resume()


@pytest.mark.parametrize(
    ("fresh", "expected"),
    [
        (
            [],
            (
                "other shapes at head.weight (4, 16) instead of (3, 16), head.bias (4,) instead of "
                "(3,); layers that may"
            ),
        ),
        (["body.1"], "except in the fresh_layers body.1, got "),
        (
            ["heads"],
            "fresh_layers: expected beginnings of names of the model's layers, such as body, "
            "head, got 'heads' "
            "(did you mean head?)",
        ),
    ],
    ids=["none", "others", "unknown"],
)
def test_only_fresh_layers_may_have_other_shapes(tmp_path, fresh, expected):
    url = str(tmp_path / "given.pt")
    torch.save(headed_state(4), url)
    model = get_recipe(HEADED).model()
    with pytest.raises(ConfigError) as caught:
        load_initial_state(model, url, fresh_layers=fresh)
    assert expected in str(caught.value)
    load_initial_state(model, url, fresh_layers=["head."])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["bod"], "such as body, head, got 'bod' (did you mean body?)"),
        (["body.0.weights"], "got 'body.0.weights' (did you mean body.0.weight?)"),
        (
            ["body", "head"],
            "frozen_layers: expected a layer that is left to train, got all of them: body, head",
        ),
    ],
)
def test_frozen_layers_are_layers_of_the_model_and_not_all(layers, expected):
    with pytest.raises(ConfigError) as caught:
        freeze_layers(get_recipe(HEADED).model(), layers)
    assert expected in str(caught.value)


def test_a_missing_state_is_refused_before_the_start_unless_the_run_resumes(tmp_path):
    class NotStarted(events.Listener):
        def handle(self, event):
            raise AssertionError(event)

    url, options = (
        tmp_path / "given.pt",
        {"checkpoints": str(tmp_path / "run"), "nproc_per_node": 1},
    )
    recipe, config = "tests.support.recipes.Tiny", {"initial_model_state": str(url), "epochs": 1}
    with raises_one_line(ConfigError, match="^initial_model_state: expected the file of a state"):
        flyte_ddp.train(recipe, config, listeners=[NotStarted()], **options)
    file_with(url, state_of(7))
    assert flyte_ddp.train(recipe, config, **options).epochs[-1].position == 1
    url.unlink()
    resumed = flyte_ddp.train(recipe, {**config, "epochs": 2}, **options)
    assert [each.epoch for each in resumed.epochs] == [1, 2]


def test_an_option_that_the_recipe_did_not_have_counts_as_its_default(tmp_path):
    run = new_run(tmp_path, "Optional")
    trainer = new_trainer(run, epochs=1)
    del trainer.checkpoints.notes.config["recipe_options"]["biased"]
    trainer.fit()
    new_trainer(run, epochs=2).checkpoints.resume()
    with raises_one_line(ConfigError, match="recipe_options.biased: expected None, .* got False"):
        new_trainer(run, epochs=2, recipe_options={"biased": False}).checkpoints.resume()
