"""The recipes of `examples/`: in a user's own directory, trained by every workflow, to the figures
of others' loops.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import f1_score, mean_absolute_error, r2_score
from sklearn.multiclass import OneVsRestClassifier
from torch.utils.data import DataLoader

from flyte_ddp.events import find_best
from flyte_ddp.rank.metrics import HeldOutMetrics
from flyte_ddp.rank.nested import collate
from flyte_ddp.recipes import get_recipe
from flyte_ddp.world import ALONE
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples" / "wine.py"
# a busy machine's workers are slow to answer, not lost
LOCAL = json.dumps({"kind": "local", "node_timeout": 60})


@pytest.fixture
def elsewhere(tmp_path):
    """A directory outside the repository with nothing but the example in it."""
    shutil.copy(EXAMPLE, tmp_path)
    return tmp_path


def pyflyte_run(directory, workflow, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [
            Path(sys.executable).parent / "pyflyte",
            "run",
            REPOSITORY / "workflows" / workflow[0],
            workflow[1],
        ]
        + ["--recipe", "wine.Wine", *arguments],
        cwd=directory,
        env={**environment, "WANDB_MODE": "disabled", "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout + run.stderr


def accuracies(output):
    return [float(accuracy) for accuracy in re.findall(r"accuracy ([\d.]+) ?%", output)]


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_a_recipe_outside_the_package_trains_to_a_meaningful_accuracy(elsewhere):
    workflow = ("single_node.py", "single_node_training_wf")
    status, output = pyflyte_run(
        elsewhere, workflow, "--config", '{"epochs": 10}', "--num_processes", "1"
    )
    assert status == 0, output
    assert accuracies(output)[-1] > 90  # of three classes
    assert [path.name for path in elsewhere.iterdir() if path.name != "__pycache__"] == ["wine.py"]


@pytest.mark.slow
def test_its_options_come_from_the_config_and_a_wrong_one_is_named(elsewhere):
    workflow = ("single_node.py", "single_node_training_wf")
    options = {"epochs": 1, "recipe_options": {"hidden": 64}}
    status, output = pyflyte_run(elsewhere, workflow, "--config", json.dumps(options))
    assert status == 0, output
    assert "1,091 parameters" in output  # 14 x 64 + 65 x 3
    status, output = pyflyte_run(
        elsewhere, workflow, "--config", '{"recipe_options": {"width": 64}}'
    )
    assert status != 0
    assert "recipe_options: expected one of hidden" in " ".join(
        re.sub(r"[│\n]", " ", output).split()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "arguments"),
    [
        (("multi_node.py", "multi_node_training_wf"), []),
        (("scaling.py", "scaling_wf"), ["--world_sizes", "[1, 2]"]),
        (("sweep.py", "sweep_wf"), ["--grid", '{"recipe_options.hidden": [8, 64]}']),
    ],
)
def test_every_other_workflow_trains_the_example(elsewhere, workflow, arguments):
    status, output = pyflyte_run(elsewhere, workflow, "--cluster", LOCAL, *arguments)
    assert status == 0, output
    assert accuracies(output)[-1] > 90


def plain_loop(recipe, directory):
    """The model after the recipe's epochs in one process, by a loop that knows nothing of the
    package.
    """
    train, _ = recipe.datasets(directory)
    settings = recipe.defaults
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), settings["learning_rate"], weight_decay=0)
    loader = DataLoader(train, settings["global_batch_size"], shuffle=True, collate_fn=collate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, settings["epochs"] * len(loader)
    )
    for _ in range(settings["epochs"]):
        for inputs, targets in loader:
            counts = recipe.num_targets(targets)
            loss = recipe.losses(model(inputs), targets).sum() / (
                len(inputs) if counts is None else counts.sum()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


def figures_of(recipe, model, directory):
    """The metrics of a model on all held-out samples at once."""
    _, test = recipe.datasets(directory)
    inputs, targets = next(iter(DataLoader(test, len(test), collate_fn=collate)))
    metrics = HeldOutMetrics(recipe, torch.device("cpu"))
    with torch.no_grad():
        metrics.update(model(inputs), targets)
    counts = recipe.num_targets(targets)
    return metrics.compute(ALONE, len(test), len(test) if counts is None else float(counts.sum()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tolerances", "bounds"),
    [
        (
            "blobs.Blobs",
            {"accuracy": 0.01, "miou": 0.02},
            {"accuracy": (0.95, 1), "miou": (0.85, 1)},
        ),
        # 0.88 is that of a model that knows only the means of the targets.
        pytest.param("listings.Shop", {"mae": 0.05}, {"mae": (0, 0.7)}, marks=pytest.mark.slow),
    ],
)
def test_the_examples_reach_the_figures_of_a_plain_loop(
    name, tolerances, bounds, tmp_path, server_with_metrics
):
    run = new_run(tmp_path, f"examples.{name}").train(2)
    recipe = get_recipe(f"examples.{name}")
    plain = figures_of(recipe, plain_loop(recipe, run.data()), run.data())
    ours = run.result.best.metrics
    assert ours.keys() == tolerances.keys()
    for metric, tolerance in tolerances.items():
        assert ours[metric] == pytest.approx(plain[metric], abs=tolerance), metric
        # by which also an example that neither loop can learn fails
        lowest, highest = bounds[metric]
        assert lowest < ours[metric] < highest, metric
    model = recipe.model()
    model.load_state_dict(run.state())
    assert figures_of(recipe, model, run.data()) == {
        each: pytest.approx(ours[each], rel=1e-4) for each in ours
    }


def train_here(name, directory):
    """Train an example in this process; return its data sets' tensors and the best metrics."""
    trainer = new_trainer(run := new_run(directory, name))
    best = find_best(trainer.fit().epochs, trainer.config.monitor)
    return *(each.tensors for each in trainer.recipe.datasets(run.data())), best.metrics


def test_the_regression_reaches_the_figures_of_scikit_learn(tmp_path):
    (train, targets), (test, truths), best = train_here("examples.diabetes.Diabetes", tmp_path)
    guesses = LinearRegression().fit(train, targets).predict(test)
    assert best["r2"] == pytest.approx(r2_score(truths, guesses), abs=0.02)
    assert best["mae"] == pytest.approx(mean_absolute_error(truths, guesses), abs=0.01)


@pytest.mark.long
def test_several_labels_reach_the_figures_of_scikit_learn(tmp_path):
    (train, labels), (test, truths), best = train_here("examples.topics.Topics", tmp_path)
    guesses = (
        OneVsRestClassifier(LogisticRegression(C=100, max_iter=1000))
        .fit(train, labels)
        .predict(test)
    )
    assert best["f1"] == pytest.approx(f1_score(truths, guesses, average="micro"), abs=0.02)
    assert best["accuracy"] == pytest.approx((truths.numpy() == guesses).mean(), abs=0.01)
