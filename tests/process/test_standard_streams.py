"""A training that loses its standard streams: closed, on a full disk, without a reader, on a
terminal that was hung up.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pty
import subprocess
import sys

import pytest

from flyte_ddp.events import RunState
from flyte_ddp.launch.control.driver import Dispatcher
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.weights_and_biases import OWN_DIRECTORIES, Wandb
from tests.support.runs import REPOSITORY
from tests.support.short_run import feed, run_finished, whole_run
from tests.support.wandb_log import rows_of

CLOSED, FULL, BROKEN, HUNG_UP = "closed", "full disk", "no reader", "terminal hung up"


def open_stream(state: str, stack: contextlib.ExitStack) -> tuple[int, int]:
    """Return the descriptor of a stream in this state, and of the other end of a terminal; -1 for
    none.
    """
    if state == FULL:
        ends = os.open("/dev/full", os.O_WRONLY), -1
    elif state == HUNG_UP:
        ends = pty.openpty()[::-1]
    else:
        reader, writer = os.pipe()
        os.close(reader)
        ends = writer, -1
    stack.callback(os.close, ends[0])
    return ends


@pytest.mark.long
@pytest.mark.parametrize(
    ("output", "error"),
    [(CLOSED, FULL), (BROKEN, HUNG_UP), (HUNG_UP, BROKEN), (FULL, CLOSED)],
)
def test_a_training_ends_well_without_its_streams(output, error, tmp_path):
    closed = [number for number, state in enumerate((CLOSED, output, error)) if state == CLOSED]
    command = [sys.executable, "-m", "tests.support.lost_streams", str(tmp_path)]
    environment = {**os.environ, "HOME": "/proc/self/nowhere", "WANDB_MODE": "disabled"}
    with contextlib.ExitStack() as stack:
        ends = [open_stream(state, stack) for state in (output, error)]
        program = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=ends[0][0], stderr=ends[1][0], start_new_session=True,  # noqa: E501
            preexec_fn=lambda: [os.close(number) for number in closed],
        )  # fmt: skip
        stack.close()  # Only the program has the ends of these streams now.
        for _, terminal in ends:
            if terminal >= 0:
                with contextlib.suppress(OSError):  # The program may have ended without any output.
                    os.read(terminal, 1)  # The program has begun.
                os.close(terminal)
        assert program.wait() == 0
    assert (tmp_path / "epochs").read_text() == "2"
    lines = (tmp_path / "out" / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[-2])["event"] == "RunFinished"
    assert ">finished<" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "export" / "model_state.safetensors").is_file()


class Broken(io.StringIO):
    """An output that fails in one way, for a bar that is drawn live or not."""

    encoding = "ascii"

    def __init__(self, error: Exception, is_terminal: bool) -> None:
        super().__init__()
        self.error, self.is_terminal = error, is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    "error", [OSError(28, "full"), BrokenPipeError(), ValueError("closed file")], ids=repr
)
def test_only_the_bar_is_dropped_where_its_output_fails(error, is_terminal):
    state, bar = RunState(), ProgressBar(Broken(error, is_terminal))
    handler = logging.StreamHandler()
    handler.emit = lambda record: bar.write(record.getMessage()) or _fail(error)
    logging.getLogger("flyte_ddp").addHandler(handler)
    try:
        with Dispatcher([bar, state]) as dispatcher:
            for event in [*whole_run(), run_finished()]:
                dispatcher.emit(event)
                bar.write("a rank's line")
    finally:
        logging.getLogger("flyte_ddp").removeHandler(handler)
    assert state.finished == run_finished()
    assert len(state.epochs) == 3


def _fail(error: Exception) -> None:
    raise error


def test_lines_that_an_output_cannot_encode_are_escaped():
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="strict")
    bar = ProgressBar(output)
    for line in ("caf\xe9", "\U0001f600", "caf\udce9"):
        bar.write(line)
    bar.close(None)
    assert output.buffer.getvalue() == b"caf\xe9\n\\U0001f600\ncaf\\udce9\n"


def test_wandb_records_where_home_cannot_be_written(tmp_path, monkeypatch):
    for variable in OWN_DIRECTORIES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", "/proc/self/nowhere")
    monkeypatch.setenv("WANDB_MODE", "offline")
    lines: list[str] = []
    wandb = Wandb("project", "run-1", tmp_path, say=lines.append)
    for event in [*whole_run(), run_finished("")]:
        feed(wandb, event)
    wandb.close(None)
    assert not [line for line in lines if "failed" in line]
    assert rows_of(tmp_path)
