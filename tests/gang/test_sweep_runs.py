"""Sweeps that train: trials on a cluster of this machine's processes, and the workflow."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pandas
import pytest
import torch
from flytekit.exceptions.user import FlyteRecoverableException

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import ClusterError, StorageUnavailable, TrainingStopped
from flyte_ddp.flyte.failures import flyte_errors
from flyte_ddp.flyte.inputs import ClusterInput, TrainingOverrides, given
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask import worker
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage.state_dict_file import from_bytes
from flyte_ddp.studies.results import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    STOPPED_EARLY,
    build_table,
    find_best,
)
from flyte_ddp.studies.runner import TrialRunner
from flyte_ddp.studies.search import Search, build_trials, expand_grid
from tests.launch.test_driver import Scripted
from tests.launch.test_policy import AWAY
from tests.support.dask_runs import start_scheduler
from tests.support.prometheus import record_figures
from tests.support.wandb_log import records_of

SWEPT = "tests.support.sweep_recipes.Swept"
# a busy machine's workers are slow to answer, not lost
LOCAL = ClusterConfig(kind="local", node_timeout=30)


def models(*grids):
    """The models of several grids of the recipe for sweeps, one after the other, as in a list of
    models.
    """
    return build_trials(
        SWEPT,
        {"checkpoint_interval": 2},
        expand_grid([each for grid in grids for each in expand_grid(grid)]),
    )


# --- On a cluster
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def client(record):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECORD", str(record))
        with open_cluster(LOCAL, "test") as client:
            yield client


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    prepare_data(get_recipe(SWEPT), "", directory)
    return directory


class Watch:
    """An observer that remembers, and calls `reaction` with every model and event."""

    def __init__(self, reaction=None):
        self.seen = []
        self.reaction = reaction

    def __call__(self, run, event):
        self.seen.append((run.trial.number, event))
        if self.reaction:
            self.reaction(run, event)

    def starts(self, number):
        """The steps at which the model's ranks started."""
        return [
            event.step
            for each, event in self.seen
            if each == number and isinstance(event, events.CheckpointLoaded)
        ]


def sweep(found, checkpoints, data, client, watch=None, **options):
    options = {"observe": watch or Watch(), "relay": lambda line: None, **options}
    return TrialRunner(str(checkpoints), str(data), client, LOCAL, **options).train(found)


FOUR = [
    {"learning_rate": [0.1, 0.01]},
    {"recipe_options.fault": ["raise"]},
    {"recipe_options.fault": ["nan"]},
]


@pytest.fixture(scope="module")
def four(tmp_path_factory, data, client):
    """A finished sweep of two models that learn, one that raises and one with a NaN; where it lies;
    who saw it.
    """
    checkpoints = tmp_path_factory.mktemp("four")
    watch = Watch()
    return sweep(models(*FOUR), checkpoints, data, client, watch), checkpoints, watch


@pytest.mark.long
def test_a_failed_model_is_a_row_with_its_error_and_stops_no_other(four, record):
    runs, _, _ = four
    assert [run.status for run in runs] == [FINISHED, FINISHED, FAILED, FAILED]
    assert "in _raise" in runs[2].details
    assert runs[3].error.startswith("NonFiniteLoss: the loss is nan at step 3 (epoch 1)")
    table = build_table(runs)
    assert list(table["trial"]) == [1, 1, 1, 2, 2, 2, 3, 4]
    assert list(table["epoch"].fillna(0)) == [1, 2, 3, 1, 2, 3, 0, 0]
    assert list(table["test_loss"][:3]) == [epoch.test_loss for epoch in runs[0].epochs]
    assert table["error"][6] == "ValueError: broken on purpose"
    assert table["error"][:6].isna().all()
    assert find_best(runs) is runs[0]
    assert all(b"RunStarted" in run.history() for run in runs)
    # Each worker has one trial. No worker has two at a time, because every rank takes a lock.
    assert len(list(record.iterdir())) == 2


def pid_of_worker_with(record, label):
    return next(
        (int(file.name) for file in record.iterdir() if label in file.read_text().split()), 0
    )


