"""Pictures that a program shows by `session.show`."""

from __future__ import annotations

import io
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flyte_ddp
from flyte_ddp import session
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import Event, PictureShown
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.rank.pictures import MAX_BYTES, encode_picture
from tests.support.recipes import Tiny
from tests.support.runs import fork_functions, new_run
from tests.support.short_run import feed, started


def figure() -> Any:
    from matplotlib.figure import Figure

    made = Figure((2, 1))
    made.add_subplot().plot([1, 2], [3, 4])
    return made


@pytest.mark.parametrize(
    ("picture", "size", "corner"),
    [
        (figure(), None, None),
        (Image.new("CMYK", (4, 3)), (4, 3), (255, 255, 255)),
        (np.full((3, 5), 7, np.int64), (5, 3), 7),
        (torch.full((3, 2, 5), 0.5, requires_grad=True), (5, 2), (127, 127, 127)),
        (torch.tensor([[[float("nan"), 2.0]]]), (2, 1), 0),
        (np.zeros((2, 5, 4), bool), (5, 2), (0, 0, 0, 0)),
        ([[0, 1], [300, -1]], (2, 2), 0),
    ],
)
def test_what_a_person_has_becomes_a_picture(picture: Any, size: Any, corner: Any) -> None:
    image = Image.open(io.BytesIO(encode_picture(picture)))
    if size:
        assert (image.size, image.getpixel((0, 0))) == (size, corner)


def test_a_large_picture_is_made_smaller() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3000, 1500, 3), np.uint8)
    png = encode_picture(noise)
    width, height = Image.open(io.BytesIO(png)).size
    assert len(png) <= MAX_BYTES
    assert height == pytest.approx(2 * width, abs=2)


@pytest.mark.parametrize("picture", [None, "a", np.zeros((2, 2, 7)), [[]], [[1], [1, 2]]])
def test_what_is_no_picture_is_one_line(picture: Any) -> None:
    with pytest.raises(ConfigError, match=r"^session.show: expected a figure .* got "):
        encode_picture(picture)


class Drawing(Tiny):
    def on_epoch(self, epoch: Any) -> None:
        session.show("weights", np.full((2, 2), epoch.epoch, np.uint8))


def test_a_recipe_shows_pictures_by_its_hooks(tmp_path: Path) -> None:
    run = new_run(tmp_path, "tests.rank.test_pictures.Drawing")
    run.train(epochs=2)
    shown = [each for each in run.events if isinstance(each, PictureShown)]
    assert [each.name for each in shown] == ["weights"] * 2


def show() -> str:
    session.report(step=3)
    for value in (0.0, 1.0):
        session.show("of a rank", [[value]])
    try:
        session.show("", [[0]])
    except ConfigError as error:
        return str(error)
    return ""


def test_a_function_shows_the_newest_picture_of_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_functions(monkeypatch)
    report, seen = Report(), list[Event]()
    listeners = [report, types.SimpleNamespace(handle=seen.append, close=lambda error: None)]
    error = flyte_ddp.run(show, nproc_per_node=2, listeners=listeners)
    assert error == "session.show: name: expected 1 to 100 characters, got ''"
    shown = [each for each in seen if isinstance(each, PictureShown)]
    assert [each.step for each in shown] == [3, 3]
    page = report.render()
    assert page.count('alt="of a rank"') == 1
    assert "of a rank <small>step 3</small>" in page


def test_a_page_has_the_last_pictures_that_fit() -> None:
    report = Report()
    for event in (started(), *(PictureShown(1, f"<{n}>", b"x" * 200_000) for n in range(60))):
        feed(report, event)
    page = report.render()
    assert "the newest of each name; 46 older ones are left out" in page
    assert "&lt;59&gt; <small>" in page
    assert len(page) < 2_000_000
