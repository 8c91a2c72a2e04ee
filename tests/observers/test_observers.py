"""The progress bar, the history file and the run state, given the events of a made-up run."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flyte_ddp.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    CheckpointWritten,
    EpochFinished,
    Event,
    HistogramsTaken,
    PredictionsMade,
    Reported,
    RunFinished,
    RunStarted,
    RunState,
    TimeSpent,
    read_history,
)
from flyte_ddp.launch.control.driver import Dispatcher
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.metrics import RunFigures
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.reports.run import Report
from tests.support.short_run import (
    epoch_finished,
    epoch_of_events,
    feed,
    loaded,
    predictions_made,
    reported,
    run_finished,
    started,
    whole_run,
)

# --- progress bar
# --------------------------------------------------------------------------------------------------


def test_the_time_left_follows_the_pace_of_the_ranks_that_started_last() -> None:
    now, stream = time.time(), io.StringIO()
    bar, report, state = ProgressBar(stream), Report(), RunState()
    steps = [replace(reported(step), at=now + 100 * step) for step in (1, 2, 3)]
    for event in (started(), loaded(), *steps):
        feed(bar, event)
        feed(report, event)
        state.handle(event)
    assert state.seconds_left(now + 300) == pytest.approx(900)
    assert state.seconds_left(now + 400) == pytest.approx(800)
    assert "Time left" in [each.name for each in report.content()["tiles"]]
    bar._next_step_line = 0.0
    feed(bar, replace(reported(4), at=now + 400))
    assert stream.getvalue().splitlines()[-1].endswith(" left")
    for again in (started(), loaded(2), replace(reported(3), at=now + 500)):
        state.handle(again)
    assert state.seconds_left(now + 500) is None


def test_the_line_about_a_resumed_run_counts_the_steps_that_are_done_again() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    lost = [AttemptEnded(step, "a rank was killed", 0.0) for step in (7, 8, 9, 11)]
    skipped = loaded(4, skipped=["/c/step-8.pt is unusable"])
    for event in (started(), loaded(), lost[0], started(), skipped, lost[1]):
        feed(bar, event)
    for event in (RunStarted("train", 2), loaded(7), lost[2], loaded(9), lost[3], loaded(0)):
        feed(bar, event)
    lines = [line for line in stream.getvalue().splitlines() if "step" in line]
    assert lines == [
        "warning: /c/step-8.pt is unusable",
        "resumed at step 4 of 12 from /c/step-4.pt: 3 steps again",
        "resumed at step 7 from /c/step-7.pt: 1 step again",
        "resumed at step 9 from /c/step-9.pt",
        "started again at step 0: 11 steps again",
    ]


def test_without_a_terminal_the_run_is_printed_in_plain_lines() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    for event in [*whole_run(), run_finished()]:
        feed(bar, event)
    bar.write("rank 1: a line of its own")
    bar.close(None)
    lines = stream.getvalue().splitlines()
    assert not set("\r\x1b") & set(stream.getvalue())
    for expected in (
        "digits, ",
        "scikit-learn's digits (1,797 images)",
        "2 ranks",
        "cpu",
        "431,080 parameters",
    ):
        assert expected in lines[0]
    assert lines[1] == (
        "epoch 1/3, step 1 of 12: loss 1, learning rate 0.1, gradient norm 2.5, 1,234 samples/s"
    )
    assert [line for line in lines if "step " in line] == [lines[1]], (
        "steps of the next ten seconds are left out"
    )
    assert [line for line in lines if line.startswith("epoch 2/3")] == [
        "epoch 2/3: train loss 0.5, test loss 1, accuracy 95.00%, 1,000 samples/s"
    ]
    assert lines[-2:] == [
        "best test loss 0.6667 after epoch 3; the model state is that of epoch 3",
        "rank 1: a line of its own",
    ]


def test_on_a_terminal_a_bar_moves_and_lines_stay_above_it() -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    with os.fdopen(slave, "w") as stream:
        bar = ProgressBar(stream)
        for event in [started(), loaded(), *epoch_of_events(1)]:
            feed(bar, event)
        bar.write("rank 1: a line of its own")
        for event in (started(), loaded(4), *epoch_of_events(2)):  # the ranks were started again
            feed(bar, event)
        bar.close(None)
        contents = b""
        # A terminal passes on parts of the text.
        while select.select([master], [], [], 0.5)[0]:
            contents += os.read(master, 1 << 16)
    shown = contents.decode()
    os.close(master)
    assert re.search(r"epoch 1/3: .*4/12 .*loss 0\.25, learning rate 0\.1", shown)
    assert re.search(r"epoch 2/3: .*8/12", shown)
    # Text that is left when every line is redrawn: the part after its last carriage return.
    left = [
        re.sub(r"\x1b\[A", "", line).split("\r")[-1].strip()
        for line in shown.replace("\r\n", "\n").split("\n")
    ]
    assert [line for line in left if line and not line.startswith(("digits", "resumed"))] == [
        "epoch 1/3: train loss 1, test loss 2, accuracy 90.00%, 1,000 samples/s",
        "rank 1: a line of its own",
        "epoch 2/3: train loss 0.5, test loss 1, accuracy 95.00%, 1,000 samples/s",
    ]


# --- history
# --------------------------------------------------------------------------------------------------


def test_history_reads_back_all_events_without_images(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"
    history = HistoryFile(path)
    events = [*whole_run(), run_finished()]
    for event in events:
        history.handle(event)
    followed = read_history(path)  # The file is still open.
    history.close(None)
    assert followed == [
        event for event in events if not isinstance(event, (PredictionsMade, HistogramsTaken))
    ]
    assert all(json.loads(line)["time"] > 1.7e9 for line in path.read_text().splitlines())


def test_a_torn_last_line_is_ignored_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = HistoryFile(path)
    history.handle(reported(1))
    history.handle(reported(2))
    history.close(None)
    path.write_bytes(path.read_bytes()[:-9])
    assert read_history(path) == [reported(1)]
    continued = HistoryFile(path)
    continued.handle(reported(3))
    continued.close(None)
    assert read_history(path) == [reported(1), reported(3)]
    path.write_text('{"time": 1.0, "event": "Nonsense"}\n')
    with pytest.raises(ValueError, match=r"history\.jsonl, line 1"):
        read_history(path)


def test_history_of_a_resumed_run_has_every_epoch_once(tmp_path: Path) -> None:
    def epochs(path: Path, events: list[Event]) -> list[int]:
        history = HistoryFile(path)
        for event in events:
            history.handle(event)
        history.close(None)
        return [event.epoch for event in read_history(path) if isinstance(event, EpochFinished)]

    assert epochs(tmp_path / "in another pod", [started(), loaded(8), epoch_finished(3)]) == [
        1,
        2,
        3,
    ]
    assert epochs(
        tmp_path / "same", [started(), loaded(), epoch_finished(1), epoch_finished(2)]
    ) == [1, 2]
    assert epochs(tmp_path / "same", [started(), loaded(8), epoch_finished(3)]) == [1, 2, 3]


def _stamped(events: list[Event], times: list[int]) -> list[Event]:
    return [replace(event, at=at) for event, at in zip(events, times, strict=True)]


def test_the_wall_time_is_what_it_went_to(tmp_path: Path) -> None:
    """Two attempts: the second one resumes at step 2, so what the first one did after that is done
    again.
    """
    saved = CheckpointSaved(2, "/c/2.pt", False, seconds=0.5)
    events = _stamped(
        [
            AttemptStarted(2, launched_at=1000.0, waited_seconds=7.0),
            started(),
            loaded(),
            reported(2),
            saved,
            reported(3),
            AttemptEnded(3, "node 1 was lost", idle_seconds=20.0),
            AttemptStarted(1, launched_at=1000.0, waited_seconds=30.0),
            started(),
            loaded(2),
            epoch_finished(1),  # The epoch contains an evaluation of 0.5 s.
            predictions_made(),
            # The checkpoint is written beside the training, and divides none of its time.
            CheckpointWritten(4, "/c/4.pt", True),
            run_finished(),
        ],
        [1010, 1014, 1014, 1016, 1017, 1018, 1040, 1072, 1075, 1075, 1085, 1086, 1088, 1089],
    )
    spent = RunState.of(events).time_spent()
    assert spent == TimeSpent(
        stepping=2.5 + 9.5,
        evaluating=0.5,
        checkpoint_stalls=0.5 + 4.0,
        waiting_for_nodes=7.0 + 30.0,
        starting=3.0 + 4.0,
        restarting=20.0 + 2.0 + 3.0,
        redone_steps=1.0 + 2.0,
    )
    assert spent.wall == 89.0
    assert spent.goodput == pytest.approx(12.5 / 89)
    # At any moment before the end, up to then.
    for number in range(1, len(events)):
        assert RunState.of(events[:number]).time_spent(until=2000.0).wall == pytest.approx(1000.0)
    assert RunState.of(events).time_spent(until=2000.0).wall == 89.0
    # These events have no times.
    assert RunState.of([started(), *epoch_of_events(1)]).time_spent(until=2000.0).wall == 0.0

    history = HistoryFile(tmp_path / "history.jsonl")
    for event in events:
        history.handle(event)
    history.close(None)
    last = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[-1])
    assert (last.pop("event"), TimeSpent(**{name: last[name] for name in spent.parts()})) == (
        "TimeSpent",
        spent,
    )
    assert RunState.of(read_history(tmp_path / "history.jsonl")).time_spent() == spent


def test_the_time_and_number_of_announced_losses_are_counted_apart_from_restarts() -> None:
    """A node leaves after step 2, and 6 s later its replacement is there; then a rank is killed."""
    told = [
        *(
            AttemptStarted(2, 1000.0, 0.0),
            started(),
            loaded(),
            reported(2),
            CheckpointSaved(2, "/c/2.pt", False, 0.0),
        ),
        *(
            AttemptEnded(2, "node 1 leaves", idle_seconds=1.0, num_leaving=1),
            AttemptStarted(2, 1000.0, 6.0),
        ),
        *(
            started(),
            loaded(2),
            reported(3),
            AttemptEnded(3, "a rank was killed", 0.0),
            AttemptStarted(2, 1000.0, 0.0),
        ),
        *(started(), loaded(2), reported(3)),
    ]
    times = [
        1000,
        1000,
        1000,
        1002,
        1002,
        1003,
        1009,
        1011,
        1011,
        1012,
        1012,
        1013,
        1014,
        1014,
        1016,
    ]
    state = RunState.of(_stamped(told, times))
    assert (state.num_starts, state.num_announced_losses) == (3, 1)
    assert state.time_spent() == TimeSpent(
        stepping=2.0 + 2.0,
        announced_losses=1.0 + 2.0,
        waiting_for_nodes=6.0,
        restarting=1.0 + 1.0,
        redone_steps=1.0,
    )
    figures = RunFigures({})
    for event in told:
        feed(figures, event)
    counted = figures.values()
    assert (counted["flyte_ddp_restarts_total"], counted["flyte_ddp_announced_losses_total"]) == (
        1,
        1,
    )


@pytest.mark.parametrize(("resumed", "redone"), [(2, 5.0), (4, 3.0), (6, 1.0), (7, 0.0)])
def test_steps_that_memory_had_are_not_done_again(resumed: int, redone: float) -> None:
    """A rank is killed at step 7. The store has step 2, and reports come every four steps."""
    told = [
        *(
            AttemptStarted(2, 1000.0, 0.0),
            started(),
            loaded(),
            CheckpointSaved(2, "/c/2.pt", False, 0.0),
            reported(4),
        ),
        *(
            AttemptEnded(7, "a rank was killed", 0.0),
            AttemptStarted(2, 1000.0, 0.0),
            started(),
            loaded(resumed),
        ),
    ]
    times = [1000, 1000, 1000, 1002, 1004, 1007, 1007, 1008, 1008]
    spent = RunState.of(_stamped(told, times)).time_spent()
    assert (spent.stepping, spent.redone_steps) == pytest.approx((7.0 - redone, redone))


def test_time_between_two_processes_of_a_run_is_no_wait() -> None:
    first = _stamped(
        [AttemptStarted(1, 1000.0, 0.0), started(), loaded(), reported(4)], [1001, 1002, 1002, 1004]
    )
    again = _stamped(
        [AttemptStarted(1, 5000.0, 0.0), started(), loaded(), reported(1)], [5001, 5003, 5003, 5004]
    )
    assert RunState.of(first + again).time_spent() == TimeSpent(
        stepping=1.0, starting=2.0, restarting=3.0, redone_steps=2.0
    )


# --- a new observer
# --------------------------------------------------------------------------------------------------


class Table:
    """An observer of a few lines: it sees every figure of a recipe's run and of a function's, and
    asks for no kind.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, float | None, str, float]] = []

    def handle(self, event: Event) -> None:
        figures = event.figures()
        x = figures.step if figures.axis == "step" else figures.epoch
        self.rows += [
            (figures.axis, x, name, value) for name, value in figures.values.items() if figures.axis
        ]

    def close(self, error: BaseException | None) -> None:
        self.rows.append(("end", None, "failed", float(error is not None)))


