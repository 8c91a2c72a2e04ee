import base64
import dataclasses
import html
import html.parser
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flytekit import Deck, task
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.loggers import logger as flytekit_logger

from flyte_ddp.__main__ import main
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    CheckpointWritten,
    EpochFinished,
    Event,
    LayerDescribed,
    NodesAwaited,
    Prediction,
    PredictionsMade,
    RunState,
    Straggler,
    StragglersFound,
    read_history,
)
from flyte_ddp.flyte.deck import open_deck
from flyte_ddp.observers.formats import duration
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.reports import drawing
from flyte_ddp.observers.reports.publisher import PagePublisher
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import run_card
from flyte_ddp.task_run.run import WaitReporter
from tests.support import sample_run
from tests.support.reports import HOSTILE, hostile_run, rank_failure, report_of
from tests.support.short_run import feed

TWO_MEGABYTES = 2_000_000


@pytest.mark.usefixtures("titles_of_pictures")
def test_a_run_that_is_refused_leaves_the_page_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    for events, is_kept in (
        ([], True),
        ([sample_run.started()], True),
        ([sample_run.started(), sample_run.loaded()], False),
        # This event is of a script, which may load nothing.
        ([sample_run.started(config={})], False),
    ):
        page.write_text("the page of a finished run")
        report = Report(file=page)
        for event in events:
            feed(report, event)
        report.close(ConfigError("learning_rate: expected 0.1, got 0.2"))
        assert (page.read_text() == "the page of a finished run") is is_kept
    page.write_text("")  # made for this run
    Report(file=page).close(ConfigError("recipe: expected a name"))
    assert "expected a name" in page.read_text()


