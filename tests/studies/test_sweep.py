"""Sweeps: their trials, which of them stop early, the workers they share, their figures and their
report.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from flyte_ddp import events
from flyte_ddp.config import Monitor, TrainingConfig
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.flyte.inputs import ClusterInput, Grid, InputError, TrainingOverrides
from flyte_ddp.launch.nodes.dask import data
from flyte_ddp.launch.nodes.dask.assignment import Worker
from flyte_ddp.launch.nodes.dask.pool import Pool
from flyte_ddp.observers.reports.drawing import INK, PALETTE
from flyte_ddp.recipes.prepare import NOTE
from flyte_ddp.storage import Storage
from flyte_ddp.studies import runner
from flyte_ddp.studies.plots import metric_panels
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import (
    FAILED,
    FINISHED,
    STOPPED_EARLY,
    TrialRun,
    build_table,
    find_best,
)
from flyte_ddp.studies.search import NUM_RANDOM, Search, Trial, build_trials, expand_grid
from tasks.study import check_sweep
from tests.support.errors import raises_one_line

SWEPT = "tests.support.sweep_recipes.Swept"
RANGE = {"low": 0.0001, "high": 0.1, "log": True}
EPOCH = events.EpochFinished(1, 10, 3.0, 2.0, 0.1, 2.0, 9.0, 0.5)


def trials_of(recipe, base, grid, num_models=0, seed=0):
    return build_trials(recipe, base, expand_grid(grid, num_models, seed))


# --- The trials
# --------------------------------------------------------------------------------------------------


def test_a_grid_yields_every_combination_once():
    found = trials_of(
        "digits", {"epochs": 2}, {"learning_rate": [0.1, 0.01], "global_batch_size": [32, 64.0, 64]}
    )

    assert [model.values for model in found] == [
        {"learning_rate": rate, "global_batch_size": size}
        for rate in (0.1, 0.01)
        for size in (32, 64)
    ]
    assert [model.number for model in found] == [1, 2, 3, 4]
    assert [(model.config.learning_rate, model.config.epochs) for model in found[1:3]] == [
        (0.1, 2),
        (0.01, 2),
    ]
    assert found[1].overrides == {"epochs": 2, "learning_rate": 0.1, "global_batch_size": 64}
    assert type(found[1].overrides["global_batch_size"]) is int


def test_a_grid_may_vary_a_recipes_options_beside_those_that_all_models_share():
    found = trials_of(
        SWEPT, {"recipe_options": {"label": "x"}}, {"recipe_options.fault": ["none", "nan"]}
    )

    assert [model.config.recipe_options["fault"] for model in found] == ["none", "nan"]
    assert {model.config.recipe_options["label"] for model in found} == {"x"}
    assert found[1].overrides == {"recipe_options": {"label": "x", "fault": "nan"}}


def test_a_list_has_a_model_for_each_of_its_objects():
    grid = [{"learning_rate": 0.2}, {"global_batch_size": 64}, {"learning_rate": 0.2}]
    first, second = trials_of(SWEPT, {"epochs": 2}, grid)
    assert first.overrides == {"epochs": 2, "learning_rate": 0.2}
    # A field that only other trials vary has the value that all share.
    assert second.values["learning_rate"] == second.config.learning_rate != 0.2


@pytest.mark.long
def test_the_same_seed_draws_the_same_models_and_another_seed_others():
    grid = {
        "learning_rate": RANGE,
        "global_batch_size": {"low": 32, "high": 128, "step": 32},
        "optimizer": ["sgd", "adam"],
    }
    drawn = trials_of("digits", {}, grid, num_models=12, seed=3)
    again = trials_of("digits", {}, dict(reversed(grid.items())), num_models=12, seed=3)
    others = trials_of("digits", {}, grid, num_models=12, seed=4)

    assert [model.config for model in drawn] == [model.config for model in again]
    assert [model.config for model in drawn] != [model.config for model in others]
    assert all(0.0001 <= model.config.learning_rate <= 0.1 for model in drawn)
    assert {model.config.global_batch_size for model in drawn} == {32, 64, 96, 128}
    assert {model.config.optimizer for model in drawn} == {"sgd", "adam"}
    # Logarithmic: half of the draws are in the lower half of the decades.
    assert 2 <= sum(model.config.learning_rate < 0.00316 for model in drawn) <= 10
    few = {"optimizer": ["sgd", "adam"], "epochs": {"low": 1, "high": 2}}
    assert len(trials_of("digits", {}, few, num_models=50)) == 4


@pytest.mark.parametrize(
    ("grid", "num_models", "expected"),
    [
        ({}, 0, "grid: expected a JSON object such as .*, got {}"),
        ({"lr": [0.1]}, 0, "grid: expected a known field .*learning_rate.*, got 'lr'"),
        ({"learning_rate": []}, 0, r"grid.learning_rate: expected a list of choices.*, got \[\]"),
        ({"learning_rate": 0.1}, 0, "grid.learning_rate: expected a list of choices.*, got 0.1"),
        (
            {"learning_rate": RANGE},
            0,
            "grid.learning_rate: expected a list of choices, or with num_models a range .*, got ",
        ),
        (
            {"learning_rate": {"low": 0, "high": 1, "log": True}},
            3,
            "grid.learning_rate: expected a range .*low > 0",
        ),
        ({"learning_rate": {"low": 0, "hi": 1}}, 3, "grid.learning_rate: expected a range .*'hi'"),
        (
            {"learning_rate": {"low": 0, "high": "1"}},
            3,
            "grid.learning_rate.high: expected a finite number, got '1'",
        ),
        (
            {"epochs": {"low": 1, "high": 2.5}},
            3,
            (
                "grid.epochs.high: expected a number|grid.epochs.high: expected a whole number, "
                "got "
                "2.5"
            ),
        ),
        (
            {"optimizer": {"low": 1, "high": 2}},
            3,
            "optimizer: expected one of sgd, adam, adamw, own, got [12]",
        ),
        (
            {"seed": list(range(40)), "epochs": list(range(1, 41))},
            0,
            "grid: expected at most 1,000 models, got 1,600; num_models",
        ),
        ([], 0, r"grid: expected a JSON object such as .*, or a list such as .*, got \[\]"),
        ([{"epochs": 1}, {}], 0, r"grid: expected a JSON object such as .*, got "),
        ([{"world_size": 2}], 0, "grid: expected one of the fields epochs, .*, got 'world_size'"),
        ([{"epochs": 1}], 3, "num_models: expected 0 with a list of models, got 3"),
        ([{"epochs": 1}] * 1001, 0, "grid: expected at most 1,000 models, got 1,001"),
        (
            {"epochs": [1]},
            -1,
            "num_models: expected a whole number of at least 0 and of at most 1000, got -1",
        ),
        (
            {"learning_rate": [0.1, -1]},
            0,
            "learning_rate: expected a finite number above 0, got -1",
        ),
        (
            {"recipe_options.size": [1]},
            0,
            "recipe_options: expected no options for recipe 'digits', got 'size'",
        ),
        ({"global_batch_size": [64, 33]}, 0, "global_batch_size: expected a multiple of 2, got 33"),
    ],
)
def test_a_bad_grid_is_refused_in_one_line_before_anything_starts(grid, num_models, expected):
    cluster = ClusterInput(kind="existing", processes_per_node=2)
    with raises_one_line(InputError, match=expected):
        check_sweep.task_function(
            "digits", TrainingOverrides(), grid, num_models, 0, "random", "none", cluster
        )


def test_an_unknown_rule_or_sampler_is_refused():
    with pytest.raises(ConfigError, match="stop_early: expected one of none, .*, got 'soon'"):
        Search("soon")
    with pytest.raises(ConfigError, match="sampler: expected one of random, tpe, got 'grid'"):
        Search(sampler="grid")


@pytest.mark.parametrize("grid", [{"epochs": [1, 2]}, [{"learning_rate": 0.1, "seed": 3}], "nope"])
def test_a_grid_reaches_its_task_as_it_was_given_or_is_refused(grid):
    context, kind = FlyteContextManager.current_context(), TypeEngine.to_literal_type(Grid)
    if grid == "nope":
        with pytest.raises(InputError, match="^grid.*: expected an? .*object such as .*nope"):
            TypeEngine.to_literal(context, grid, Grid, kind)
    else:
        literal = TypeEngine.to_literal(context, grid, Grid, kind)
        assert TypeEngine.to_python_value(context, literal, Grid) == grid


# --- Stopping early
# --------------------------------------------------------------------------------------------------


def numbered(number, **values):
    return Trial(number, values, values, TrainingConfig())


def stopped_after(rule, *losses):
    """The number of epochs after which each model, trained one after the other, is stopped; 0 for
    one that is not.
    """
    rule = Search(rule)
    ends = []
    for number, own in enumerate(losses):
        rule.start(numbered(number))
        end = next(
            (
                epoch
                for epoch, loss in enumerate(own, start=1)
                if rule.should_stop(number, epoch, loss)
            ),
            0,
        )
        rule.finish(number, "PRUNED" if end else "COMPLETE", own[-1])
        ends.append(end)
    return ends


def test_a_model_worse_than_the_median_of_those_before_is_stopped():
    good, fair, bad = [4, 3, 2, 1], [5, 4, 3, 2], [9, 8, 7, 6]
    assert stopped_after("median", bad, good, fair, fair, bad, good) == [0, 0, 0, 0, 2, 0]


@pytest.mark.parametrize("diverged", [math.nan, math.inf, -math.inf])
def test_a_model_that_has_diverged_is_stopped_and_spoils_no_median(diverged):
    good, bad, lost = [4, 3, 2, 1], [9, 8, 7, 6], [diverged] * 4
    # The best score of this trial is worse than the third score of the others.
    late = [4, 3, diverged, diverged]
    assert stopped_after("median", good, lost, bad, lost, late, good) == [0, 0, 2, 2, 3, 0]
    assert stopped_after("median", lost, lost, bad) == [0, 0, 0]  # the best so far


def test_halving_keeps_the_better_half_at_epochs_1_2_4():
    losses = [
        [4, 4, 4, 4, 4],
        [3, 3, 3, 3, 3],
        [9, 9, 9, 9, 9],
        [2, 3.5, 9, 9, 9],
        [1, 1, 1, 3.5, 1],
    ]
    assert stopped_after("halving", *losses) == [0, 0, 1, 2, 4]


def test_without_a_rule_no_trial_is_stopped_and_a_loss_counts_once(recwarn):
    assert stopped_after("none", [1, 1], [9, math.nan]) == [0, 0]
    rule = Search("halving")
    for number in (1, 2):
        rule.start(numbered(number))
    assert not rule.should_stop(1, 0.5, 1.0)  # an evaluation within an epoch counts
    assert rule.should_stop(2, 0.5, 2.0)
    assert not rule.should_stop(2, 0.5, 2.0)  # a run that has restarted reports its epochs again
    assert [str(warning.message) for warning in recwarn] == []


# --- Suggestions
# --------------------------------------------------------------------------------------------------


def suggestions_of(seed, num_models, score=lambda values: abs(values["momentum"] - 0.3)):
    """What TPE suggests, each told before the next, after models that are drawn."""
    grid = {"momentum": {"low": 0.0, "high": 0.9}, "optimizer": ["sgd", "adam"]}
    search, found = Search("none", "tpe", grid, seed), []
    for drawn in trials_of("digits", {}, grid, num_models, seed):
        trial = search.start(drawn, lambda values, number=drawn.number: numbered(number, **values))
        search.finish(trial.number, "COMPLETE", score(trial.values))
        found.append(dict(trial.values))
    return found


@pytest.mark.long
def test_after_random_models_tpe_suggests_those_that_results_speak_for():
    found = suggestions_of(3, 25)
    assert found[: NUM_RANDOM + 2] == suggestions_of(3, NUM_RANDOM + 2)
    distance = [abs(values["momentum"] - 0.3) for values in found]
    assert statistics.median(distance[NUM_RANDOM:]) < statistics.median(distance[:NUM_RANDOM])
    assert found != suggestions_of(3, NUM_RANDOM + 5, lambda values: -values["momentum"])


def test_a_suggestion_of_no_use_leaves_the_model_that_was_drawn():
    search = Search("none", "tpe", {"momentum": [0.1, 0.2]})
    first = numbered(NUM_RANDOM + 1, momentum=0.1)
    assert search.start(first, lambda values: None) is first


def test_a_sweep_that_resumes_has_the_suggested_trials_of_before(tmp_path, monkeypatch):
    """What an attempt has suggested is trained on, or told to the study, and not suggested anew."""
    grid = {"momentum": {"low": 0.0, "high": 0.9}}
    trials = trials_of("digits", {}, grid, NUM_RANDOM + 4)
    (data := tmp_path / "data").mkdir()
    monkeypatch.setattr(
        runner, "describe_data", lambda path: {"fingerprint": "f", "recipe_version": "v"}
    )
    trained = []

    def train(self, run, stop):
        trained.append((run.trial.number, run.url))
        if len(trained) == NUM_RANDOM + 2:
            self._stop_all("SIGTERM")
            raise TrainingStopped("SIGTERM", "SIGTERM")
        run.state.epochs = [
            dataclasses.replace(EPOCH, test_loss=abs(run.trial.values["momentum"] - 0.3))
        ]
        run.handle(events.RunFinished(10, 1.0))
        run._history.insert(0, events.to_line(run.epochs[0]))

    monkeypatch.setattr(runner.TrialRunner, "_train", train)
    cluster = ClusterInput(kind="local", num_nodes=1)

    def sweep():
        search = Search("none", "tpe", grid)
        return runner.TrialRunner(str(tmp_path / "c"), str(data), None, cluster, search=search)

    with pytest.raises(TrainingStopped, match="11 of 14 trials done"):
        sweep().train(trials)
    before, trained[:] = list(trained), [(0, "")] * 100
    runs = sweep().train(trials)
    again = trained[100:]
    assert [number for number, _ in again] == [12, 13, 14]
    assert again[0] == before[-1]
    assert [run.url for run in runs[:12]] == [url for _, url in before]
    assert len({run.url for run in runs}) == 14
    assert runs[11].trial.values != trials[11].values


# --- The workers
# --------------------------------------------------------------------------------------------------


def worker(name, host="10.0.0.1", gpus=(), is_busy=False):
    return Worker(f"tcp://{host}:1{name}", name, host, 8, gpus, False, is_busy)


def test_a_worker_belongs_to_one_run_at_a_time(tmp_path):
    pool = Pool(None)
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
    pool = Pool(None)
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


def test_a_run_of_several_nodes_claims_all_of_them_or_none():
    pool = Pool(None)
    workers = [worker(str(number), gpus=("0", "1")) for number in range(2)]
    workers.append(worker("2", "10.0.0.2"))

    assert pool.claim("a", workers, 1, num_nodes=4) == []
    assert not pool.is_in_use()
    claim = pool.claim("b", workers, 1, num_nodes=2)
    # The gang splits the cores of one host.
    assert [(each.gpus, each.num_cores) for each in claim] == [(("0",), 8), (("1",), 8)]
    assert pool.claim("c", workers, 0, num_nodes=2) == []
    assert [each.name for each in pool.claim("c", workers, 0)] == ["2"]


def test_the_copy_of_the_data_is_shared_by_all_runs_and_removed_at_the_end(tmp_path, monkeypatch):
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / NOTE).write_text(json.dumps({"fingerprint": "1"}))
    monkeypatch.setattr(data, "call_workers", lambda client, *arguments: {"w": False})
    (tmp_path / "store").mkdir()
    shared = data.SharedData(Storage(str(tmp_path / "store")))
    with ThreadPoolExecutor() as threads:
        node = SimpleNamespace(address="w", has_plugin=False)
        locate = lambda run: shared.locate(None, str(tmp_path / "prepared"), [node])  # noqa: E731
        assert list(threads.map(locate, range(3))) == [set()] * 3
    assert [file.name for file in (tmp_path / "store").iterdir()] == ["data-1.zip"]
    shared.close()
    assert not list((tmp_path / "store").iterdir())


# --- Figures and report
# --------------------------------------------------------------------------------------------------


def made_up_runs(grid, num_models=0, **statuses):
    """Runs of eight epochs, each better than the one before; `statuses` by number, as in
    m2="failed".
    """
    runs = []
    for model in trials_of("digits", {"epochs": 8}, grid, num_models):
        status = statuses.get(f"m{model.number}", FINISHED)
        num_epochs = {FINISHED: 8, FAILED: 0}.get(status, 3)
        state = events.RunState(keep_reports=False)
        state.epochs = [
            events.EpochFinished(
                *(epoch, 10 * epoch, 3 / epoch, (2 + 1 / model.number) / epoch, 0.1, 2.0, 9.0, 0.5),
                metrics={"accuracy": 1 - 0.2 / epoch},
            )
            for epoch in range(1, num_epochs + 1)
        ]
        runs.append(
            TrialRun(
                model, "key", status, state, "ValueError: <b>bad</b>" if status == FAILED else ""
            )
        )
    return runs


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_figure_that_is_not_finite_is_never_the_best(value, mode):
    monitor = Monitor("figure", mode)
    assert monitor.score({"figure": value}) == math.inf > monitor.score({"figure": 1e300})
    runs = made_up_runs({"learning_rate": [0.1, 0.01]})
    for run in runs:
        config = dataclasses.replace(run.trial.config, monitor=monitor)
        run.trial = dataclasses.replace(run.trial, config=config)
        for epoch in run.epochs:
            epoch.metrics["figure"] = value
    runs[0].epochs[2].metrics["figure"] = 5.0
    assert (find_best(runs), runs[0].kept.epoch) == (runs[0], 3)
    assert events.find_best(runs[0].epochs, monitor).epoch == 3
    assert Monitor().score({"loss": 1.0}) == math.inf  # The metric is missing.


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("test_loss", "min"),
        ("loss", "min"),
        ("y", "min"),
        ("mae", "min"),
        ("recall_loss", "min"),
        ("seconds_per_step", "min"),
        ("accuracy", "max"),
        ("val_acc", "max"),
        ("valAccuracy", "max"),
        ("val/f1-macro", "max"),
        ("recall@5", "max"),
        ("samples_per_second", "max"),
        ("mIoU", "max"),
    ],
)
def test_the_name_of_a_figure_decides_whether_a_higher_one_is_better(metric, mode):
    assert Monitor(metric).mode == mode
    assert Monitor(metric, "min").mode == "min"


GRID = {"learning_rate": [0.001, 0.01], "global_batch_size": [32, 64, 128]}


def axes_of(panel):
    axes = Figure(layout="constrained").add_subplot()
    panel.draw_on(axes)
    axes.figure.draw_without_rendering()
    return axes


@pytest.mark.long
def test_the_best_of_many_trials_have_colors_and_the_rest_are_faint():
    grid = {"learning_rate": RANGE, "optimizer": ["sgd", "adam"], "global_batch_size": [32]}
    title, meaning, panels = metric_panels(made_up_runs(grid, 30))
    assert title == "Test loss"
    named = re.findall(r"trial (\d+) \(", meaning)
    assert named == ["30", "29", "28", "27", "26", "25", "24", "23"]
    titles = ["Test loss", "Test loss over time", "By learning_rate", "By optimizer"]
    assert [panel.title for panel in panels] == titles
    assert {panel.figure for panel in panels} == {"test_loss"}  # formats the values
    over_epochs, over_time, by_rate, by_optimizer = map(axes_of, panels)
    # 2.5 seconds of training and evaluation for each epoch
    assert list(over_time.lines[0].get_xdata()) == [2.5 * epoch for epoch in range(1, 9)]
    assert list(over_time.lines[0].get_ydata()) == list(over_epochs.lines[0].get_ydata())
    assert len(over_epochs.lines) == 30
    legend = over_epochs.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == named
    assert legend.get_window_extent().x1 <= over_epochs.figure.bbox.x1
    assert (by_rate.get_xscale(), by_optimizer.get_xscale()) == ("log", "linear")
    assert [label.get_text() for label in by_optimizer.get_xticklabels()] == ["adam", "sgd"]
    for axes in (by_rate, by_optimizer):
        colors = [to_hex(line.get_color()) for line in axes.lines]
        assert len(colors) == 30
        assert set(PALETTE) < set(colors) <= {*PALETTE, INK}


@pytest.mark.parametrize(
    ("rates", "scale"), [([0.001, 0.01], "log"), ([0.03, 0.3], "log"), ([0.1, 0.5], "linear")]
)
def test_a_grid_of_decades_has_a_logarithmic_axis(rates, scale):
    *_, by_rate = metric_panels(made_up_runs({"learning_rate": rates}))[2]
    assert axes_of(by_rate).get_xscale() == scale


def test_a_trial_with_a_long_value_has_a_short_name():
    (run,) = made_up_runs({"learning_rate": [0.1]})
    trial = dataclasses.replace(run.trial, values={"prompt": "a\n" * 350_000, "rate": 0.1})
    assert str(trial) == f"trial 1 (prompt {'a ' * 29}a…, rate 0.1)"


def test_a_column_of_several_types_can_be_stored(tmp_path):
    runs = made_up_runs({"learning_rate": [0.1, 0.01]})
    for run, value in zip(runs, ([1, 2], "deep"), strict=True):
        object.__setattr__(run.trial, "values", {"recipe_options.sizes": value})
    table = build_table(runs)
    table.to_parquet(tmp_path / "table.parquet")
    assert set(table["recipe_options.sizes"]) == {"[1, 2]", "deep"}


@pytest.mark.long
def test_a_click_on_a_column_head_sorts_and_another_reverses(chromium, tmp_path):
    file = tmp_path / "report.html"
    made = StudyReport("digits", made_up_runs(GRID, m2=FAILED, m3=STOPPED_EARLY))
    made.close(None)
    made.write(file)
    shown = (
        "[...document.querySelectorAll('.table tbody tr')].map(row => "
        "row.cells[0].textContent).join(' ')"
    )
    click = (
        "[...document.querySelectorAll('.table button')].find(each => each.textContent === "
        f"'{{}}').click() || {shown}"
    )
    by_loss, by_status = click.format("test loss"), click.format("status")
    width, best, rows, *clicks, table = chromium(
        file,
        "document.documentElement.scrollWidth",
        "document.querySelector('.table tr.best').cells[0].textContent",
        *(shown, by_loss, by_loss, by_status),
        "document.querySelector('.table').textContent",
        width=360,
        dark=True,
    )
    assert (width <= 360, best, rows) == (True, "6", "1 2 3 4 5 6")
    # Trials without a loss come last.
    assert clicks[:2] == ["6 5 4 1 3 2", "3 1 4 5 6 2"]
    assert clicks[2].startswith("2 ")
    assert "ValueError: <b>bad</b>" in table  # text, not markup
