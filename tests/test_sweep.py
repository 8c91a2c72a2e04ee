"""Sweeps: which models they have, what becomes of each on clusters of this machine's processes, and the workflow."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
from pathlib import Path

import pandas
import pytest
import torch
from dask.system import CPU_COUNT

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import ClusterError, ConfigError, SweepFailed, TrainingStopped
from flyte_ddp.flytekit_plugin.deck import DeckPublisher
from flyte_ddp.launch.dask import launcher as dask
from flyte_ddp.launch.dask.placement import Worker
from flyte_ddp.launch.dask.pool import Pool
from flyte_ddp.observers import figures
from flyte_ddp.prepare import prepare_data
from flyte_ddp.recipes import get_recipe
from flyte_ddp.sweep import plots as sweep_plots
from flyte_ddp.sweep.plots import sweep_panels
from flyte_ddp.sweep.results import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    STOPPED_EARLY,
    TrialRun,
    build_table,
    find_best,
)
from flyte_ddp.sweep.runner import train_trials
from flyte_ddp.sweep.search import EarlyStopping, build_trials
from tasks.inputs import ClusterInput, InputError, TrainingOverrides, given
from tasks.sweep import check_sweep
from tasks.sweep_report import SweepReport
from tests.support.wandb_log import records_of
from tests.test_dask import start_scheduler, start_worker  # noqa: F401 - the latter is a fixture

SWEPT = "tests.support.sweep_recipes.Swept"
LOCAL = ClusterConfig(kind="local", node_timeout=30)  # a busy machine's workers are slow to answer, not lost
RANGE = {"low": 0.0001, "high": 0.1, "log": True}


def models(*grids):
    """The models of several grids of the recipe for sweeps, one after the other."""
    found = [model for grid in grids for model in build_trials(SWEPT, {"checkpoint_interval": 2}, grid)]
    return [dataclasses.replace(model, number=index) for index, model in enumerate(found, start=1)]


# --- Which models a sweep has -------------------------------------------------------------------------------------


def test_a_grid_yields_every_combination_once():
    found = build_trials("digits", {"epochs": 2}, {"learning_rate": [0.1, 0.01], "global_batch_size": [32, 64.0, 64]})

    assert [model.values for model in found] == [
        {"learning_rate": rate, "global_batch_size": size} for rate in (0.1, 0.01) for size in (32, 64)
    ]
    assert [model.number for model in found] == [1, 2, 3, 4]
    assert [(model.config.learning_rate, model.config.epochs) for model in found[1:3]] == [(0.1, 2), (0.01, 2)]
    assert found[1].overrides == {"epochs": 2, "learning_rate": 0.1, "global_batch_size": 64}
    assert type(found[1].overrides["global_batch_size"]) is int


def test_a_grid_may_vary_a_recipes_options_beside_those_that_all_models_share():
    found = build_trials(SWEPT, {"recipe_options": {"label": "x"}}, {"recipe_options.fault": ["none", "nan"]})

    assert [model.config.recipe_options["fault"] for model in found] == ["none", "nan"]
    assert {model.config.recipe_options["label"] for model in found} == {"x"}
    assert found[1].overrides == {"recipe_options": {"label": "x", "fault": "nan"}}


def test_the_same_seed_draws_the_same_models_and_another_seed_others():
    grid = {
        "learning_rate": RANGE,
        "global_batch_size": {"low": 32, "high": 128, "step": 32},
        "optimizer": ["sgd", "adam"],
    }
    drawn = build_trials("digits", {}, grid, num_models=12, seed=3)
    again = build_trials("digits", {}, dict(reversed(grid.items())), num_models=12, seed=3)
    others = build_trials("digits", {}, grid, num_models=12, seed=4)

    assert [model.config for model in drawn] == [model.config for model in again]
    assert [model.config for model in drawn] != [model.config for model in others]
    assert all(0.0001 <= model.config.learning_rate <= 0.1 for model in drawn)
    assert {model.config.global_batch_size for model in drawn} == {32, 64, 96, 128}
    assert {model.config.optimizer for model in drawn} == {"sgd", "adam"}
    # Logarithmic: half of the draws are in the lower half of the decades.
    assert 2 <= sum(model.config.learning_rate < 0.00316 for model in drawn) <= 10


def test_no_more_models_are_drawn_than_distinct_ones_exist():
    found = build_trials("digits", {}, {"optimizer": ["sgd", "adam"], "epochs": {"low": 1, "high": 2}}, num_models=50)
    assert len(found) == 4


@pytest.mark.parametrize(
    ("grid", "num_models", "expected"),
    [
        ({}, 0, "grid: expected a JSON object such as .*, got {}"),
        ({"lr": [0.1]}, 0, "grid: expected one of epochs, .*recipe_options.NAME .*, got 'lr'"),
        ({"learning_rate": []}, 0, r"grid.learning_rate: expected a list of choices.*, got \[\]"),
        ({"learning_rate": 0.1}, 0, "grid.learning_rate: expected a list of choices.*, got 0.1"),
        (
            {"learning_rate": RANGE},
            0,
            "grid.learning_rate: expected a list of choices .a range needs num_models., got ",
        ),
        ({"learning_rate": {"low": 0, "high": 1, "log": True}}, 3, "grid.learning_rate: expected a range .*.*low > 0"),
        ({"learning_rate": {"low": 2, "high": 1}}, 3, "grid.learning_rate: expected a range .*.*low <= high"),
        ({"learning_rate": {"low": 0, "hi": 1}}, 3, "grid.learning_rate: expected a range .*unknown hi"),
        ({"learning_rate": {"low": 0, "high": "1"}}, 3, "grid.learning_rate: .* finite numbers"),
        ({"learning_rate": {"low": 0, "high": math.inf}}, 3, "grid.learning_rate: .* finite numbers"),
        ({"epochs": {"low": 1, "high": 2.5}}, 3, "grid.epochs: expected a range .* this field is an integer"),
        ({"optimizer": {"low": 1, "high": 2}}, 3, "grid.optimizer: expected a range .* this field is not a number"),
        (
            {"seed": list(range(40)), "epochs": list(range(1, 41))},
            0,
            "grid: expected at most 1,000 combinations, got 1,600; num_models",
        ),
        ({"epochs": [1]}, -1, "num_models: expected an integer from 0 to 1000, got -1"),
        ({"learning_rate": [0.1, -1]}, 0, "learning_rate: expected a finite number above 0, got -1"),
        ({"learning_rate": [0.1, "fast"]}, 0, "learning_rate: expected a finite number above 0, got 'fast'"),
        ({"recipe_options.size": [1]}, 0, "recipe_options: expected no options for recipe 'digits', got 'size'"),
        ({"global_batch_size": [64, 33]}, 0, "global_batch_size: expected a multiple of 2, got 33"),
    ],
)
def test_a_bad_grid_is_refused_in_one_line_before_anything_starts(grid, num_models, expected):
    cluster = ClusterInput(kind="existing", processes_per_node=2)
    with pytest.raises(InputError, match=expected) as caught:
        check_sweep.task_function("digits", TrainingOverrides(), grid, num_models, 0, "none", cluster)
    assert "\n" not in str(caught.value)


def test_an_unknown_rule_for_stopping_early_is_refused():
    with pytest.raises(ConfigError, match="stop_early: expected one of none, median, halving, got 'soon'"):
        EarlyStopping("soon")


# --- Stopping early -----------------------------------------------------------------------------------------------


def stopped_after(rule, *losses):
    """The number of epochs after which each model, trained one after the other, is stopped; 0 for one that is not."""
    rule = EarlyStopping(rule)
    ends = []
    for number, own in enumerate(losses):
        end = next((epoch for epoch, loss in enumerate(own, start=1) if rule.should_stop(number, epoch, loss)), 0)
        if not end:
            rule.finish(number, own[-1])
        ends.append(end)
    return ends


def test_a_model_worse_than_the_median_of_those_before_is_stopped():
    good, fair, bad = [4, 3, 2, 1], [5, 4, 3, 2], [9, 8, 7, 6]
    assert stopped_after("median", bad, good, fair, fair, bad, good) == [0, 0, 0, 0, 2, 0]


def test_halving_keeps_the_better_half_at_epochs_1_2_4():
    losses = [[4, 4, 4, 4, 4], [3, 3, 3, 3, 3], [9, 9, 9, 9, 9], [2, 3.5, 9, 9, 9], [1, 1, 1, 3.5, 1]]
    assert stopped_after("halving", *losses) == [0, 0, 1, 2, 4]


def test_without_a_rule_no_trial_is_stopped_and_a_loss_counts_once(recwarn):
    assert stopped_after("none", [1, 1], [9, math.nan]) == [0, 0]
    rule = EarlyStopping("halving")
    assert not rule.should_stop(1, 1, 1.0)
    assert rule.should_stop(2, 1, 2.0)
    assert not rule.should_stop(2, 1, 2.0)  # a run that has restarted reports its epochs again
    assert [str(warning.message) for warning in recwarn] == []


# --- The workers --------------------------------------------------------------------------------------------------


def worker(name, host="10.0.0.1", gpus=(), is_busy=False):
    return Worker(f"tcp://{host}:1{name}", name, host, 8, gpus, False, is_busy)


def test_a_worker_belongs_to_one_run_at_a_time(tmp_path):
    pool = Pool(str(tmp_path))
    workers = [worker("0"), worker("1", is_busy=True), worker("2", "10.0.0.2")]

    (first,) = pool.claim("a", workers, 0)
    (second,) = pool.claim("b", workers, 0)
    assert [first.name, second.name] == ["0", "2"]
    assert pool.claim("c", workers, 0) == []
    assert pool.is_in_use()
    pool.release("a")
    assert [each.name for each in pool.claim("c", workers, 0)] == ["0"]
    pool.release("b")
    pool.release("c")
    assert not pool.is_in_use()


def test_runs_share_the_cores_and_the_gpus_of_a_host(tmp_path):
    pool = Pool(str(tmp_path))
    workers = [worker(str(number), gpus=("0", "1", "2")) for number in range(4)]
    workers.append(worker("4", "10.0.0.2", ("0",)))

    claims = [pool.claim(run, workers, 1) for run in "abcde"]
    assert [claim[0].gpus for claim in claims[:4]] == [("0",), ("1",), ("2",), ("0",)]
    assert claims[3][0].host == "10.0.0.2"
    assert claims[4] == []  # a worker is free, but the GPUs of its host are not
    assert [claim[0].num_cores for claim in claims[:4]] == [2, 2, 2, 8]
    pool.release("b")
    (late,) = pool.claim("e", workers, 1)
    assert late.gpus == ("1",)


def test_the_copy_of_the_data_is_made_once_for_all_runs_and_removed_at_the_end(tmp_path):
    pool = Pool(str(tmp_path))
    uploads = []

    def upload():
        uploads.append("data-1.zip")
        pool.shared.write("data-1.zip", b"data")
        return pool.shared.join("data-1.zip")

    assert {pool.archive(upload) for _ in range(3)} == {str(tmp_path / "data-1.zip")}
    assert uploads == ["data-1.zip"]
    pool.close()
    assert list(tmp_path.iterdir()) == []


# --- On a cluster -------------------------------------------------------------------------------------------------


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
            event.resumed_step for each, event in self.seen if each == number and isinstance(event, events.RunStarted)
        ]


def sweep(found, checkpoints, data, client, watch=None, **options):
    return train_trials(
        *(SWEPT, found, str(checkpoints), str(data), client, LOCAL),
        observers=[watch or Watch()],
        relay=lambda line: None,
        **options,
    )


FOUR = [
    {"learning_rate": [0.1, 0.01]},
    {"recipe_options.fault": ["raise"]},
    {"recipe_options.fault": ["nan"]},
]


@pytest.fixture(scope="module")
def four(tmp_path_factory, data, client):
    """A finished sweep of two models that learn, one that raises and one with a NaN; where it lies; who saw it."""
    checkpoints = tmp_path_factory.mktemp("four")
    watch = Watch()
    return sweep(models(*FOUR), checkpoints, data, client, watch), checkpoints, watch


def test_a_failed_model_is_a_row_with_its_error_and_stops_no_other(four):
    runs, _, _ = four
    assert [run.status for run in runs] == [FINISHED, FINISHED, FAILED, FAILED]
    assert runs[2].error == "ValueError: broken on purpose"
    assert "in _raise" in runs[2].details
    assert runs[3].error.startswith("NonFiniteLoss: the loss is nan at step 3 (epoch 1) on rank 0")
    assert "\n" not in runs[2].error + runs[3].error


def test_every_epoch_of_every_model_is_in_the_table(four):
    runs, _, _ = four
    runs = [
        dataclasses.replace(run, trial=dataclasses.replace(run.trial, values={"rate": index}))
        for index, run in enumerate(runs)
    ]
    table = build_table(runs)
    assert list(table["model"]) == [1, 1, 1, 2, 2, 2, 3, 4]
    assert list(table["epoch"].fillna(0)) == [1, 2, 3, 1, 2, 3, 0, 0]
    assert list(table["rate"]) == [0, 0, 0, 1, 1, 1, 2, 3]
    assert list(table["test_loss"][:3]) == [epoch.test_loss for epoch in runs[0].epochs]
    assert table["elapsed_seconds"][1] == pytest.approx(
        sum(epoch.seconds + epoch.evaluation_seconds for epoch in runs[0].epochs[:2])
    )
    assert table["error"][6] == "ValueError: broken on purpose"
    assert table["error"][:6].isna().all()


def test_the_best_has_the_lowest_loss_after_its_last_epoch(four):
    runs, _, _ = four
    best = find_best(runs)
    assert best is runs[0]
    assert best.last_loss < runs[1].last_loss
    get_recipe(SWEPT).model().load_state_dict(torch.load(best.model_state_url, weights_only=True))


def test_models_train_side_by_side(four, record):
    """One on each worker; that none has two at a time is proved by the lock that every rank takes."""
    assert len(list(record.iterdir())) == 2
    _, _, watch = four
    num_threads = {event.num_threads for _, event in watch.seen if isinstance(event, events.RunStarted)}
    assert num_threads == {max(1, CPU_COUNT // 2)}


def pid_of_worker_with(record, label):
    return next((int(file.name) for file in record.iterdir() if label in file.read_text().split()), 0)


def test_a_lost_worker_a_sigterm_and_a_retry_cost_only_time(tmp_path, data, client, record, four):
    go = tmp_path / "go"
    slow = {"recipe_options": [{"label": "slow", "slow_until": str(go)}], "learning_rate": [0.1], "epochs": [40]}
    found = models({"recipe_options.label": ["quick"], "learning_rate": [0.1]}, slow)
    done = []

    def react(run, event):
        if run.trial.number == 1 and run.status == FINISHED and not done:
            done.append("quick")
        elif run.trial.number == 2 and done == ["quick"] and isinstance(event, events.EpochFinished):
            done.append("killed")
            os.kill(pid_of_worker_with(record, "slow"), signal.SIGKILL)
        elif run.trial.number == 2 and done == ["quick", "killed"] and isinstance(event, events.RunStarted):
            done.append("restarted")
        # Not earlier: the restarted trial has to get further than where it went on.
        elif run.trial.number == 2 and done[2:] == ["restarted"] and isinstance(event, events.EpochFinished):
            done.append("stopped")
            os.kill(os.getpid(), signal.SIGTERM)

    watch = Watch(react)
    with pytest.raises(TrainingStopped, match=r"SIGTERM: the sweep was stopped with 1 of 2 trials done. To resume"):
        sweep(found, tmp_path / "checkpoints", data, client, watch)
    assert done == ["quick", "killed", "restarted", "stopped"]
    assert watch.starts(1) == [0]  # the others hear nothing of it
    first, second = watch.starts(2)
    assert (first, second > 0) == (0, True)

    go.touch()
    watch = Watch()
    runs = sweep(found, tmp_path / "checkpoints", data, client, watch)
    assert [run.status for run in runs] == [FINISHED, FINISHED]
    assert watch.starts(1) == []  # it is trained already
    (again,) = watch.starts(2)
    assert again > second
    uninterrupted = [epoch.test_loss for epoch in four[0][0].epochs]
    for run in runs:
        assert [epoch.test_loss for epoch in run.epochs[:3]] == uninterrupted
    assert len(runs[1].epochs) == 40


def test_a_bad_model_is_stopped_early_for_good(tmp_path, data, client, four, monkeypatch):
    """Beside models that an earlier sweep has trained, and on a worker that has to fetch a copy of the data."""
    _, checkpoints, _ = four
    monkeypatch.setattr(dask.worker, "holds_file", lambda path, contents: not path.endswith("data.json"))
    bad = {"learning_rate": [1e-9], "epochs": [60], "recipe_options.slow_until": [str(tmp_path / "never")]}
    found = models(*FOUR[:1], bad)
    watch = Watch()
    runs = sweep(found, checkpoints, data, client, watch, stop_early="median")
    assert [run.status for run in runs] == [FINISHED, FINISHED, STOPPED_EARLY]
    assert [watch.starts(number) for number in (1, 2, 3)] == [[], [], [0]]
    assert 2 <= len(runs[2].epochs) < 60
    assert find_best(runs) is runs[0]
    assert [entry.name for entry in checkpoints.iterdir()] == ["trials"]

    watch = Watch()
    assert [run.status for run in sweep(found, checkpoints, data, client, watch)] == [run.status for run in runs]
    assert watch.starts(3) == []


@pytest.mark.slow
def test_a_sweep_without_any_good_model_fails_with_the_errors_of_all(tmp_path, data, client):
    with pytest.raises(SweepFailed) as caught:
        sweep(models(*FOUR[1:]), tmp_path, data, client)
    assert str(caught.value).startswith("none of the 2 trials finished\ntrial 1 (recipe_options.fault raise")
    assert "ValueError: broken on purpose" in str(caught.value)
    assert "NonFiniteLoss: the loss is nan" in str(caught.value)
    assert not caught.value.may_succeed


@pytest.mark.slow
def test_a_lost_cluster_ends_the_sweep(tmp_path, data, record, start_worker):  # noqa: F811
    scheduler, address = start_scheduler(tmp_path)
    for number in range(2):
        start_worker(address, f"worker-{number}", RECORD=str(record))
    config = ClusterConfig(kind="existing", scheduler_address=address, start_timeout=60)

    def react(run, event):
        if run.trial.number == 1 and isinstance(event, events.EpochFinished):
            scheduler.kill()

    slow = {"recipe_options.slow_until": [str(tmp_path / "never")], "learning_rate": [0.1, 0.01, 0.001], "epochs": [99]}
    with open_cluster(config, "test") as client, pytest.raises(ClusterError, match="the cluster was lost: "):
        sweep(models(slow), tmp_path / "checkpoints", data, client, Watch(react))
    scheduler.wait()


# --- What people see ----------------------------------------------------------------------------------------------


def made_up_runs(grid, num_models=0, **statuses):
    """Runs of eight epochs, each better than the one before; `statuses` by number, as in m2="failed"."""
    runs = []
    for model in build_trials("digits", {"epochs": 8}, grid, num_models):
        status = statuses.get(f"m{model.number}", FINISHED)
        num_epochs = {FINISHED: 8, FAILED: 0}.get(status, 3)
        epochs = [
            events.EpochFinished(
                epoch, 10 * epoch, 3 / epoch, (2 + 1 / model.number) / epoch, 1 - 0.2 / epoch, 0.1, 2.0, 9.0, 0.5
            )
            for epoch in range(1, num_epochs + 1)
        ]
        runs.append(TrialRun(model, "key", status, epochs, "ValueError: <b>bad</b>" if status == FAILED else ""))
    return runs


GRID = {"learning_rate": [0.001, 0.01], "global_batch_size": [32, 64, 128]}


def test_a_grid_is_drawn_in_a_facet_for_each_value_of_all_hyperparameters_but_one():
    meaning, over_epochs, over_time = sweep_panels(made_up_runs(GRID))
    assert meaning == "colored by global_batch_size"
    for panels in (over_epochs, over_time):
        assert [panel.title for panel in panels] == ["learning_rate 0.001", "learning_rate 0.01"]
    names = [panel.name for panel in over_epochs + over_time]
    assert len(set(names)) == 4


def test_models_that_differ_in_their_seed_alone_have_one_colour():
    meaning, panels, _ = sweep_panels(made_up_runs({"learning_rate": [0.1, 0.01], "seed": [0, 1, 2]}))
    assert (meaning, [panel.title for panel in panels]) == ("colored by learning_rate", ["By learning_rate"])


def test_a_random_search_is_drawn_in_one_facet_with_the_best_in_colour():
    meaning, panels, _ = sweep_panels(made_up_runs({"learning_rate": RANGE, "global_batch_size": [32, 64]}, 30))
    assert (meaning, [panel.title for panel in panels]) == (
        "the best models so far have colors and numbers",
        ["All models"],
    )
    assert sweep_panels(made_up_runs({"epochs": [8]}, m1=FAILED))[1:] == ([], [])


@pytest.mark.parametrize("grid", [GRID, {"optimizer": ["sgd", "adam"], "weight_decay": [0, 0.1]}])
def test_a_picture_of_the_csv_file_is_that_of_the_sweep(tmp_path, monkeypatch, grid):
    runs = made_up_runs(grid, m2=FAILED, m3=STOPPED_EARLY)
    build_table(runs).to_csv(tmp_path / "results.csv", index=False)
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "results.csv"), str(tmp_path / "picture.svg")])
    sweep_plots.main()
    _, over_epochs, over_time = sweep_panels(runs)
    (own := tmp_path / "own").mkdir()
    figures.save_panels([*over_epochs, *over_time], own / "picture.svg", columns=len(over_epochs))
    assert (tmp_path / "picture.svg").read_text() == (own / "picture.svg").read_text()


def test_a_column_of_several_types_can_be_stored(tmp_path):
    runs = made_up_runs({"learning_rate": [0.1, 0.01]})
    for run, value in zip(runs, ([1, 2], "deep"), strict=True):
        object.__setattr__(run.trial, "values", {"recipe_options.sizes": value})
    table = build_table(runs)
    table.to_parquet(tmp_path / "table.parquet")
    assert set(table["recipe_options.sizes"]) == {"[1, 2]", "deep"}


def report_of(runs, error=None, closed=True):
    made = SweepReport("digits", runs)
    if closed:
        made.close(error)
    return made


PAGES = {
    "nothing": lambda: report_of([], closed=False),
    "running": lambda: report_of(made_up_runs(GRID, m1=RUNNING, m2="waiting"), closed=False),
    "finished": lambda: report_of(made_up_runs(GRID, m2=FAILED, m3=STOPPED_EARLY)),
    "interrupted": lambda: report_of(made_up_runs(GRID, m2=INTERRUPTED), TrainingStopped("SIGTERM: the sweep")),
    "random": lambda: report_of(made_up_runs({"learning_rate": RANGE, "weight_decay": [0, 0.1]}, 300)),
}


@pytest.mark.parametrize("page", PAGES)
def test_the_report_opens_without_errors_on_any_screen(chromium, tmp_path, page):
    file = tmp_path / "report.html"
    file.write_text(PAGES[page]().render(), encoding="utf-8")
    assert file.stat().st_size < 2_000_000
    for width in (360, 1280):
        assert chromium.open(file, width=width, dark=width == 360) == []
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate("document.querySelector('.status').textContent") == {
        "nothing": "running",
        "running": "running",
        "interrupted": "interrupted",
    }.get(page, "finished")


def test_a_click_on_a_column_head_sorts_and_another_reverses(chromium, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(report_of(made_up_runs(GRID, m2=FAILED, m3=STOPPED_EARLY)).render(), encoding="utf-8")
    chromium.open(file)
    shown = "[...document.querySelectorAll('.trials tbody tr')].map(row => row.cells[0].textContent).join(' ')"
    click = "[...document.querySelectorAll('.trials button')].find(each => each.textContent === '{}').click()"
    assert chromium.evaluate(shown) == "1 2 3 4 5 6"
    assert chromium.evaluate("document.querySelector('.trials tr.best').cells[0].textContent") == "6"
    chromium.evaluate(click.format("test loss"))
    assert chromium.evaluate(shown) == "6 5 4 1 3 2"  # what has no loss comes last
    chromium.evaluate(click.format("test loss"))
    assert chromium.evaluate(shown) == "3 1 4 5 6 2"
    chromium.evaluate(click.format("status"))
    assert chromium.evaluate(shown).startswith("2 ")
    assert chromium.evaluate("document.querySelectorAll('.trials b').length") == 0  # an error is text, not markup
    assert "ValueError: <b>bad</b>" in chromium.evaluate("document.querySelector('.trials').textContent")


# --- The workflow -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return the workflow's outputs, its standard error, and how often it published the report."""
    from workflows.sweep import sweep_wf

    output = tmp_path_factory.mktemp("output") / "lines"
    published = []
    with pytest.MonkeyPatch.context() as patch, open(output, "w") as stderr:
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr("sys.stderr", stderr)
        patch.setattr(DeckPublisher, "_publish", lambda publisher: published.append(publisher))
        returned = sweep_wf(
            grid={"learning_rate": [0.0001, 0.01]},
            config=TrainingOverrides(epochs=2),
            cluster=ClusterInput(kind="local", node_timeout=30),
            checkpoints=str(tmp_path_factory.mktemp("checkpoints")),
        )
    return returned, output.read_text(), len(published)


