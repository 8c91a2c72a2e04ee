import dataclasses
import math
import re
from xml.etree import ElementTree

import pytest

from flyte_ddp.events import (
    Event,
    NodeMeasured,
    Prediction,
    Reported,
    RunStarted,
    RunState,
    Straggler,
    StragglersFound,
)
from flyte_ddp.observers.formats import format_figure
from flyte_ddp.observers.reports import drawing, plots, template
from flyte_ddp.observers.reports.predictions import prediction_panels
from tests.support import sample_run


def panels_of(events: list[Event]) -> dict[str, drawing.Panel]:
    return {panel.name: panel for panel in plots.run_panels(RunState.of(events))}


def test_a_restart_undoes_the_steps_after_its_checkpoint():
    first = [*sample_run.training()[:2], *sample_run.steps(1, 80), sample_run.epoch(1)]
    again = [sample_run.started(), sample_run.loaded(60), sample_run.epoch(1)]
    history = RunState.of([*first, *again, *sample_run.steps(61, 71)])
    assert [step.step for step in history.reports] == [*range(1, 61, 5), 61, 66, 71]
    assert [epoch.epoch for epoch in history.epochs] == [1]
    # a function may look for no checkpoint
    reports = [Reported(step, None, {}, at=1.0) for step in (1, 2, 3, 2, 3)]
    start = RunStarted("train", 1)
    state = RunState.of([start, *reports[:3], start, *reports[3:]])
    assert [each.step for each in state.reports] == [1, 2, 3]
    assert state.reports[1] is reports[3]


def test_a_run_has_a_panel_for_all_its_data():
    everything = ["loss", "metric-0", "throughput", "learning-rate", "gradient-norm", "ranks"]
    assert list(panels_of(sample_run.training())) == everything
    assert list(panels_of(sample_run.training(world_size=1))) == everything[:-1]
    assert list(panels_of([sample_run.started(), *sample_run.steps(1, 20)])) == [
        "loss",
        "throughput",
        "learning-rate",
        "gradient-norm",
    ]
    assert panels_of([sample_run.started()]) == {}
    assert panels_of([]) == {}


def test_the_use_of_the_nodes_is_drawn_over_time() -> None:
    measured = [
        NodeMeasured(node, 0.5, 0.25, 2**36, gpu, gpu, at=1000.0 + at)
        for node, gpu in ((0, 0.75), (1, None))
        for at in (15, 135)
    ]
    panels = panels_of([sample_run.started(), *measured])
    assert list(panels) == ["gpu", "gpu-memory", "cpu", "memory"]
    assert "node 0: 75 at minute 2</title>" in drawing.to_svg(panels["gpu"])
    assert "node 1: 25 at minute 2</title>" in drawing.to_svg(panels["memory"])
    many = [dataclasses.replace(measured[0], node=node) for node in range(20)]
    assert "<title>" not in drawing.to_svg(panels_of([sample_run.started(), *many])["cpu"])


def test_the_panel_of_ranks_names_those_that_are_slow_now(tmp_path):
    slow = StragglersFound(100, [Straggler(2, "node 1", "", "data", 0.3, 0.1, 0.6, 0.4)])
    training = sample_run.training(world_size=4)
    for events, is_named in [
        ([], False),
        ([slow], True),
        ([slow, StragglersFound(200, [])], False),
    ]:
        drawing.save_panels([panels_of([*training, *events])["ranks"]], tmp_path / "ranks.svg")
        assert ("rank 2, slow in data" in (tmp_path / "ranks.svg").read_text()) is is_named


UNUSUAL = {
    "two steps with losses far apart": [
        sample_run.started(),
        *(
            dataclasses.replace(step, values={**step.values, "loss": loss})
            for step, loss in zip(sample_run.steps(1, 10), (2.3, 0.02), strict=True)
        ),
        sample_run.epoch(1),
    ],
    "one step": [sample_run.started(), *sample_run.steps(1, 1)],
    "one epoch without step events": [sample_run.started(epochs=1), sample_run.epoch(1)],
    "a resumed run": [
        sample_run.started(),
        sample_run.loaded(150),
        *sample_run.steps(151, 200),
        sample_run.epoch(4),
    ],
    "many ranks": sample_run.training(world_size=64),
    "a gang that lost a node": [
        *sample_run.training(epochs=2, world_size=4),
        sample_run.epoch(3, world_size=2),
    ],
    "losses that are zero, huge and not finite": [
        sample_run.started(),
        *(
            dataclasses.replace(step, values={**step.values, "loss": loss, "gradient_norm": loss})
            for step, loss in zip(
                sample_run.steps(1, 20), (0.0, 1e30, math.nan, math.inf), strict=True
            )
        ),
        dataclasses.replace(
            sample_run.epoch(1), train_loss=0.0, test_loss=0.0, metrics={"accuracy": 0.0}
        ),
    ],
    "an epoch whose test loss is not finite": [
        *sample_run.training(epochs=2),
        dataclasses.replace(sample_run.epoch(3), test_loss=math.nan),
        dataclasses.replace(sample_run.epoch(4), train_loss=1e-6),
    ],
    "an epoch in which nothing is finite": [
        *sample_run.training(epochs=2, world_size=12),
        dataclasses.replace(
            sample_run.epoch(3, world_size=12),
            train_loss=math.inf,
            metrics={"accuracy": math.nan},
            learning_rate=math.nan,
            samples_per_second=math.inf,
            rank_step_seconds=[math.nan, math.inf] * 6,
        ),
    ],
    "nothing but losses that are not finite": [
        sample_run.started(),
        *(
            dataclasses.replace(
                step, values={**step.values, "loss": math.nan, "gradient_norm": math.nan}
            )
            for step in sample_run.steps(1, 20)
        ),
    ],
}