@pytest.mark.long
def test_a_lost_worker_a_sigterm_and_a_retry_cost_only_time(tmp_path, data, client, record, four):
    go = tmp_path / "go"
    slow = {
        "recipe_options": [{"label": "slow", "slow_until": str(go)}],
        "learning_rate": [0.1],
        "epochs": [40],
    }
    found = models({"recipe_options.label": ["quick"], "learning_rate": [0.1]}, slow)

    def is_slow(kind):
        return lambda run, event: run.trial.number == 2 and isinstance(event, kind)

    stages = [  # each waits for the one before: an event, and what is done then
        (lambda run, event: run.trial.number == 1 and run.status == FINISHED, lambda: None),
        (
            is_slow(events.EpochFinished),
            lambda: os.kill(pid_of_worker_with(record, "slow"), signal.SIGKILL),
        ),
        (is_slow(events.RunStarted), lambda: None),
        # The restarted trial is not lost earlier: it has to get further than its state.
        (is_slow(events.EpochFinished), lambda: os.kill(os.getpid(), signal.SIGTERM)),
    ]

    def react(run, event):
        if stages and stages[0][0](run, event):
            stages.pop(0)[1]()

    watch = Watch(react)
    with pytest.raises(
        TrainingStopped,
        match=(
            r"SIGTERM: the study was stopped with 1 of 2 trials "
            r"done. To resume"
        ),
    ):
        sweep(found, tmp_path / "checkpoints", data, client, watch)
    assert stages == []
    assert watch.starts(1) == [0]  # the others hear nothing of it
    first, second = watch.starts(2)
    assert (first, second > 0) == (0, True)

    go.touch()
    watch = Watch()
    runs = sweep(found, tmp_path / "checkpoints", data, client, watch)
    assert [run.status for run in runs] == [FINISHED, FINISHED]
    assert watch.starts(1) == []  # This trial is trained already.
    (again,) = watch.starts(2)
    assert again > second
    uninterrupted = [epoch.test_loss for epoch in four[0][0].epochs]
    for run in runs:
        assert [epoch.test_loss for epoch in run.epochs[:3]] == uninterrupted
    assert len(runs[1].epochs) == 40


@pytest.mark.long
def test_a_bad_model_is_stopped_early_for_good(tmp_path, data, client, four, monkeypatch):
    """Beside models that an earlier sweep has trained, and on a worker that has to fetch a copy of
    the data.
    """
    _, checkpoints, _ = four
    monkeypatch.setattr(worker, "holds_file", lambda path, contents: not path.endswith("data.json"))
    bad = {
        "learning_rate": [1e-9],
        "epochs": [60],
        "recipe_options.slow_until": [str(tmp_path / "never")],
    }
    found = models(*FOUR[:1], bad)
    watch = Watch()
    runs = sweep(found, checkpoints, data, client, watch, search=Search("median"))
    assert [run.status for run in runs] == [FINISHED, FINISHED, STOPPED_EARLY]
    assert [watch.starts(number) for number in (1, 2, 3)] == [[], [], [0]]
    assert 2 <= len(runs[2].epochs) < 60
    assert find_best(runs) is runs[0]
    assert [entry.name for entry in checkpoints.iterdir()] == ["trials"]

    watch = Watch()
    assert [run.status for run in sweep(found, checkpoints, data, client, watch)] == [
        run.status for run in runs
    ]
    assert watch.starts(3) == []


@pytest.mark.long
def test_a_store_that_stays_away_ends_the_sweep_recoverably_and_fails_no_model(
    data, client, four, monkeypatch
):
    """Also where other models have finished: the rest is trained by the next attempt."""
    _, checkpoints, _ = four
    monkeypatch.setattr(driver, "Attempt", Scripted([(AWAY, 5, 0), (AWAY, 5, 0)]))
    seen = []
    watch = Watch(lambda run, event: seen.append((run.trial.number, run.status)))
    with pytest.raises(StorageUnavailable) as caught:
        sweep(models(*FOUR[:1], {"learning_rate": [0.02]}), checkpoints, data, client, watch)
    assert seen[-1] == (3, INTERRUPTED)
    with pytest.raises(FlyteRecoverableException), flyte_errors():
        raise caught.value