def test_the_workflow_returns_the_table_and_the_best_model(outputs):
    returned, _, _ = outputs
    table = returned.results.open(pandas.DataFrame).all()
    assert list(table["model"]) == [1, 1, 2, 2]
    assert list(table["learning_rate"]) == [0.0001, 0.0001, 0.01, 0.01]
    of_csv = pandas.read_csv(returned.csv.path)
    assert list(of_csv) == list(table)
    assert of_csv["error"].isna().all()
    pandas.testing.assert_frame_equal(of_csv.drop(columns="error"), table.drop(columns="error"), check_dtype=False)
    best = table[table["model"] == 2]
    assert best["test_loss"].iloc[-1] < table["test_loss"][1]
    assert returned.best_accuracies == list(best["accuracy"])
    assert given(returned.best_config) == {"epochs": 2, "learning_rate": 0.01}
    get_recipe("digits").model().load_state_dict(torch.load(returned.best_model_state.path, weights_only=True))


def test_the_workflow_prints_one_line_per_model(outputs):
    _, output, _ = outputs
    for number, rate in ((1, "0.0001"), (2, "0.01")):
        assert f"trial {number}/2 (learning_rate {rate}) started" in output
        assert re.search(
            rf"trial {number}/2 \(learning_rate {rate}\) finished: test loss \d\.\d+, accuracy \d+", output
        )
    assert "the best is trial 2 (learning_rate 0.01)" in output


def test_the_workflows_report_has_the_models_and_their_curves(outputs, chromium, tmp_path):
    returned, _, _ = outputs
    page = Path(returned.report.path)
    assert chromium.open(page) == []
    assert chromium.evaluate("document.querySelectorAll('svg.panel').length") == 2
    assert chromium.evaluate("document.querySelectorAll('.trials tbody tr').length") == 2
    assert "learning_rate" in chromium.evaluate("document.querySelector('.lead').textContent")


def test_the_report_is_shown_while_the_models_train_and_at_the_end(outputs):
    _, _, num_published = outputs
    assert num_published == 2 * 2 + 1  # models, epochs


def test_the_models_are_one_group_in_wandb(outputs):
    returned, output, _ = outputs
    runs = [
        run for each in Path(returned.report.path).parent.glob("wandb/offline-run-*") for run in records_of(each, "run")
    ]
    assert len(runs) == 2
    assert len({run.run_group for run in runs}) == 1
    assert {run.display_name for run in runs} == {"trial 1 (learning_rate 0.0001)", "trial 2 (learning_rate 0.01)"}
    assert output.count("W&B: ") == 1
    assert f"likewise for all trials of group {runs[0].run_group}" in output
