"""Sweeps over the arguments of a function, on a Dask cluster of two nodes."""

from __future__ import annotations

import functools
import html
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

import flyte_ddp
from flyte_ddp.config import Monitor
from flyte_ddp.errors import ConfigError, SweepFailed, TrainingStopped
from flyte_ddp.studies import sweep
from flyte_ddp.studies.results import FAILED, FINISHED, STOPPED_EARLY
from tests.support.errors import raises_one_line
from tests.support.swept_functions import (
    add_up,
    count_ranks,
    count_to_four,
    describe,
    find_torch,
    leave,
    meet,
    misbehave,
    report_apart,
    train,
)

EXPERIMENTS = [(32, 0.001), (32, 0.1), (64, 0.001), (64, 0.1)]


@pytest.fixture(scope="module")
def client():
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def fresh_trials(monkeypatch):
    """Start trials as from a caller without torch: most of these functions need no torch, and a
    server that imports it takes seconds on each node.
    """
    monkeypatch.setattr(sweep, "sys", SimpleNamespace(modules={}))


@pytest.mark.long
def test_a_plain_function_is_swept_on_two_nodes_and_not_run_again(client, tmp_path, capfd):
    place = str(tmp_path / "checkpoints")
    swept = flyte_ddp.sweep(train, EXPERIMENTS, client=client, checkpoints=place)

    assert [run.status for run in swept.trials] == [FINISHED] * 4
    assert [run.trial.values for run in swept.trials] == [
        {"experiment": experiment} for experiment in EXPERIMENTS
    ]
    assert list(swept.table["epoch"]) == [0, 1, 2] * 4
    assert swept.best.trial.values == {"experiment": (32, 0.1)}
    assert swept.best.kept.values["loss"] == swept.table["loss"].min()
    assert swept.best.kept.epoch == 2
    swept.plot(tmp_path / "sweep.svg")
    assert "By experiment" in (tmp_path / "sweep.svg").read_text()
    assert swept._repr_html_().count("<svg") == 2
    assert "trial 2 (experiment [32, 0.1]) is best, loss " in repr(swept)
    assert len(re.findall(r"trial \d/4 .* started", capfd.readouterr().err)) == 4

    again = flyte_ddp.sweep(train, EXPERIMENTS, client=client, checkpoints=place)
    assert again.table.equals(swept.table)
    assert "started" not in capfd.readouterr().err


@pytest.mark.long
def test_each_trial_runs_at_each_world_size_for_a_scaling_study(client):
    swept = flyte_ddp.sweep(count_ranks, [3], world_sizes=[1, 2], mode="max", client=client)
    results = [(run.trial.values, run.kept.values["loss"]) for run in swept.trials]
    assert results == [
        ({"world_size": 2, "factor": 3}, 6.0),
        ({"world_size": 1, "factor": 3}, 3.0),
    ]
    assert swept.best is swept.trials[0]
    assert "By world_size" in swept._repr_html_()
    with pytest.raises(ConfigError, match="expected at most 2, the nodes of the cluster, got 3"):
        flyte_ddp.sweep(count_ranks, [3], world_sizes=[1, 3], client=client)


@pytest.mark.long
def test_trials_run_on_all_workers_of_a_client_at_once(client, tmp_path):
    grid = {"number": [1, 2], "directory": [str(tmp_path)]}
    swept = flyte_ddp.sweep(meet, grid, client=client)
    assert [run.status for run in swept.trials] == [FINISHED] * 2


@pytest.mark.long
def test_trials_are_compared_by_reports_and_fail_and_stop_alone(client, tmp_path):
    kinds = ["good", "raise", "silent", "fine"]
    grid = [{"kind": kind, "directory": str(tmp_path)} for kind in kinds]
    swept = flyte_ddp.sweep(misbehave, grid, client=client, checkpoints=str(tmp_path / "c"))
    assert [run.status for run in swept.trials] == [FINISHED, FAILED, FAILED, FINISHED]
    assert swept.trials[1].error == "ValueError: broken on purpose"
    assert swept.trials[2].error == (
        "ConfigError: metric: expected a figure that the function reports or returns, accuracy, "
        "got 'loss'"
    )
    assert list(swept.table["loss"].dropna()) == [1, 1 / 2, 1 / 3] * 2
    grid = [*grid[:1], *grid[3:], {"kind": "bad", "directory": str(tmp_path)}]
    for _ in range(2):  # the second time nothing is called
        swept = flyte_ddp.sweep(
            misbehave, grid, stop_early="median", client=client, checkpoints=str(tmp_path / "c")
        )
        assert [run.status for run in swept.trials] == [FINISHED, FINISHED, STOPPED_EARLY]
        assert len(swept.trials[2].results) < 600
    called = sorted(file.name.partition("-")[0] for file in tmp_path.iterdir() if file.is_file())
    assert called == sorted([*kinds, "bad"])


