"""The pages of reports in a browser."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flytekit.deck.deck import get_deck_template

from flyte_ddp.observers.reports.page import Page, Tile
from tests.support import sample_run
from tests.support.reports import HOSTILE, hostile_run, rank_failure, report_of

Look = Callable[..., list[Any]]

PAGES = {
    "running": lambda: report_of(sample_run.training()[:40], closed=False),
    "finished": lambda: report_of(sample_run.whole_run()),
    "failed": lambda: report_of(sample_run.training(world_size=16), rank_failure()),
    "hostile": lambda: report_of(hostile_run(), RuntimeError("x" * 500 + HOSTILE)),
}
WIDTH = "document.documentElement.scrollWidth"
COLOR = "getComputedStyle(document.querySelector('.training-report')).backgroundColor"
IMAGES = "[...document.images].every(image => image.naturalWidth > 0)"
# The height of text on the screen follows the picture's width.
TEXT = """Math.min(...[...document.querySelectorAll("svg.panel text")].map(text =>
    parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a))"""

# Text that the pointer shows in the middle of the first picture.
HOVERED = """(() => { const picture = document.querySelector("svg.panel"); picture.scrollIntoView();
    const box = picture.getBoundingClientRect(), { left, top, width, height } = box;
    const found = document.elementFromPoint(left + width / 2, top + height / 2);
    return found.parentNode.querySelector("title")?.textContent ?? "" })()"""


@pytest.mark.parametrize(
    ("page", "width", "dark"),
    [
        ("running", 1280, False),
        ("finished", 360, True),
        ("finished", 1280, False),
        ("failed", 360, False),
        ("hostile", 360, True),
    ],
)
def test_the_page_opens_without_errors_on_any_screen(
    chromium: Look, tmp_path: Path, page: str, width: int, dark: bool
):
    file = tmp_path / "report.html"
    file.write_text(PAGES[page]().render(), encoding="utf-8")
    found, color, has_images, smallest, hovered = chromium(
        file, WIDTH, COLOR, IMAGES, TEXT, HOVERED, width=width, dark=dark
    )
    assert found <= width
    assert color == ("rgb(13, 17, 23)" if dark else "rgb(246, 248, 250)")
    assert has_images or page == "hostile"
    assert "at epoch " in hovered or page == "hostile"
    assert smallest >= 8  # pixels, on a phone too


@dataclasses.dataclass(eq=False)
class TilePage(Page):
    """A page with so many tiles."""

    num_tiles: int
    title = "Tiles"

    def content(self) -> dict[str, Any]:
        return {"tiles": [Tile("Speed", "1,234", "12.5 % of 2,000 steps")] * self.num_tiles}


# For each group of tiles, this is the share of the row's width that the last row fills, with at
# least two tiles or with one tile as wide as the row.
LAST_ROWS = """[...document.querySelectorAll(".tiles")].map(group => {
    const boxes = [...group.children].map(each => each.getBoundingClientRect());
    const last = boxes.filter(each => each.top === boxes.at(-1).top);
    return last.length > 1 || last[0].width > 0.9 * group.getBoundingClientRect().width })"""


@pytest.mark.parametrize("width", [360, 700, 900, 1280])
def test_no_tile_stands_alone_in_its_row(chromium: Look, tmp_path: Path, width: int):
    file = tmp_path / "tiles.html"
    pages = [TilePage(number).render_fragment() for number in range(1, 17)]
    file.write_text("<!doctype html>" + "".join(pages), encoding="utf-8")
    found, full = chromium(file, WIDTH, LAST_ROWS, width=width)
    assert found <= width
    assert full == [True] * 16


def test_a_number_in_a_note_of_a_tile_is_not_broken_from_its_unit():
    assert "12.5\u00a0% of 2,000\u00a0steps" in TilePage(1).render_fragment()


@pytest.mark.long
def test_the_deck_in_flytes_own_page_shows_the_report(chromium: Look, tmp_path: Path):
    fragment = PAGES["finished"]().render_fragment()
    page = get_deck_template().substitute(
        NAV_HTML="<li>Training</li>", BODY_HTML=f"<div>{fragment}</div>"
    )
    file = tmp_path / "deck.html"
    # Flyte's template asks for a font from elsewhere; that is not the report's doing.
    file.write_text(
        "\n".join(line for line in page.splitlines() if "fonts.googleapis.com" not in line),
        encoding="utf-8",
    )
    # Flyte's own script shows the first Deck, which on a busy machine takes a moment.
    is_shown = """new Promise(done => { const look = left =>
        document.querySelector('.training-report h1').checkVisibility() ? done(true)
        : left ? setTimeout(() => look(left - 1), 100) : done(false); look(100) })"""
    color = "getComputedStyle(document.body).backgroundColor"
    width, shows, outside = chromium(file, WIDTH, is_shown, color, width=360)
    # The style of the report stays within the report.
    assert (width <= 360, shows, outside) == (True, True, "rgba(0, 0, 0, 0)")
