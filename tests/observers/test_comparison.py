"""Runs that are compared: what differs, and whether the newest night is worse than the noise."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from benchmarks.histories import PROMISED, draw_histories, share_worse
from flyte_ddp.__main__ import main
from flyte_ddp.events import AttemptEnded, Reported, RunStarted, RunState, split_steps, to_line
from flyte_ddp.events.nights import find_end, judge_newest
from flyte_ddp.observers.reports.compared_run import find_changes, parse_run
from flyte_ddp.observers.reports.comparison import compare_runs
from flyte_ddp.observers.reports.run_card import run_card
from tests.support import sample_run
from tests.support.compared import make_card, make_history

JITTER = 0.1  # share of the variance, as measured on digits
STEADY = [0.41, 0.40, 0.42, 0.41, 0.43, 0.41, 0.40]
# A changed field of the run's start, and the names of the facts that differ.
PLANTED = [
    ({"config": {"learning_rate": 0.1}}, "config: learning_rate"),
    ({"config": {"global_batch_size": 256}}, "config: global_batch_size"),
    ({"config": {"seed": 7}}, "config: seed"),
    ({"config": {"precision": "bf16"}}, "config: precision"),
    ({"config": {"recipe_options": {"width": 3}}}, "config: recipe_options.width"),
    ({"config": {"initial_model_state": "s3://b/a.pt"}}, "config: initial_model_state"),
    ({"recipe_version": "b" * 64}, "origin: recipe_version"),
    ({"commit": "0123456789ab-dirty"}, "origin: commit"),
    ({"image": "registry/team:8"}, "origin: image"),
    ({"arguments": "--lr 0.2"}, "origin: arguments"),
    ({"named_arguments": {"width": 3}}, "config: width"),
    ({"name": "digits"}, "program"),
    ({"versions": {"torch": "2.16.0"}}, "versions: torch"),
    ({"versions": {"python": "3.13.1"}}, "versions: python"),
    ({"data": "MNIST, without the sevens"}, "data: description"),
    ({"data_fingerprint": "f" * 64}, "data: fingerprint"),
    ({"num_train_samples": 50_000}, "data: num_train_samples"),
    ({"num_test_samples": 9_999}, "data: num_test_samples"),
    ({"world_size": 3}, "ranks: world_sizes"),
    ({"num_nodes": 2}, "ranks: num_nodes"),
    ({"device": "NVIDIA H200"}, "ranks: device"),
]


def call(capsys, *arguments):
    """Return the exit status and the lines of a comparison."""
    status = main(["compare", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, [*captured.out.splitlines(), *captured.err.splitlines()]


@pytest.mark.parametrize("kind", ["history", "card"])
@pytest.mark.parametrize(("change", "expected"), PLANTED)
def test_a_change_is_named_and_nothing_else(change, expected, kind):
    make = {"history": lambda contents: contents, "card": make_card}[kind]
    one, other = (parse_run("", make(make_history(**given))) for given in ({}, change))
    assert list(find_changes(one, other)) == [expected]


def test_chance_makes_less_than_one_percent_of_a_thousand_histories_worse():
    shares = [share_worse(draw_histories(tail, 250, JITTER)) for tail in PROMISED]
    assert len(PROMISED) == 4
    assert sum(shares) / 4 < 0.01, shares


def test_most_shifts_of_three_deviations_are_found_within_three_nights():
    shares = [share_worse(draw_histories(tail, 50, JITTER, 3)) for tail in PROMISED]
    assert sum(shares) / 4 >= 18 / 20, shares


@pytest.mark.parametrize(
    ("newest", "num_newest", "is_worse"),
    [
        ([0.42], 1, False),
        ([0.58], 1, True),
        ([0.30], 1, False),  # better
        ([0.46, 0.47], 2, True),
        ([0.45, 0.45, 0.46], 3, True),
        ([0.58, 0.41], 1, False),  # the night before was worse, and this one is not
        ([math.inf], 1, True),
    ],
)
def test_the_newest_nights_are_worse_alone_or_together(newest, num_newest, is_worse):
    verdict = judge_newest([*STEADY, *newest])
    assert verdict.is_worse is is_worse
    if is_worse:
        assert verdict.num_newest == num_newest


def test_nights_without_noise_differ_by_more_than_rounding_and_few_nights_by_nothing():
    assert judge_newest(STEADY[:5]) is None
    assert judge_newest([0.4] * 9 + [0.41]).is_worse
    assert not judge_newest([0.4] * 9 + [0.4 + 1e-7]).is_worse
    assert not judge_newest([0.0] * 10).is_worse
    accuracies = [-0.95, -0.96, -0.95, -0.94, -0.95, -0.96, -0.95]
    assert judge_newest([*accuracies, -0.5]).is_worse
    assert not judge_newest([*accuracies, -0.97]).is_worse


def test_the_figure_of_a_night_is_the_median_of_its_last_third():
    assert find_end([9.0, 9.0, 9.0, 9.0, 0.5, 7.0, 0.4]) == 0.5
    assert find_end([0.3]) == 0.3
    assert math.isnan(find_end([]))
    assert math.isnan(find_end([0.5, 0.4, math.nan]))


def test_a_schedule_names_what_changed_beside_a_worse_night():
    runs = [
        parse_run(f"night {index}", make_history([loss], data_fingerprint=str(index)))
        for index, loss in enumerate(STEADY)
    ]
    change = {"config": {"learning_rate": 0.1}, "data_fingerprint": "new"}
    runs.append(parse_run("night 7", make_history([0.58], **change)))
    verdict, changed, usual = compare_runs(runs).list_notices()
    assert verdict.startswith("The newest night is worse than the noise of the 7 before: test_loss")
    assert changed == "Changed since night 6: config: learning_rate 0.002 → 0.1"
    assert usual == "Changed as before most runs: data: fingerprint"
    # Two nights that are worse together are compared with the last night before both.
    two = [parse_run(f"late {loss}", make_history([loss], **change)) for loss in (0.46, 0.47)]
    verdict, changed, _ = compare_runs([*runs[:-1], *two]).list_notices()
    assert "the 7 before" in verdict
    assert changed.startswith("Changed since night 6: ")


def test_a_night_without_the_figure_is_not_judged_by_it():
    runs = [parse_run(f"night {index}", make_history([loss])) for index, loss in enumerate(STEADY)]
    start = to_line(RunStarted("mnist", 2)).encode()
    notices = compare_runs([*runs, parse_run("night 7", start)], "test_loss").list_notices()
    assert notices[0] == "night 7: it has not finished; it has no steps to draw"
    assert notices[1].startswith("Too few runs to tell a worse one from noise: 6 are needed with")
    assert compare_runs([*runs[:2], parse_run("nan", make_history([math.nan])), *runs[2:]])
    notices = compare_runs([*runs, parse_run("nan", make_history([math.nan]))]).list_notices()
    assert "worse by inf standard errors" in notices[0]


def test_a_page_has_curves_over_each_other_what_differs_and_where_the_time_went(tmp_path, capsys):
    for name, change in (("a", {}), ("b", {"image": "registry/<b>:8"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "history.jsonl").write_bytes(make_history(**change))
    (tmp_path / "c.json").write_bytes(make_card(make_history([0.9, 0.8])))
    page = tmp_path / "page.html"
    places = tmp_path / "a", tmp_path / "b", tmp_path / "c.json"
    status, lines = call(capsys, *places, "--page", page)
    assert (status, lines[-1]) == (0, f"page: {page}")
    text = page.read_text()
    assert text.count("of the runs over epochs") == 5  # three losses and metrics, and two speeds
    for name in ("a", "b", "c.json"):
        assert f"{name}: 2 at epoch 1" in text
        assert f">{name}</button>" in text
    assert "registry/&lt;b&gt;:8" in text
    assert "registry/<b>:8" not in text
    for row in ("origin: image", "stepping", "steps: data", "steps: exchange"):
        assert f">{row}</td>" in text


def test_of_many_runs_only_the_newest_has_a_color():
    runs = [
        parse_run(f"/nights/{index}", make_history([loss])) for index, loss in enumerate(STEADY)
    ]
    panel = next(iter(compare_runs(runs).list_panels()))
    assert panel.subtitle == "in color: 6"
    assert [line.name for line in panel.lines] == ["0", "1", "2", "3", "4", "5", "6"]
    assert len({line.color for line in panel.lines[:6]} - {panel.lines[6].color}) == 1
    panel = next(iter(compare_runs(runs[:4]).list_panels()))
    assert len({line.color for line in panel.lines}) == 4


def test_what_cannot_be_compared_is_one_line_each(tmp_path, capsys):
    good, page = make_history(), tmp_path / "page.html"
    start = to_line(RunStarted("f", 1))
    ended = to_line(AttemptEnded(3, "rank 0 failed: ValueError: bad\nmore", 0.0))
    reported = to_line(Reported(1, None, {"reward": 3.0}))
    files = {
        "good": good,
        "other": make_history([0.5]),
        "newer": good + b'{"time": 1, "event": "Later", "x": 1}\n',
        "failed": (start + reported + ended).encode(),
        "no-steps": start.encode(),
        "no-start": ended.encode(),
        "text": b"text",
    }
    for name, contents in files.items():
        (tmp_path / f"{name}.jsonl").write_bytes(contents)
    places = [*(tmp_path / f"{name}.jsonl" for name in files), tmp_path / "nowhere"]
    status, lines = call(capsys, *places, "--page", page)
    assert status == 0
    for line, name, expected in (
        (0, "newer", "line 7: expected an event of a run, got"),
        (1, "no-start", "expected a run whose ranks have started; it is left out"),
        (2, "text", "expected a history or a run card of this version; it is left out"),
        (3, "nowhere", "or a champion with nights/; it is left out"),
        (4, "failed", "has not finished; its ranks ended: rank 0 failed: ValueError: bad"),
        (5, "no-steps", "it has not finished; it has no steps to draw"),
        (6, "", "Too few runs to tell a worse one from noise: 6 are needed with test_loss"),
    ):
        assert name in lines[line]
        assert expected in lines[line]
    assert re.match("Changed since .*failed", lines[7])
    assert len(lines) == 9


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["HERE/good.jsonl"], "RUN: expected two runs or more, got 1"),
        (["HERE/good.jsonl", "HERE/no"], "no: expected a run with history.jsonl or"),
        (["HERE/good.jsonl", "HERE/no.jsonl"], "no.jsonl: FileNotFoundError"),
        (["HERE/good.jsonl", "HERE/good.jsonl", "--metric", "los"], "(did you mean loss?)"),
        (["HERE/good.jsonl", "HERE/good.jsonl", "--page", "HERE/no/a"], "--page: expected a file"),
    ],
)
def test_a_comparison_names_what_is_wrong_in_one_line(tmp_path, capsys, arguments, expected):
    steps = "".join(map(to_line, sample_run.steps(1, 50))).encode()
    (tmp_path / "good.jsonl").write_bytes(make_history() + steps)
    given = [each.replace("HERE", str(tmp_path)) for each in arguments]
    status, (line,) = call(capsys, *given)
    assert status == 2
    assert expected in line


def test_the_time_of_steps_before_a_restart_stays_split():
    phases = {"data": [0.001, 0.003], "forward": [0.002, 0.002]}
    first = dataclasses.replace(sample_run.epoch(1), rank_phase_seconds=phases)
    again = [sample_run.started(), sample_run.loaded(sample_run.STEPS_PER_EPOCH)]
    state = RunState.of([sample_run.started(), sample_run.loaded(), first, *again])
    shares = split_steps(state.epochs)
    # A step takes 150 ms, of which the slower rank computes 6.1 ms.
    assert shares["data"] == pytest.approx(0.002 / 0.15)
    assert shares["stragglers"] == pytest.approx(0.0021 / 0.15)
    assert shares["exchange"] == pytest.approx(0.1439 / 0.15)
    assert split_steps([sample_run.epoch(1)]) == {}


def test_hidden_values_are_named_and_not_compared():
    hidden = [{"name": "recipe_options.api_key", "salt": "", "scrypt": ""}]
    change = {"config": {"recipe_options": {"api_key": "..."}}, "hidden": hidden}
    runs = [parse_run(name, make_history(**change)) for name in ("a", "b")]
    assert find_changes(*runs) == {}
    assert run_card(RunState.of([sample_run.started()]))["hidden"] is None