@pytest.mark.filterwarnings("error::UserWarning")  # a healthy run's log has no warning
@pytest.mark.parametrize("events", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_unusual_runs_are_drawn(events: list[Event]):
    panels = panels_of(events)
    assert panels
    for panel in panels.values():
        ElementTree.fromstring(drawing.to_svg(panel))


def test_a_panel_fits_any_page():
    ids: list[str] = []
    for panel in panels_of(sample_run.training()).values():
        svg = drawing.to_svg(panel)
        root = ElementTree.fromstring(svg)
        assert root.get("viewBox")
        assert root.get("width") is None
        assert root.get("height") is None
        assert root.get("aria-label") == panel.summary
        assert f">{panel.title}</text>" in svg
        assert "<style" not in svg  # Rules of a style element would hold for the whole page.
        assert set(re.findall(r"https?://[^\"]*", svg)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }
        own = re.findall(r'\bid="([^"]+)"', svg)
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) <= set(own)
        ids += own
    assert len(ids) == len(set(ids))


def texts_of(panel: drawing.Panel) -> list[str]:
    """Return the texts of a drawn panel, those at its ticks among them."""
    root = ElementTree.fromstring(drawing.to_svg(panel))
    return [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(("most", "tick"), [(1.0, "40 %"), (100.0, "40")])
def test_an_axis_shows_accuracy_as_its_tile_does(most: float, tick: str) -> None:
    """A function may report its accuracy as a share or in percent."""
    values = [0.1 * most, 0.5 * most, 0.9 * most]
    reports = [Reported(step, step, {"accuracy": each}) for step, each in enumerate(values, 1)]
    panel = panels_of([RunStarted("train", 1), *reports])["reported-0"]
    assert tick in texts_of(panel)
    assert f": {format_figure('accuracy', values[1])} at epoch 2" in drawing.to_svg(panel)


def test_the_axis_of_a_recipes_accuracy_is_in_percent() -> None:
    panel = panels_of(sample_run.training())["metric-0"]
    assert {"85 %", "90 %"} <= set(texts_of(panel))
    assert "90.00 % at epoch 2" in drawing.to_svg(panel)


def test_the_axis_of_a_speed_is_in_rounded_numbers() -> None:
    texts = texts_of(panels_of(sample_run.training())["throughput"])
    assert [text for text in texts if re.fullmatch(r"\d,\d{3}", text)]
    assert not [text for text in texts if re.fullmatch(r"\d{4,}", text)]


def test_a_resumed_run_has_a_mark_at_its_checkpoint() -> None:
    first = [sample_run.started(), sample_run.loaded(), *sample_run.steps(1, 80)]
    again = [sample_run.started(), sample_run.loaded(60), *sample_run.steps(61, 71)]
    assert "resumed" not in texts_of(panels_of(first)["loss"])
    assert "resumed" in texts_of(panels_of([*first, *again])["loss"])


def test_values_are_shown_on_hover() -> None:
    loss = drawing.to_svg(panels_of(sample_run.training())["loss"])
    titles = re.findall("<title>(.*?)</title>", loss, re.DOTALL)
    assert 4 <= len(titles) <= drawing.MAX_STRIPS
    (second,) = (each for each in titles if " at epoch 2" in each.partition("test")[2])
    test_loss = sample_run.epoch(2).test_loss
    assert f"test: {test_loss:.4g} at epoch 2" in second.splitlines()
    made = [Prediction(truth="3", guess=guess, scores={}) for guess in ("3", "8&")]
    (panel,) = prediction_panels(made)
    svg = drawing.to_svg(panel)
    assert "<title>true 3, predicted 8&amp;: 1 of 2 (50.00 %)</title>" in svg
    # neither a white picture nor an ink of its own, which a dark page would not show
    assert "<image" not in svg
    assert "currentColor" in svg


@pytest.mark.parametrize("page", ["#ffffff", "#000000"])
@pytest.mark.parametrize("color", [drawing.INK, *drawing.PALETTE])
def test_colours_stand_out_on_light_and_dark_pages(color: str, page: str):
    assert f"--card: {page};" in template.STYLE

    def luminance(code: str) -> float:  # WCAG 2.1, "relative luminance"
        channels = [int(code[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [
            value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4
            for value in channels
        ]
        return sum(
            weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
        )

    dark, light = sorted((luminance(color), luminance(page)))
    assert (light + 0.05) / (dark + 0.05) >= (4.5 if color == drawing.INK else 3)


def test_panels_are_saved_as_one_file(tmp_path):
    panels = list(panels_of(sample_run.training()).values())
    drawing.save_panels(panels, tmp_path / "run.svg")
    ElementTree.parse(tmp_path / "run.svg")
    assert all(panel.title in (tmp_path / "run.svg").read_text() for panel in panels)
    drawing.save_panels(panels, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
