"""A run may start from given weights: exactly those, of exactly its model, and only where it has
not begun yet.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import time
from pathlib import Path

import pytest
import torch
from flytekit.core.condition import BranchNode
from flytekit.core.workflow import WorkflowBase

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.task import check_initial_state
from flyte_ddp.launch import driver
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.programs import Job, recipe_program
from flyte_ddp.rank.initial_state import freeze_layers, load_initial_state
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.storage import redact_url, write_file
from flyte_ddp.storage.weights import is_same_state, pin_state, split_pin
from flyte_ddp.studies.results import FINISHED
from flyte_ddp.studies.runner import TrialRunner
from flyte_ddp.studies.search import build_trials
from tasks.prepare import prepare
from tests.support.emulators import s3, s3_bucket  # noqa: F401 - fixtures
from tests.support.runs import new_run
from tests.support.trainers import new_trainer


def state_of(seed, recipe="Tiny"):
    torch.manual_seed(seed)
    return get_recipe(f"tests.support.recipes.{recipe}").model().state_dict()


def test_every_rank_starts_from_the_given_weights(tmp_path):
    url, given = str(tmp_path / "given.pt"), state_of(7)
    torch.save(given, url)
    run = new_run(tmp_path)
    # the weights stay
    config = config_of(run.recipe, {"epochs": 1, "learning_rate": 1e-12, "momentum": 0.0})
    job = Job(recipe_program(run.recipe, config, url), str(run.checkpoints), time.time())
    run.result = driver.run(job, LocalPlace(2), lambda: str(run.data()), [run], run.relay)

    assert all(torch.allclose(value, given[name], atol=1e-6) for name, value in run.state().items())


def weights_equal(trainer, state):
    return all(
        torch.equal(value, state[name]) for name, value in trainer.model.state_dict().items()
    )


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
        with pytest.raises(
            ConfigError, match="^initial_model_state: expected .*; another one needs another place"
        ) as caught:
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
            "does not fit the model: it lacks 2.weight, 2.bias; the model has no 1.weight, "
            "1.bias, 1.running_mean, "
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
        "initial_model_state: expected a state dict with exactly the model's keys and shapes, "
        f"got {url!r}, which "
    )
    assert expected in message
    assert "\n" not in message
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def file_with(url, state):
    torch.save(state, contents := io.BytesIO())  # into a file of a name, torch writes that name too
    Path(url).write_bytes(contents.getvalue())
    return str(url)


def test_a_state_counts_by_its_contents(tmp_path, monkeypatch):
    url = file_with(tmp_path / "given.pt", state_of(7))
    first = pin_state(url)
    digest = hashlib.sha256(Path(url).read_bytes()).hexdigest()
    assert first == f"{url} (sha256 {digest})"
    assert split_pin(first) == (url, digest)
    monkeypatch.chdir(tmp_path)
    assert pin_state("given.pt") == pin_state(first) == check_initial_state("given.pt") == first
    moved = pin_state(file_with(tmp_path / "moved.pt", state_of(7)))
    signed = [
        f"https://store/given.pt?X-Amz-Signature={secret} (sha256 {digest})"
        for secret in ("ab/c", "de/f")
    ]
    assert is_same_state(first, moved)
    assert is_same_state(first, signed[0])
    assert {redact_url(each) for each in signed} == {
        f"https://store/given.pt?X-Amz-Signature=... (sha256 {digest})"
    }
    replaced = pin_state(file_with(url, state_of(8)))
    assert not is_same_state(first, replaced)
    assert is_same_state(url, replaced)  # of a checkpoint that has no checksum
    for without in ("", "torchvision:resnet18", "/none.pt"):
        assert pin_state(without) == without

    model = get_recipe("tests.support.recipes.Tiny").model()
    with pytest.raises(
        ConfigError,
        match=f"^initial_model_state: expected the contents with SHA-256 {digest}, which ",
    ):
        load_initial_state(model, first)
    load_initial_state(model, replaced)
    assert all(torch.equal(value, state_of(8)[name]) for name, value in model.state_dict().items())


def test_a_state_in_a_bucket_counts_by_its_contents_too(bucket):
    contents = io.BytesIO()
    torch.save(state_of(7), contents)
    write_file(f"{bucket}/given.pt", contents.getvalue())
    assert pin_state(f"{bucket}/given.pt").endswith(
        f" (sha256 {hashlib.sha256(contents.getvalue()).hexdigest()})"
    )
    assert pin_state(f"{bucket}/none.pt") == f"{bucket}/none.pt"


def test_a_run_resumes_with_the_same_contents_alone(tmp_path):
    run, url = new_run(tmp_path), file_with(tmp_path / "given.pt", state_of(7))
    first = new_trainer(run, pin_state(url))
    first.resume()
    first.progress.step = 5
    first.save_checkpoint(best=True)
    first.store.wait()
    for same in (pin_state(file_with(tmp_path / "moved.pt", state_of(7))), pin_state(url), url):
        assert new_trainer(run, same).resume()[0]
    replaced = pin_state(file_with(url, state_of(8)))
    with pytest.raises(
        ConfigError, match="^initial_model_state: expected .*; another one needs another place"
    ) as caught:
        new_trainer(run, replaced).resume()
    assert split_pin(replaced)[1] in str(caught.value)


def test_a_replaced_state_is_another_trial_and_another_input_of_the_cache(tmp_path, monkeypatch):
    url, run = tmp_path / "given.pt", new_run(tmp_path)
    names, inputs = [], []
    monkeypatch.setattr(
        TrialRunner, "_train_waiting", lambda runner: setattr(runner.runs[0], "status", FINISHED)
    )
    for seed in (7, 8, 7):
        file_with(url, state_of(seed))
        trials = build_trials(run.recipe, {}, [{"learning_rate": 0.1}])
        runner = TrialRunner(
            run.recipe,
            str(tmp_path),
            str(run.data()),
            None,
            ClusterConfig(),
            True,
            initial_state=str(url),
        )
        names.append(runner.train(trials)[0].key)
        inputs.append(prepare(recipe=run.recipe, initial_model_state=str(url)).initial_model_state)
    assert names[0] == names[2] != names[1]
    assert inputs[0] == inputs[2] == pin_state(str(url)) != inputs[1]


def test_a_run_that_goes_on_with_other_code_says_so(tmp_path, caplog):
    run = new_run(tmp_path)
    first = new_trainer(run)
    first.recipe_version = "a1"
    first.progress.step = 5
    first.save_checkpoint(best=True)
    first.store.wait()
    for recipe, version, expected in (
        ("Tiny", "a1", ""),
        ("Tiny", "b2", "Tiny b2"),
        ("Dropped", "a1", "Dropped a1"),
    ):
        caplog.clear()
        second = new_trainer(run)
        second.recipe, second.recipe_version = type(recipe, (type(second.recipe),), {})(), version
        assert second.resume()[0]
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (1 if expected else 0)
        assert (
            not expected
            or f"goes on with other code: recipe {expected}, before Tiny a1" in lines[0]
        )


HEADED = "tests.support.heads.Headed"


def headed_state(num_classes=3):
    torch.manual_seed(7)
    return get_recipe(HEADED, {"num_classes": num_classes}).model().state_dict()


def test_another_head_is_trained_on_a_frozen_body(tmp_path):
    url, given = str(tmp_path / "given.pt"), headed_state()
    torch.save(given, url)
    run = new_run(tmp_path, HEADED)
    options = {
        "recipe_options": {"num_classes": 5},
        "fresh_layers": ["head"],
        "frozen_layers": ["body"],
    }
    config = config_of(run.recipe, {"epochs": 1, **options})
    job = Job(recipe_program(run.recipe, config, url), str(run.checkpoints), time.time())
    run.result = driver.run(job, LocalPlace(2), lambda: str(run.data()), [run], run.relay)
    trained = run.state()
    assert trained["head.weight"].shape == (5, 16)
    for name, value in given.items():
        if name.startswith("body."):  # also the statistics of its BatchNorm
            assert torch.equal(trained[name], value), name

    Path(url).unlink()
    options["recipe_options"]["note"] = "which changes nothing that is trained"
    trainer = new_trainer(run, url, **options)
    trainer.data_fingerprint = describe_data(run.data())["fingerprint"]
    checkpoint, _ = trainer.resume()
    assert checkpoint
    # All that is trained is in the optimizer, and nothing else.
    assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [2]
    for field, changes in {
        "recipe_options.num_classes: expected 5": {"recipe_options": {"num_classes": 4}},
        r"frozen_layers: expected \['body'\]": {"frozen_layers": []},
    }.items():
        with pytest.raises(
            ConfigError, match=f"^{field}, with which .*; another value needs another place"
        ):
            new_trainer(run, url, **{**options, **changes}).resume()


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


def test_a_recipe_has_fresh_weights_by_default():
    assert inspect.signature(recipe_program).parameters["initial_state"].default == ""


def nodes_of(workflow):
    """The nodes of a workflow, and those of its branches."""
    for node in workflow.nodes:
        if isinstance(node.flyte_entity, BranchNode):
            block = node.flyte_entity._ifelse_block
            yield from (case.then_node for case in [block.case, *block.other])
            yield block.else_node
        else:
            yield node


def test_every_workflow_hands_the_state_to_all_that_train():
    names = [path.stem for path in Path(__file__).parents[1].glob("workflows/[a-z]*.py")]
    modules = [importlib.import_module(f"workflows.{name}") for name in names]
    workflows = [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, WorkflowBase)
    ]
    training = [each for each in workflows if "initial_model_state" in each.python_interface.inputs]
    others = {each.name.rpartition(".")[2] for each in workflows if each not in training}
    assert others == {"script_wf", "generate_text_wf", "generate_names_wf"}
    handed = {
        (workflow.name, node.flyte_entity.name): binding.binding.promise
        for workflow in training
        for node in nodes_of(workflow)
        for binding in node.bindings
        if binding.var == "initial_model_state"
    }
    tasks = {name.rpartition(".")[2] for _, name in handed}
    assert tasks >= {
        "prepare",
        "plan_retraining",
        "train_on_one_node",
        "train_on_cluster",
        "train_sweep",
    }
    assert "train_at_world_sizes" in tasks
    assert [
        each
        for each, promise in handed.items()
        if not promise or promise.var != "initial_model_state"
    ] == []
    # What trains gets it with its checksum, as `prepare` or `plan_retraining` returns it: Flyte's
    # cache compares it.
    prepares = {workflow for workflow, task in handed if task.endswith(".prepare")}
    unchecked = [
        each
        for each, promise in handed.items()
        if each[0] in prepares
        and not each[1].endswith(".prepare")
        and promise.node_id == "global-inputs"
    ]
    assert (len(prepares), unchecked) == (7, [])