@pytest.mark.usefixtures("titles_of_pictures")
def test_the_page_of_a_run_is_made_again_from_its_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = HistoryFile(tmp_path / "history.jsonl")
    events = [sample_run.started(), sample_run.loaded(), *sample_run.steps(1, 50)]
    for event in [*events, sample_run.epoch(1)]:
        history.handle(event)
    assert main(["report", str(tmp_path / "history.jsonl")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert ">interrupted<" in page
    history.handle(sample_run.finished())
    history.close(None)
    assert main(["report", str(tmp_path / "history.jsonl"), str(tmp_path / "other.html")]) == 0
    assert ">finished<" in (tmp_path / "other.html").read_text()
    assert f"report: {tmp_path}/other.html" in capsys.readouterr().out
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["report", str(tmp_path / "empty.jsonl")]) == 2
    assert "expected the history of a run that has started" in capsys.readouterr().err


@pytest.fixture
def titles_of_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the titles of pictures in their places. To draw them is most of the work for a page."""
    monkeypatch.setattr(drawing, "to_svg", lambda panel: f"<svg>{panel.title}</svg>")


def resumed_run() -> list[Event]:
    skipped = [
        "s3://bucket/run/step-0000000200.pt is unusable and was skipped: ValueError: too short"
    ]
    again = [sample_run.started(), sample_run.loaded(150, skipped=skipped)]
    return [*again, *sample_run.steps(151, 200), sample_run.epoch(4), sample_run.finished()]


class Elements(html.parser.HTMLParser):
    """All elements of a page with their attributes, and all text outside style sheets."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open != "style":
            self.text = " ".join([self.text, *data.split()])

    def images(self) -> list[bytes]:
        sources = [attributes["src"] or "" for tag, attributes in self.elements if tag == "img"]
        return [
            base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources
        ]


def text_of(made: Report) -> str:
    return Elements(made.render()).text


@pytest.mark.parametrize(("grace", "warns"), [(20.0, True), (40.0, False), (0.0, False)])
def test_a_store_that_is_slower_than_a_notice_of_departure_is_reported(grace, warns):
    saved = CheckpointSaved(50, "step-50", False, 0.1, at=100.0)
    written = CheckpointWritten(50, "step-50", False, at=130.0)
    begun = AttemptStarted(2, 1.0, 0.0, grace_seconds=grace)
    notices = report_of(
        [begun, sample_run.started(), sample_run.loaded(), saved, written]
    ).content()["notices"]
    warning = (
        "The store took 30 s for the newest checkpoint, and a node that is told to go has 20 s: "
        "an announced loss "
        "would cost steps. A longer termination grace of the pods avoids that"
    )
    assert notices == ([warning] if warns else [])


@pytest.mark.usefixtures("titles_of_pictures")
def test_the_headline_is_the_monitored_figure():
    started, *others = sample_run.training(epochs=3)
    monitor = {"metric": "accuracy", "mode": "max"}
    monitored = dataclasses.replace(started, config={**started.config, "monitor": monitor})
    assert report_of([monitored, *others]).content()["tiles"][0].name == "Best accuracy"


def test_the_report_of_a_finished_run_is_complete():
    made = report_of(sample_run.whole_run())
    assert made.status == "finished"
    text = text_of(made)
    for words in (
        "Training mnist",
        "finished",
        "95.00 %",
        "in epoch 4",
        "4 / 4",
        "8,004 in the last epoch",
        "1 min 33 s",
        "CPU, 1 thread each",
        "0.0517",  # 2 x 93 s in hours
        "312 of 320 held-out samples right",
        "MNIST, 60,000 training and 10,000 held-out images of 28x28",
        "learning_rate 0.002 default 0.001",
        "seed 0",
        "torch 2.15.0",
        "s3://bucket/run/model_state.pt",
        "600 MiB",
        "215,600, 215,480",
        "431,080 parameters",
        "20 x 24 x 24",
    ):
        assert words in text, words
    page = made.render()
    assert page.count('<svg xmlns="http://www.w3.org/2000/svg"') == 7
    best_row = page.split('<tr class="best">')[1].split("</tr>")[0]
    assert re.search(r"<t[hd][^>]*>\s*4\s*<", best_row)


@pytest.mark.usefixtures("titles_of_pictures")
def test_a_slow_rank_is_a_notice_and_each_change_a_row():
    slow = Straggler(1, "node 1", "", "data", 0.3, 0.1, 0.6, 0.4)
    events = [sample_run.started(), *sample_run.steps(1, 50), StragglersFound(20, [slow])]
    text = text_of(report_of(events, closed=False))
    assert text.count(str(slow)) == 2, "and in its section"
    assert "rank 1 (node 1) is slow in data: 300 ms per step" in text
    text = text_of(report_of([*events, AttemptEnded(40, "node 1 was lost", 0.0, 1)], closed=False))
    assert text.count(str(slow)) == 1
    assert "no rank is slower than the others any more" in text
    assert "Announced losses 1 in this attempt; node 1 was lost" in text


def test_the_run_card_counts_announced_losses_apart_from_restarts_and_names_a_known_licence():
    begun = [sample_run.started(data_license="CC-BY-4.0"), sample_run.loaded()]
    announced = AttemptEnded(40, "node 1 leaves", 0.0, num_leaving=1)
    killed = AttemptEnded(60, "rank 1 was killed", 0.0)
    card = run_card(RunState.of([*begun, announced, *begun, killed, *begun, killed, *begun]))
    assert (card["ranks"]["restarts"], card["ranks"]["announced_losses"]) == (2, 1)
    assert card["data"]["license"] == "CC-BY-4.0"


@pytest.mark.usefixtures("titles_of_pictures")
def test_the_report_splits_the_wall_time():
    events = [
        AttemptStarted(2, launched_at=1000.0, waited_seconds=60.0),
        *sample_run.training(),
        sample_run.finished(),
    ]
    stamped = [dataclasses.replace(event, at=1070.0 + index) for index, event in enumerate(events)]
    made = report_of(stamped)
    spent = RunState.of(stamped).time_spent()
    text = text_of(made)
    assert f"Wall time {duration(spent.wall)}" in text
    assert f"Goodput {100 * spent.goodput:.2f} %" in text
    assert "Waiting for nodes 1 min 0 s" in text
    assert "Redone steps" not in text  # The report omits figures that were not observed.
    assert "Goodput" not in text_of(report_of(sample_run.training()))  # The events have no times.


def test_the_page_and_the_history_show_what_a_run_waits_for_until_its_nodes_are_there(
    tmp_path: Path,
) -> None:
    reason = "couldn't assign flavors: insufficient unused quota for cpu in flavor a, 2 more needed"
    made, lines, pages = Report(), list[str](), list[str]()
    publisher = PagePublisher(made, pages.append)
    waits = WaitReporter(lines.append, HistoryFile(tmp_path / "h"), made, publisher)
    waits.report(reason)
    waits.report(reason)  # a line, but neither an event nor a page
    assert lines == [reason, reason]
    (event,) = read_history(tmp_path / "h")
    assert event == NodesAwaited(reason)
    publisher.close(None)
    assert reason in html.unescape(pages[0])
    running = [event, AttemptStarted(2, launched_at=1.0, waited_seconds=9.0), sample_run.started()]
    assert reason not in text_of(report_of(running, closed=False))


@pytest.mark.usefixtures("titles_of_pictures")
def test_the_status_follows_the_run():
    running = report_of(sample_run.training()[:20], closed=False)
    assert (running.status, "As of" in text_of(running)) == ("running", True)
    state, started = RunState.of(sample_run.training()[:20]), sample_run.started()
    percent = running.content()["percent_done"]
    assert 0 < percent < 100
    assert percent == pytest.approx(100 * state.last_step / started.num_steps, abs=1)
    stopped = (TrainingStopped("SIGTERM ended the run"), KeyboardInterrupt())
    assert {report_of([], error).status for error in stopped} == {"interrupted"}
    failed = report_of(sample_run.training(), rank_failure())
    assert failed.status == "failed"
    assert "RankFailure rank 1 failed: ValueError: bad" in text_of(failed)


@pytest.mark.usefixtures("titles_of_pictures")
def test_the_report_of_a_resumed_run_shows_its_origin_and_earlier_epochs():
    text = text_of(report_of(resumed_run()))
    assert "Resumed at step 150 from s3://bucket/run/step-0000000150.pt" in text
    assert "step-0000000200.pt is unusable and was skipped" in text
    assert "4 / 4" in text
    assert "this attempt" in text


@pytest.mark.usefixtures("titles_of_pictures")
@pytest.mark.long
def test_wrong_predictions_come_first_and_omitted_ones_are_counted():
    large = sample_run.predictions(number=320, side=128)
    made = report_of([*sample_run.training(), large, sample_run.finished()])
    page = Elements(made.render())
    shown = page.images()
    wrong = [
        prediction.image for prediction in large.predictions if prediction.truth != prediction.guess
    ]
    assert shown[: len(wrong)] == wrong
    assert len(wrong) < len(shown) < 320
    assert f"{320 - len(shown)} left out" in page.text
    assert len(made.render().encode()) < TWO_MEGABYTES

    huge = sample_run.predictions(number=2, side=1500)
    assert "2 left out" in text_of(report_of([*sample_run.training(), huge]))


@pytest.mark.usefixtures("titles_of_pictures")
def test_numbers_are_drawn_and_other_degrees_of_error_listed_from_the_worst():
    numbers = [Prediction("1", "1.5", {}, numbers=[1.0, 1.5], error=0.5)]
    text = text_of(report_of([*sample_run.training(), PredictionsMade(1, numbers)]))
    assert "Predicted against true" in text
    assert "Test predictions" not in text
    masks = [
        Prediction("", f"{error:.0%} wrong", {}, image=b"png", error=error) for error in (0.1, 0.3)
    ]
    page = Elements(report_of([*sample_run.training(), PredictionsMade(1, masks)]).render())
    assert "2 held-out samples, the largest error first" in page.text
    assert page.text.index("30% wrong") < page.text.index("10% wrong")
    assert page.images() == [b"png"] * 2
    names = [Prediction("e", "e", {"e": 0.9}, text="Bell|e"), Prediction("x", "a", {}, text="Ma|x")]
    made = report_of([*sample_run.training(), PredictionsMade(1, names)])
    assert text_of(made).index("Ma|x") < text_of(made).index("Bell|e")
    assert "guess e, truth e (e 90 %)" in made.render()


@pytest.mark.usefixtures("titles_of_pictures")
def test_generated_text_and_a_recipes_own_figures_are_shown_for_every_epoch():
    events = sample_run.training()
    for index, event in enumerate(events):
        if isinstance(event, EpochFinished):
            metrics = {"nats_per_byte": 1.5 / event.epoch, "tokens_seen": 1_234_567}
            events[index] = dataclasses.replace(
                event, sample=f"the {event.epoch}. text\n", metrics=metrics
            )
    text = text_of(report_of(events))
    assert "nats per byte tokens seen" in text
    assert "Tokens seen 1,234,567 padding included" in text
    assert "0.375 1,234,567 0.0005 7.5 s 600 ms 8,004" in text
    assert "Generated text after epoch 4 the 4. text after epoch 3 the 3. text" in text
    assert "Generated text" not in text_of(report_of(sample_run.training()))


@pytest.mark.long
def test_the_page_stays_below_two_megabytes():
    config = sample_run.started(epochs=2000).config
    events: list[Event] = [
        sample_run.started(
            epochs=2000,
            world_size=256,
            config=config,
            data="long " * 400,
            layers=[
                LayerDescribed(f"blocks.{index}", "Linear", [1, 8, 64], 9) for index in range(2000)
            ],
        ),
        sample_run.loaded(skipped=[f"s3://bucket/{index} is unusable" for index in range(500)]),
        *sample_run.steps(1, 100_000),
        *(sample_run.epoch(number, world_size=256) for number in range(1, 2001)),
        *(CheckpointWritten(step, f"s3://bucket/run/{step}.pt", True) for step in range(2000)),
        sample_run.predictions(number=3000, side=28),
        PredictionsMade(
            1, [Prediction("&" * 1000, '"' * 1000, {"'" * 1000: 1.0}, text="<" * 5000)] * 3000
        ),
    ]
    made = report_of(events, RuntimeError("<stack>" * 1_000_000))
    page = made.render()
    assert len(page.encode()) < TWO_MEGABYTES


def test_text_from_outside_never_becomes_markup():
    made = report_of(hostile_run(), RuntimeError(HOSTILE))
    made.links = {"bad": "javascript:alert(1)", HOSTILE: "https://example.org/" + HOSTILE}
    page = Elements(made.render())
    assert [tag for tag, _ in page.elements].count("script") == 1  # This script sorts the tables.
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert not (attributes.get("href") or "").startswith("javascript:")
        assert tag != "img" or (attributes["src"] or "").startswith("data:image/png;base64,")
    assert " ".join(HOSTILE.split()) in page.text
    assert "bad: javascript:alert(1)" in page.text


# --- as a Deck
# --------------------------------------------------------------------------------------------------


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Path]:
    """The directory of flytekit's files in this test."""
    provider = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"))
    with FlyteContextManager.with_context(
        FlyteContextManager.current_context().with_file_access(provider)
    ):
        yield tmp_path / "sandbox"


