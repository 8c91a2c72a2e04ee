"""Failures of drawing, recording and exporting never end a finished training."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from flytekit.types.directory import FlyteDirectory

from flyte_ddp import events
from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import (
    LayerDescribed,
    Prediction,
    PredictionsMade,
    Reported,
    RunState,
    parse_history,
    to_line,
)
from flyte_ddp.launch.control import driver
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.reports import drawing, run_rows
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import card_files, run_card
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import FINISHED, TrialRun
from flyte_ddp.studies.search import Trial
from flyte_ddp.task_run import files
from tasks.train import train_on_one_node
from tests.support.short_run import epoch_finished, feed, loaded, run_finished, started, whole_run
from tests.support.task_context import executing

NAMES = {  # a name that a user gives, and what a page shows of it
    "a formula": ("^cat$|^$", "^cat$|^$"),
    "no formula": (r"$\frac{x}$ and \$5", r"$\frac{x}$"),
    "Latin-1": ("caf\udce9", "caf\\udce9"),
    "half of a pair": ("\ud83d", "\\ud83d"),
    "emoji": ("\U0001f468\u200d\U0001f469\u200d\U0001f467 cat", "cat"),
    "right to left": ("חתול \u202eabc", "חתול"),
    "control characters": ("a\x00b\x1b[31m\x08\r\x0b", "a"),
    "no characters of XML": ("x\ufffe\uffffy", "x"),
    "tags": ("<b>&'\"]]>", "&lt;b&gt;"),
    "very long": ("very long " * 500, "very long very long"),
    "empty": ("", ""),
    "lines": ("one\ntwo", "one"),
    "a number": (3, "3"),
    "an array": (np.array([1, 2]), "[1 2]"),
    "NumPy's": (np.str_("cat"), "cat"),
}


def run_with(*names) -> list[events.Event]:
    """A run in which all that has a name has one of `names`, if there can be several."""
    texts = [str(name) for name in names]
    data, values = texts[0], dict.fromkeys(texts, 0.5)
    scores = {"other": 0.25} | {name: 0.75 for name in names if name.__hash__}
    made = [
        started(
            data=data,
            layers=[LayerDescribed(text, text, [1], 1) for text in texts],
            config={"epochs": 3, **dict.fromkeys(texts, data)},
        ),
        loaded(),
        Reported(4, 1.0, {"loss": 1.0, **values}),
        dataclasses.replace(epoch_finished(1), metrics=values, sample=data),
    ]
    for text in (data, ""):
        seen = [
            each
            for name in names
            for each in (
                Prediction(name, "other", scores),
                Prediction("other", name, scores, text=text),
            )
        ]
        made.append(PredictionsMade(1, seen))
    return [*made, dataclasses.replace(run_finished(), best=values)]


def strict(text: str | bytes) -> object:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = text if isinstance(text, str) else text.decode()
    values = json.loads(text, parse_constant=refuse)
    json.dumps(values, ensure_ascii=False).encode()  # raises for half of a pair
    return values


@pytest.mark.parametrize("name", NAMES)
def test_a_card_and_a_history_take_any_name(name, tmp_path):
    history, made = HistoryFile(tmp_path / "history.jsonl"), run_with(NAMES[name][0])
    for event in made:
        feed(history, event)
    history.close(None)
    lines = (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()
    assert [strict(line)["event"] for line in lines][:2] == ["RunStarted", "CheckpointLoaded"]
    files = card_files(run_card(RunState.of(made)))
    assert strict(files["run_card.json"])["recipe"] == "digits"
    assert files["README.md"].decode()


def test_a_page_takes_any_names(caplog):
    report = Report()
    for event in run_with(*(given for given, _ in NAMES.values())):
        feed(report, event)
    page = report.render().encode().decode()
    for name, (_, seen) in NAMES.items():
        assert seen in page, name
    assert caplog.messages == []
    assert page.count("<svg") >= 5


@pytest.mark.parametrize(
    "values", [["^cat$|^$", "$x$"], ["a\x00", "caf\udce9"], [True, "1"], [[1, "$"], None]]
)
def test_a_swept_value_is_drawn_whatever_it_is(values, caplog):
    runs = []
    for number, value in enumerate(values, start=1):
        state = RunState.of([started(), epoch_finished(1), epoch_finished(2), run_finished()])
        trial = Trial(
            number, {"pattern": value, "$other": value}, {"pattern": value}, TrainingConfig()
        )
        runs.append(TrialRun(trial, "key", FINISHED, state))
    page = StudyReport("digits", runs).render().encode().decode()
    assert page.count("<svg") == 4  # over epochs, over time, and for each of two names
    assert caplog.messages == []


def test_ten_thousand_classes_are_shown():
    scores = dict.fromkeys(map(str, range(10_000)), 1e-4)
    report = Report()
    for event in [
        started(),
        PredictionsMade(1, [Prediction("1", "2", scores)] * 3),
        run_finished(),
    ]:
        feed(report, event)
    assert "guess 2, truth 1" in report.render()


def test_labels_as_long_as_documents_are_cut_and_stay_apart():
    cat, dog = (f"{'x' * 700_000} {name}" for name in ("cat", "dog"))
    prediction = Prediction(cat, dog, {cat: 0.25, dog: 0.75}, text=cat)
    assert prediction.truth != prediction.guess
    assert list(prediction.scores.items()) == [(prediction.truth, 0.25), (prediction.guess, 0.75)]
    assert max(map(len, prediction.scores)) == 200
    assert len(prediction.text) == 5_000
    made = [
        dataclasses.replace(started(), class_names=[cat, dog]),
        PredictionsMade(1, [prediction] * 3),
        run_finished(),
    ]
    report = Report()
    for event in made:
        feed(report, event)
    files = card_files(run_card(RunState.of([*made[:1], epoch_finished(1), *made[1:]])))
    assert prediction.guess[:60] in report.render()
    assert max(len(report.render()), len(files["README.md"])) < 100_000


NOT_FINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("value", [*NOT_FINITE, np.float64("nan"), np.float32("inf")], ids=repr)
def test_figures_that_are_not_finite_are_null_in_json_and_come_back_as_nan(value, tmp_path):
    epoch = dataclasses.replace(
        epoch_finished(1),
        test_loss=float(value),
        metrics={"mae": float(value)},
        rank_losses=[float(value), 1.0],
    )
    every = [
        started(config={"epochs": 3, "option": value}),
        loaded(),
        Reported(4, None, {"loss": float(value)}),
        epoch,
        events.CheckpointLoaded(4, "", [epoch]),
        run_finished(),
    ]
    lines = "".join(map(to_line, every))
    assert strict(lines.splitlines()[3])["metrics"] == {"mae": None}
    read = parse_history(lines.encode(), "history")
    assert read[2].epoch is None  # The value None is kept: it is not a missing number.
    for back in (read[3], read[4].epochs[0]):
        assert math.isnan(back.test_loss)
        assert math.isnan(back.metrics["mae"])
        assert (math.isnan(back.rank_losses[0]), back.rank_losses[1]) == (True, 1.0)
        assert back.train_loss == epoch.train_loss
    report = Report()
    for event in read:
        feed(report, event)
    assert "not finite" not in report.render()
    strict(card_files(run_card(RunState.of(read)))["run_card.json"])


def _raise(*arguments, **options):
    raise TypeError("nothing\nto draw")


def _fill_disk(path, text, **options):
    raise OSError(28, "No space left on device", str(path))


FAULTS = {
    "a panel cannot be drawn": (drawing, "to_svg"),
    "a table cannot be made": (Report, "content"),
    "figures cannot be formatted": (run_rows, "duration"),
    "the disk is full": (Path, "write_text"),
    "the card cannot be made": (files, "card_files"),
    "the export is gone": (files, "fetch_file"),
    "nothing can be copied": (shutil, "copy"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_training_is_whole_where_a_part_of_what_is_shown_fails(
    name, tmp_path, monkeypatch, capfd
):
    where, what = FAULTS[name]
    state = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(2)}, state)
    (tmp_path / "kept").mkdir()
    shutil.copy(state, tmp_path / "kept")
    finished = dataclasses.replace(
        run_finished(str(state)), export_url=str(tmp_path / "kept"), exported=["model.pt"]
    )
    made = [*whole_run(), finished]
    fetch = _raise if what != "fetch_file" else _fetch_only(state)
    monkeypatch.setattr(where, what, _fill_disk if what == "write_text" else fetch)

    def drive(job, place, data, listeners, *arguments, **options):
        with driver.Dispatcher(listeners) as dispatcher:
            for event in made:
                dispatcher.emit(event)
        return RunState.of(made)

    monkeypatch.setattr(driver, "run", drive)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with executing():
        outputs = train_on_one_node.task_function(
            recipe="tests.support.recipes.Tiny", config=TrainingConfig(), data=FlyteDirectory(str(tmp_path)),  # noqa: E501
            checkpoints=str(tmp_path / "c"), output=str(tmp_path / "out"),
        )  # fmt: skip
    assert torch.equal(
        torch.load(outputs.model_state.path, weights_only=True)["weight"], torch.ones(2)
    )
    assert outputs.epoch_metrics["test_loss"] == [
        event.test_loss for event in made if hasattr(event, "test_loss")
    ]
    for file in (outputs.report, outputs.history):
        assert Path(file.path).is_file()
    lines = Path(outputs.history.path).read_text().splitlines()
    assert strict(lines[-2])["event"] == "RunFinished"
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be shown: " in line]
    reasons = {line.partition("cannot be shown: ")[2] for line in said}
    assert 1 <= len(said) <= 3, said  # The message does not come once per panel and drawing.
    reason = "No space left on device" if what == "write_text" else "TypeError: nothing to draw"
    assert all(reason in each for each in reasons)


def _fetch_only(state):
    from flyte_ddp.storage import fetch_file

    def fetch(url, file, *arguments, **options):
        return fetch_file(url, file, *arguments, **options) if url == str(state) else _raise()

    return fetch