def test_a_new_observer_sees_the_figures_of_every_program() -> None:
    table = Table()
    with Dispatcher([table]) as dispatcher:
        for event in (
            *(started(), loaded(), reported(4), epoch_finished(1), run_finished()),
            *(RunStarted("train", 2), Reported(1, None, {"reward": 0.5}), RunFinished(1, 1.0)),
        ):
            dispatcher.emit(event)
    assert ("step", 4, "loss", 0.25) in table.rows
    assert ("epoch", 1, "accuracy", 0.9) in table.rows
    assert table.rows[-2:] == [("step", 1, "reward", 0.5), ("end", None, "failed", 0.0)]


class Both:
    """Counts the events that it got, and the reports that the state had then."""

    needs_reports = True

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.may_go_on = threading.Event()

    def handle(self, event: Event, state: RunState) -> None:
        self.may_go_on.wait()
        if isinstance(event, Reported):
            self.seen.append((event.step, state.reports[-1].step))

    def close(self, error: BaseException | None) -> None:
        pass


def test_a_slow_listener_gets_each_event_with_the_state_that_ends_with_it() -> None:
    slow, events = Both(), [started(), loaded(), *map(reported, range(1, 9))]
    with Dispatcher([slow]) as dispatcher:
        for event in events:
            dispatcher.emit(event)
        slow.may_go_on.set()
    assert slow.seen == [(step, step) for step in range(1, 9)]
    assert dispatcher.state.reports == events[2:]


