"""The recipes of `examples/`: in a user's own directory, and to the figures of others' loops."""

from __future__ import annotations

import os
import pickle
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
from torchvision.transforms.functional import pil_to_tensor

from examples.scripts.s3_images import S3Images
from flyte_ddp.events import find_best
from tests.support.image_store import COLOURS, image_tree, running_store
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.long
def test_a_recipe_outside_the_package_trains_to_a_meaningful_accuracy(tmp_path):
    shutil.copy(REPOSITORY / "examples/recipes/wine.py", tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    workflow = (REPOSITORY / "workflows/single_node.py", "single_node_training_wf")
    done = subprocess.run(
        [Path(sys.executable).parent / "pyflyte", "run", *workflow]
        + ["--recipe", "wine.Wine", "--config", '{"epochs": 10}', "--num_processes", "1"],
        cwd=tmp_path,
        env={**environment, "WANDB_MODE": "disabled", "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # accuracy over three classes
    assert float(re.findall(r"accuracy ([\d.]+)%", done.stderr)[-1]) > 90
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"wine.py", "runs"}


def train_here(name, directory):
    """Train an example in this process; return its data sets and the best metrics."""
    trainer = new_trainer(run := new_run(directory, name))
    best = find_best(trainer.fit().epochs, trainer.parallelism.config.monitor)
    return trainer.parallelism.recipe.datasets(run.data()), best.metrics


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("blobs.Blobs", {"accuracy": (0.95, 1), "miou": (0.85, 1)}),
        # A model that knows only the means of the targets reaches 0.88.
        pytest.param("listings.Shop", {"mae": (0, 0.7)}, marks=pytest.mark.slow),
    ],
)
def test_an_example_learns_what_there_is_to_learn(name, bounds, tmp_path):
    _, best = train_here(f"examples.recipes.{name}", tmp_path)
    assert best.keys() == bounds.keys()
    for metric, (lowest, highest) in bounds.items():
        assert lowest < best[metric] < highest, metric


def test_the_regression_reaches_the_figures_of_scikit_learn(tmp_path):
    data, best = train_here("examples.recipes.diabetes.Diabetes", tmp_path)
    (train, targets), (test, truths) = (each.tensors for each in data)
    guesses = LinearRegression().fit(train, targets).predict(test)
    assert best["r2"] == pytest.approx(r2_score(truths, guesses), abs=0.02)
    assert best["mae"] == pytest.approx(mean_absolute_error(truths, guesses), abs=0.01)


@pytest.mark.long
def test_several_labels_reach_the_figures_of_scikit_learn(tmp_path):
    data, best = train_here("examples.recipes.topics.Topics", tmp_path)
    (train, labels), (test, truths) = (each.tensors for each in data)
    guesses = (
        OneVsRestClassifier(LogisticRegression(C=100, max_iter=1000))
        .fit(train, labels)
        .predict(test)
    )
    assert best["f1"] == pytest.approx(f1_score(truths, guesses, average="micro"), abs=0.02)
    assert best["accuracy"] == pytest.approx((truths.numpy() == guesses).mean(), abs=0.01)


def test_images_in_s3_are_a_data_set_for_a_function_of_ones_own():
    with running_store() as s3:
        url = s3.fill({**image_tree(), "train/blue/notes.txt": b"no image"})
        bucket, prefix = url.removeprefix("s3://").split("/")
        options = {"transform": pil_to_tensor, "target_transform": float}
        data = S3Images(bucket, f"{prefix}/train", anon=True, **options)
        assert data.classes == ["blue", "green", "red"]
        batches = DataLoader(pickle.loads(pickle.dumps(data)), 4, num_workers=2)
        images, targets = map(torch.cat, zip(*batches, strict=True))
        assert targets.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
        expected = [COLOURS[name] for name in data.classes for _ in range(4)]
        assert images[:, :, -1, -1].tolist() == [list(each) for each in expected]
        with pytest.raises(
            ValueError, match=f"^s3_prefix: expected images below s3://{bucket}/none"
        ):
            S3Images(bucket, "none")
