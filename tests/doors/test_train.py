"""`flyte_ddp.train`: a recipe from Python, without a Flyte."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import torch

import flyte_ddp
from flyte_ddp import __main__ as command_line
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.train_options import read_fields
from tests.support.errors import raises_one_line


def states_equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


@pytest.mark.long
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
        recipe,
        {"epochs": 1, "initial_model_state": trained.model_state_url},
        nproc_per_node=1,
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
    with raises_one_line(ConfigError, match=expected):
        flyte_ddp.train(*arguments, nproc_per_node=2)


def test_several_machines_need_a_place_for_checkpoints():
    cluster = {"kind": "existing", "scheduler_address": "tcp://127.0.0.1:1"}
    with pytest.raises(
        ConfigError, match="checkpoints: expected a URL that all machines reach, got none"
    ):
        flyte_ddp.train("digits", nnodes=2, nproc_per_node=1, cluster=cluster)


# The command


@pytest.mark.long
def test_the_command_trains_into_a_directory_of_its_own_and_resumes_there(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    train = ["train", "tests.support.recipes.Tiny", "--epochs=1", "--nproc-per-node", "1"]
    for name in ("Tiny", "Tiny-2"):
        assert command_line.main(train) == 0
        output, errors = capfd.readouterr()
        assert output.splitlines()[-4:] == [
            f"model state   runs/{name}/model_state.pt",
            f"export        runs/{name}/export",
            f"report        runs/{name}/report.html",
            f"history       runs/{name}/history.jsonl",
        ]
        assert f"outputs: runs/{name}\n" in errors
        assert errors.splitlines()[-1].startswith("best ")
        assert {"export", "history.jsonl", "model_state.pt", "report.html"} < {
            each.name for each in (tmp_path / "runs" / name).iterdir()
        }
    assert command_line.main([*train, "--checkpoints", "runs/Tiny"]) == 0
    assert "resumed at step" in capfd.readouterr().err
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["digits", "--epoch", "3"], "config: expected a known field .did you mean .*'epoch'"),
        (["digits", "--epochs", "many"], "epochs: expected a whole number of at least 1, got 'm"),
        (["digits", "--epochs"], "epochs: expected a whole number of at least 1, got True"),
        (["digits", "--recipe_options.width", "3"], "recipe_options: expected "),
        (["digits", "3"], "train: expected flyte-ddp train RECIPE .*, got '3'"),
        (["digits", "--global-batch-size=33"], "global_batch_size: expected a multiple of 2"),
        (["digits", "--data", "none"], "data: "),
        (["digits", "--config", "none.json"], "--config: expected a JSON object or the name"),
        (["digts"], "recipe: expected "),
    ],
)
def test_a_wrong_command_is_one_line_and_leaves_nothing(
    arguments, expected, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command_line.main(["train", *arguments]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert re.match(f"error: {expected}", lines.pop()), lines
    assert all(each.startswith("outputs: ") for each in lines)
    assert not list(tmp_path.glob("runs/*"))


def test_fields_are_read_from_words():
    words = "--learning-rate 1e-3 --compile --monitor.metric f1 --monitor.mode=max"
    assert read_fields([*words.split(), "--memory_interval", "-1"]) == {
        "learning_rate": 1e-3,
        "compile": True,
        "monitor": {"metric": "f1", "mode": "max"},
        "memory_interval": -1,
    }


def test_the_help_names_every_field_and_imports_no_torch(capfd):
    code = (
        "import sys; from flyte_ddp.__main__ import main\n"
        "try: main(['train', '--help'])\n"
        "finally: assert not {'torch', 'dask', 'wandb', 'jinja2'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    shown = capfd.readouterr().out
    assert all(f"--{each.name}" in shown for each in dataclasses.fields(TrainingConfig))