def test_a_listener_may_take_the_event_alone_or_the_state_too() -> None:
    seen: dict[str, list[int]] = {name: [] for name in ("alone", "option", "both", "default")}

    def take_alone(event: Event) -> None:
        seen["alone"].append(event.step)  # type: ignore[union-attr]

    def take_option(event: Event, verbose: bool = False) -> None:
        assert not verbose
        take("option", event, None)

    def take(name: str, event: Event, state: RunState | None) -> None:
        seen[name].append(event.step)  # type: ignore[union-attr]
        assert state is None or state.last_step == event.step  # type: ignore[union-attr]

    def take_both(event: Event, state: RunState) -> None:
        take("both", event, state)

    def take_default(event: Event, state: RunState | None = None) -> None:
        assert state is not None
        take("default", event, state)

    every: list[Event] = []
    listeners = [
        SimpleNamespace(handle=each, close=lambda error: None)
        for each in (take_alone, take_option, take_both, take_default, every.append)
    ]
    with Dispatcher(listeners) as dispatcher:
        for number in (1, 2):
            dispatcher.emit(epoch_finished(number))
    assert list(seen.values()) == [[4, 8]] * 4
    assert len(every) == 2


def test_reports_are_kept_only_for_a_listener_that_asks_for_them() -> None:
    for listeners, num_reports in (([Table()], 0), ([Table(), Report()], 3)):
        with Dispatcher(listeners) as dispatcher:
            for event in (started(), loaded(), *map(reported, (1, 2, 3))):
                dispatcher.emit(event)
        assert len(dispatcher.state.reports) == num_reports


def test_figures_for_another_thread_are_those_of_the_last_event_that_was_handled() -> None:
    now, figures, state = time.time(), RunFigures({}), RunState()
    for event in (started(), loaded(), *(replace(reported(x), at=now + x) for x in (1, 2))):
        state.handle(event)
        figures.handle(event, state)
    before = figures.values()
    # The state has these events before the listener is called with them.
    for event in (AttemptEnded(2, "a rank was killed", 0.0), started(), run_finished()):
        state.handle(event)
    after = figures.values()
    assert 0 < after.pop("flyte_ddp_remaining_seconds") <= before.pop("flyte_ddp_remaining_seconds")
    assert after == before
    assert after["flyte_ddp_restarts_total"] == 0
