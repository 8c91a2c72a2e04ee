"""TensorBoard's observer, read back by TensorBoard's own reader."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
from flytekit import task

from flyte_ddp import session
from flyte_ddp.__main__ import main
from flyte_ddp.config import extras
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import Event, PictureShown
from flyte_ddp.flyte import Distributed
from flyte_ddp.launch.run_observers import keep_run_id, make_observers
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.tensorboard import Tensorboard
from flyte_ddp.storage import Storage
from tests.support.runs import fork_functions
from tests.support.short_run import epoch_of_events, feed, loaded, replay, reported, started

pytest.importorskip("tensorboard")


def load(directory: Path) -> Any:
    """Return TensorBoard's view of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each curve that TensorBoard shows of a run."""
    found = load(directory)
    curves = {}
    for name in found.Tags()["scalars"]:
        curves[name] = [(each.step, each.value) for each in found.Scalars(name)]
    return curves


def write(place: str | Path, events: list[Event], **options: Any) -> None:
    options = {"say": print, **options}
    replay(Tensorboard(str(place), "one", **options), events)


@pytest.mark.parametrize("is_in_store", [False, True])
def test_repeated_steps_are_drawn_once(tmp_path: Path, is_in_store: bool) -> None:
    place = f"memory://{tmp_path.name}" if is_in_store else str(tmp_path)
    first = [started(), loaded(), *epoch_of_events(1), *epoch_of_events(2)]
    write(place, [*first, started(world_size=4), loaded(4), reported(5), reported(6)])
    directory = tmp_path / "one"
    if is_in_store:
        directory.mkdir()
        store = Storage(f"{place}/one")
        for name in store.names():
            (directory / name).write_bytes(store.read(name))
    assert [step for step, _ in read(directory)["train/loss"]] == [*range(1, 7)]


def test_another_process_continues_the_run(tmp_path: Path) -> None:
    picture = PictureShown(4, "mine", b"png")
    write(tmp_path, [started(), loaded(), *epoch_of_events(1), *epoch_of_events(2), picture])
    (file,) = (tmp_path / "one").iterdir()
    # The file gets the name of an earlier second.
    file.rename(file.with_name("events.out.tfevents.1"))
    write(tmp_path, [started(), loaded(4), *epoch_of_events(2), *epoch_of_events(3)])
    curves = read(tmp_path / "one")
    assert [step for step, _ in curves["train/loss"]] == [*range(1, 13)]
    assert [step for step, _ in curves["epoch/test_loss"]] == [4, 8, 12]
    tags = load(tmp_path / "one").Tags()
    assert set(tags["histograms"]) == {"parameters/fc.weight", "gradients/fc.weight"}
    assert tags["images"] == ["pictures/mine"]
    assert tags["tensors"] == ["config"]


def test_a_lost_directory_gets_the_epochs_of_earlier_attempts(tmp_path: Path) -> None:
    write(tmp_path, [started(), loaded(8), reported(9)])
    curves = read(tmp_path / "one")
    assert [step for step, _ in curves["epoch/test_loss"]] == [4, 8]
    assert [step for step, _ in curves["train/loss"]] == [9]


def test_a_directory_that_cannot_be_written_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a file")
    lines: list[str] = []
    write(tmp_path, [started(), loaded(), reported(1)], say=lines.append)
    (line,) = lines
    assert line.startswith("TensorBoard failed and records no more of this run")


def test_any_name_of_a_script_makes_an_id_that_trackers_take(tmp_path: Path) -> None:
    options = argparse.Namespace(
        history="",
        report="",
        wandb="",
        mlflow="",
        checkpoints="",
        tensorboard=str(tmp_path),
    )
    listeners, _ = make_observers(options, "a:b;c,d#e?f'g h" + "x" * 300 + ".py", ProgressBar())
    (tracker,) = [each for each in listeners if isinstance(each, Tensorboard)]
    for event in [started(), loaded(), reported(1)]:
        feed(tracker, event)
    tracker.close(None)
    (directory,) = tmp_path.iterdir()
    assert re.fullmatch(r"a-b-c-d-e-f-g-hx+-[0-9a-f]{8}", directory.name)
    assert len(directory.name) < 80
    assert "train/loss" in read(directory)


def test_a_run_keeps_the_id_that_an_earlier_attempt_wrote(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    assert [keep_run_id(storage, new) for new in ("run-1", "run-2")] == ["run-1", "run-1"]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    with pytest.raises(
        ConfigError, match=r"tensorboard: .* pip install 'flyte-ddp\[tensorboard\]'"
    ):
        Tensorboard("logs", "one")


SCRIPT = """
from flyte_ddp import session
for step in (1, 2):
    session.report(step=step, loss=1 / step)
"""


@pytest.mark.parametrize("kind", ["script", "task"])
def test_functions_and_scripts_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fork_functions(monkeypatch)

    @task(task_config=Distributed(tensorboard=str(tmp_path / "logs")))
    def recorded() -> None:
        for step in (1, 2):
            session.report(step=step, loss=1 / step)

    (tmp_path / "train.py").write_text(SCRIPT)
    script = ["run", "--tensorboard", str(tmp_path / "logs"), str(tmp_path / "train.py")]
    assert not (main(script) if kind == "script" else recorded())
    (directory,) = (tmp_path / "logs").iterdir()
    assert read(directory)["train/loss"] == [(1, 1.0), (2, 0.5)]