@pytest.fixture
def errors() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    flytekit_logger.addHandler(handler)
    yield records
    flytekit_logger.removeHandler(handler)


def decks(sandbox: Path) -> list[str]:
    """All versions of the Deck that were written, the oldest first."""
    files = sorted(sandbox.rglob("deck.html"), key=lambda file: file.stat().st_mtime_ns)
    # a failure leaves an empty file
    return [text for file in files if (text := file.read_text(encoding="utf-8"))]


@pytest.mark.usefixtures("titles_of_pictures")
def test_the_deck_is_published_while_the_run_goes_on_and_at_its_end(sandbox: Path):
    seen: list[int] = []

    @task(enable_deck=True, deck_fields=())
    def train() -> None:
        clock, made = Clock(), Report()
        publisher = PagePublisher(made, open_deck(), interval=15, clock=clock)

        def run() -> None:
            for event, at in (
                (sample_run.started(), 0),
                (sample_run.steps(1, 1)[0], 5),
                (sample_run.epoch(1), 14),
                (sample_run.epoch(2), 16),
                (CheckpointSaved(100, "file:///c.pt", True, 0.1), 40),
                (sample_run.epoch(3), 1001),
                (sample_run.epoch(4), 1017),  # The page may take 5 % of 1001 s by then.
            ):
                clock.now = 100.0 + at
                feed(made, event)
                publisher.handle(event)
                seen.append(len(decks(sandbox)))
            made.close(rank_failure())
            publisher.close(rank_failure())
            seen.append(len(decks(sandbox)))

        # The thread has none of the task's context variables.
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    train()
    assert seen == [1, 1, 1, 2, 2, 3, 3, 4]
    last = decks(sandbox)[-1]
    assert last.count(">Training</li>") == 1
    assert last.count('onclick="handleLinkClick(this)"') == 1  # no other Deck beside it
    assert last.count('<div class="training-report">') == 1
    assert "rank 1 failed" in last
    assert "rank 1 failed" not in decks(sandbox)[0]