@pytest.mark.slow
def test_a_lost_cluster_ends_the_sweep(tmp_path, data, record, start_worker):
    scheduler, address = start_scheduler(tmp_path)
    for number in range(2):
        start_worker(address, f"worker-{number}", RECORD=str(record))
    config = ClusterConfig(kind="existing", scheduler_address=address, start_timeout=60)

    def react(run, event):
        if run.trial.number == 1 and isinstance(event, events.EpochFinished):
            scheduler.kill()

    slow = {
        "recipe_options.slow_until": [str(tmp_path / "never")],
        "learning_rate": [0.1, 0.01, 0.001],
        "epochs": [99],
    }
    with (
        open_cluster(config, "test") as client,
        pytest.raises(ClusterError, match="the cluster was lost: "),
    ):
        sweep(models(slow), tmp_path / "checkpoints", data, client, Watch(react))
    scheduler.wait()


# --- The workflow
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return the workflow's outputs, its standard error, and its figures for Prometheus at each new
    report.
    """
    from workflows.sweep import sweep_wf

    output = tmp_path_factory.mktemp("output") / "lines"
    with pytest.MonkeyPatch.context() as patch, open(output, "w") as stderr:
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr("sys.stderr", stderr)
        published = record_figures(patch)
        returned = sweep_wf(
            grid={"learning_rate": [0.0001, 0.01]},
            config=TrainingOverrides(epochs=2),
            cluster=ClusterInput(kind="local", node_timeout=30),
            checkpoints=str(tmp_path_factory.mktemp("checkpoints")),
        )
    return returned, output.read_text(), published


@pytest.mark.long
def test_the_workflow_returns_the_table_and_the_best_model(outputs):
    returned, _, _ = outputs
    table = returned.results.open(pandas.DataFrame).all()
    assert list(table["trial"]) == [1, 1, 2, 2]
    assert list(table["learning_rate"]) == [0.0001, 0.0001, 0.01, 0.01]
    of_csv = pandas.read_csv(returned.csv.path)
    assert list(of_csv) == list(table)
    assert of_csv["error"].isna().all()
    pandas.testing.assert_frame_equal(
        of_csv.drop(columns="error"), table.drop(columns="error"), check_dtype=False
    )
    best = table[table["trial"] == 2]
    assert best["test_loss"].iloc[-1] < table["test_loss"][1]
    assert returned.best_accuracies == list(best["accuracy"])
    assert given(returned.best_config) == {"epochs": 2, "learning_rate": 0.01}
    state = torch.load(returned.best_model_state.path, weights_only=True)
    get_recipe("digits").model().load_state_dict(state)
    export = Path(returned.best_export.path)
    exported = from_bytes((export / "model_state.safetensors").read_bytes())
    assert all(torch.equal(exported[name], value) for name, value in state.items())
    card = json.loads((export / "run_card.json").read_text())
    assert (card["config"]["learning_rate"], len(card["epochs"])) == (0.01, 2)
    assert card["origin"]["code_version"]
    kinds = [type(event).__name__ for event in events.read_history(returned.history.path)]
    assert [kinds.count(kind) for kind in ("RunStarted", "EpochFinished", "RunFinished")] == [
        2,
        4,
        2,
    ]


@pytest.mark.long
def test_the_workflow_shows_its_models_while_they_train_and_at_the_end(outputs, chromium):
    returned, output, published = outputs
    for number, rate in ((1, "0.0001"), (2, "0.01")):
        assert f"trial {number}/2 (learning_rate {rate}) started" in output
        end = (
            rf"trial {number}/2 \(learning_rate {rate}\) finished, after epoch 2: "
            r"test loss \d\.\d+, accuracy \d+"
        )
        assert re.search(end, output)
        world_size = f'flyte_ddp_world_size{{recipe="digits",run="",trial="{number}"}} 1.0'
        assert any(world_size in figures for figures in published)
    assert "the best is trial 2 (learning_rate 0.01)" in output
    assert len(published) == 2 * 2 + 1  # models, epochs
    assert published[-1] == ""
    counts = chromium(
        Path(returned.report.path),
        # over epochs, over time, by hyperparameter
        "document.querySelectorAll('svg.panel').length",
        "document.querySelectorAll('.table tbody tr').length",
    )
    assert counts == [3, 2]
    files = Path(returned.report.path).parent.glob("wandb/offline-run-*")
    runs = [run for each in files for run in records_of(each, "run")]
    assert {run.display_name for run in runs} == {
        "trial 1 (learning_rate 0.0001)",
        "trial 2 (learning_rate 0.01)",
    }
    assert len({run.run_group for run in runs}) == 1
    assert output.count(") W&B: ") == 2