@pytest.mark.long
@pytest.mark.parametrize("is_kept", [False, True])
def test_page_lines_and_table_of_a_sweep_name_a_trial_and_its_figures_alike(
    is_kept, client, tmp_path, capfd
):
    place = str(tmp_path / "the place") if is_kept else None
    swept = flyte_ddp.sweep(
        report_apart, {"lr": [0.5, 0.25, 10]}, metric="test_loss", client=client, checkpoints=place
    )
    lines = "".join(capfd.readouterr())
    page = html.unescape(swept._repr_html_())
    rows = re.findall(r"<tr[^>]*>(<td.*?)</tr>", page, re.S)
    on_page = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in rows]
    heads = re.findall(r'<th scope="col"><button type="button">(.*?)</button>', page)
    shown = [dict(zip(heads, cells, strict=True)) for cells in on_page if len(cells) == len(heads)]
    for number, lr, best in ((1, "0.5", "0.5"), (2, "0.25", "0.25")):
        assert f"trial {number}/3 (lr {lr}) started" in lines
        end = (
            f"trial {number}/3 (lr {lr}) finished, after step 6, best at step 4: test loss {best},"
        )
        assert end in lines
        assert f"trial {number} (lr {lr})" in page
        assert shown[number - 1]["trial"] == str(number)
        # with the newest of the other figure until then
        figures = [shown[number - 1][name] for name in ("lr", "test loss", "train loss")]
        assert figures == [lr, best, "0.5"]
        of_trial = swept.table[swept.table["trial"] == number]
        assert set(of_trial["lr"]) == {float(lr)}
        assert of_trial["test_loss"].min() == float(best)
    assert "trial 3/3 (lr 10) failed: ValueError: diverges with 10" in lines
    assert "trial 3 (lr 10)" in page
    assert repr(swept).startswith("<Swept report_apart: trial 2 (lr 0.25) is best, test loss 0.25,")
    # the caller's files, and none of a machine's that are gone after the sweep
    paths = set(re.findall(r"/(?:tmp|work|home|root)/[^\s\"<,:)]+", f"{lines} {page}"))
    assert {path for path in paths if not Path(path).exists()} == set()


@pytest.mark.long
def test_a_trial_may_take_several_nodes_and_return_a_number(client):
    swept = flyte_ddp.sweep(functools.partial(count_ranks, shift=1), [2], nnodes=2, client=client)
    assert swept.best.kept.values == {"loss": 5}
    assert "Sweep of count_ranks" in swept._repr_html_()


@pytest.mark.long
def test_a_sweep_that_was_stopped_goes_on_in_the_middle_of_a_trial(client, tmp_path):
    def count():
        return flyte_ddp.sweep(
            count_to_four, [os.getpid()], client=client, checkpoints=str(tmp_path / "c")
        )

    with pytest.raises(TrainingStopped, match="0 of 1 trials done. To resume, start the same"):
        count()
    swept = count()
    assert list(swept.table["step"]) == [1, 2, 3, 4]
    assert swept.best.kept.step == 1  # reported by the first sweep


@pytest.mark.parametrize(
    ("grid", "options", "expected"),
    [
        ([], {}, r"grid: expected a list of arguments, or by keyword a list .*, got \[\]"),
        ("lr", {}, "grid: expected a list of arguments, or by keyword a list .*, got 'lr'"),
        ({"factor": 0.1}, {}, "grid.factor: expected a list of choices.*, got 0.1"),
        ([1], {"mode": "least"}, "mode: expected one of auto, min, max, got 'least'"),
        ([1], {"nnodes": 0}, "nnodes: expected a whole number of at least 1, got 0"),
        (
            [1],
            {"nnodes": 3, "cluster": {"num_nodes": 2}},
            "nnodes: expected at most 2, the nodes of the cluster, got 3",
        ),
        ([1], {"num_trials": 2}, "num_trials: expected 0 with a list"),
    ],
)
def test_bad_input_of_a_sweep_is_one_line_before_anything_starts(grid, options, expected):
    with raises_one_line(ConfigError, match=f"^{expected}"):
        flyte_ddp.sweep(count_ranks, grid, **options)


def test_a_sweep_in_which_all_trials_fail_raises_with_their_errors(client, tmp_path):
    grid = [{"kind": "raise", "directory": str(tmp_path)}]
    with pytest.raises(SweepFailed) as caught:
        flyte_ddp.sweep(misbehave, grid, client=client)
    first, trial = str(caught.value).splitlines()
    assert first == "none of the 1 trials finished"
    assert re.fullmatch(r"trial 1 .kind raise.*: ValueError: broken on purpose", trial)
    assert not caught.value.may_succeed