@pytest.mark.usefixtures("titles_of_pictures")
def test_a_store_that_hangs_keeps_no_event_from_the_listeners_behind_the_deck(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = threading.Event()
    publish = Deck.publish

    def hang() -> None:
        publish()  # This call uploads last.
        answers.wait(60)

    @task(enable_deck=True, deck_fields=())
    def train() -> None:
        clock, made = Clock(), Report()
        publisher = PagePublisher(made, open_deck(), interval=15, clock=clock)

        def handle() -> None:
            for event in (sample_run.started(), sample_run.epoch(1), sample_run.epoch(2)):
                feed(made, event)
                publisher.handle(event)
                clock.now += 100

        with monkeypatch.context() as patched:
            patched.setattr(Deck, "publish", staticmethod(hang))
            thread = threading.Thread(target=handle, daemon=True)
            thread.start()
            thread.join(30)
            is_delayed = thread.is_alive()
            answers.set()
            thread.join()
            publisher.close(None)
        assert not is_delayed

    train()
    assert len(decks(sandbox)) == 3  # the one that hung, the end's, and flytekit's own after it


def test_a_deck_that_cannot_be_published_is_logged(
    sandbox: Path, errors: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
):
    def fail(self: object) -> str:
        raise ConnectionError("no way out")

    @task(enable_deck=True, deck_fields=())
    def train() -> None:
        publisher = PagePublisher(Report(), open_deck())
        with monkeypatch.context() as patched:
            patched.setattr(FileAccessProvider, "get_random_local_directory", fail)
            publisher.handle(sample_run.started())
        publisher.close(None)

    train()
    assert len([record for record in errors if "no way out" in record.getMessage()]) == 1
    assert len(decks(sandbox)) == 2  # the end's, and flytekit's own after it