@pytest.mark.long
def test_a_trial_that_ends_its_process_fails_and_costs_no_other(client):
    swept = flyte_ddp.sweep(leave, [1, 2, 3], client=client)
    assert [run.status for run in swept.trials] == [FINISHED, FAILED, FINISHED]
    assert swept.trials[1].error == (
        "ConfigError: function: expected one that returns or raises, got one that ended its "
        "process with exit code 0"
    )
    assert swept.best.trial.values == {"x": 1}


@pytest.mark.long
def test_a_figure_that_is_not_finite_is_never_the_best_of_a_sweep(client):
    values = [numpy.empty(0), numpy.ones(2)]
    swept = flyte_ddp.sweep(add_up, {"values": values}, client=client)
    assert swept.best is swept.trials[1]
    swept._repr_html_()
    with pytest.raises(SweepFailed) as caught:
        flyte_ddp.sweep(add_up, {"values": values[:1]}, client=client)
    assert str(caught.value) == (
        "loss: expected a finite number from a trial that finished, got none\n"
        'trial 1 (values "array([], dtype=float64)"): loss nan'
    )
    assert not caught.value.may_succeed


@pytest.mark.long
def test_a_trial_starts_from_a_process_that_has_torch_where_the_caller_has_it(client, monkeypatch):
    monkeypatch.setattr(sweep, "sys", sys)
    (run,) = flyte_ddp.sweep(find_torch, [1], client=client).trials
    assert run.kept.values["loss"] == 0
    # The workers' number of threads; this process's variable limits it.
    assert run.kept.values["threads"] == 1
    (trial,) = sweep.build_trials(find_torch, [1], 0, Monitor("loss"), [1])
    assert trial.program().slow_imports == ("torch",)
    monkeypatch.delitem(sys.modules, "torch")
    assert trial.program().slow_imports == ()


@pytest.mark.long
def test_the_table_has_texts_and_whole_numbers_as_they_were_returned(client, tmp_path):
    place = str(tmp_path / "c")
    for _ in range(2):  # the second time from what is stored
        swept = flyte_ddp.sweep(describe, [1, 2], client=client, checkpoints=place)
        table = swept.table
        assert [str(table[name].dtype) for name in ("loss", "count")] == ["float64", "Int64"]
        columns = {name: list(table[name]) for name in ("count", "device", "sizes", "mixed")}
        assert columns == {
            "count": [1, 2],
            "device": ["cpu", "cpu"],
            "sizes": ["[1, 2]", "[1, 2]"],
            "mixed": ["-", "2"],
        }


@pytest.mark.long
def test_the_most_accurate_trial_is_the_best_without_a_mode(client):
    swept = flyte_ddp.sweep(count_ranks, [1, 3], metric="accuracy", client=client)
    assert swept.best.trial.values == {"factor": 3}
    least = flyte_ddp.sweep(count_ranks, [1, 3], metric="accuracy", mode="min", client=client)
    assert least.best.trial.values == {"factor": 1}


def test_arrays_and_other_sequences_are_lists_of_choices():
    rates = numpy.logspace(-2, -1, 2)
    for grid in ({"shift": rates}, {"shift": tuple(rates)}):
        found = sweep.build_trials(count_ranks, grid, 0, Monitor("loss"), [1])
        assert [dict(trial.overrides) for trial in found] == [{"shift": 0.01}, {"shift": 0.1}]
    for items in (numpy.arange(2), range(2)):
        found = sweep.build_trials(count_ranks, items, 0, Monitor("loss"), [1])
        assert [dict(trial.overrides) for trial in found] == [{"factor": 0}, {"factor": 1}]


def test_trials_are_drawn_by_keyword_or_every_combination_without_duplicates():
    def trials(grid, num_trials=0):
        found = sweep.build_trials(count_ranks, grid, num_trials, Monitor("loss"), [1])
        return [dict(trial.overrides) for trial in found]

    every = [{"factor": 1, "shift": 0}, {"factor": 1, "shift": 5}]
    assert trials({"factor": [1, 1], "shift": [0, 5]}) == every
    assert trials([{"factor": 1}, 1, 2]) == [{"factor": 1}, {"factor": 2}]
    nested = [{"factor": {"a": 1, "b": [{"c": 2, "d": 3}]}, "shift": 0}]
    same = [{"shift": 0, "factor": {"b": [{"d": 3, "c": 2}], "a": 1}}]
    assert trials([*nested, *same]) == nested
    first, second = (
        sweep.build_trials(count_ranks, each, 0, Monitor("loss"), [1])[0].identity([])
        for each in (nested, same)
    )
    assert first == second
    drawn = trials({"factor": {"low": 0.1, "high": 0.2}}, 3)
    assert len(drawn) == 3
    assert all(0.1 <= each["factor"] <= 0.2 for each in drawn)
