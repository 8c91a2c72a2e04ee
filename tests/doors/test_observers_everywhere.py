"""History, W&B, Prometheus, report and `max_hours` work for functions and scripts as they do for
recipes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flytekit import task
from flytekit.core.context_manager import FlyteContextManager

from flyte_ddp import events, session
from flyte_ddp.__main__ import main
from flyte_ddp.flyte.failures import UserError
from flyte_ddp.flytekit_plugin import Distributed
from flyte_ddp.observers.metrics import PORT_VARIABLE
from tests.support.ports import free_port

SCRIPT = """
import os, time, urllib.request
from flyte_ddp import session
for step in range(1, 1000):
    session.report(step=step, loss=1 / step)
    if step == 2 and os.environ["RANK"] == "0" and os.environ.get("SCRAPED"):
        page = b""
        while b"flyte_ddp_step{" not in page:  # until the driver has the event
            page = urllib.request.urlopen(f"http://127.0.0.1:{os.environ['FLYTE_DDP_METRICS_PORT']}/metrics").read()
        open(os.environ["SCRAPED"], "wb").write(page)
    if session.stop_requested or step == int(os.environ["STEPS"]):
        break
    time.sleep(0.01)
print("trained")
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment without a key of W&B, and with a free port for Prometheus."""
    for name in ("WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "records"))
    monkeypatch.setenv(PORT_VARIABLE, str(free_port()))
    monkeypatch.setenv("SCRAPED", str(tmp_path / "scraped"))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def reported_steps(history: Path) -> list[int]:
    return [
        event.step for event in events.read_history(history) if isinstance(event, events.Reported)
    ]


@pytest.mark.long
def test_a_script_is_recorded_as_a_recipe_is(environment, monkeypatch, capfd):
    monkeypatch.setenv("STEPS", "3")
    files = (
        "--history",
        str(environment / "history.jsonl"),
        "--report",
        str(environment / "report.html"),
    )
    assert main(["run", *files, "--wandb", "scripts", str(environment / "train.py")]) == 0
    assert reported_steps(environment / "history.jsonl") == [1, 2, 3]
    report = (environment / "report.html").read_text()
    assert all(text in report for text in ("train.py", ">finished<", "[rank 0] trained"))
    assert 'flyte_ddp_step{script="train.py"} ' in (environment / "scraped").read_text()
    assert list((environment / "records").rglob("offline-run-*-train-*/*.wandb"))
    assert "WANDB_MODE is offline, so the run is recorded offline" in capfd.readouterr().err


def test_max_hours_ends_a_script_after_a_checkpoint_and_is_an_error_that_says_so(
    environment, monkeypatch, capfd
):
    monkeypatch.setenv("STEPS", "1000")
    monkeypatch.delenv("SCRAPED")
    begun = ("run", "--max-hours", "0.0006", str(environment / "train.py"))
    assert main(begun) == 2
    assert re.search(
        r"error: max_hours: .* its limit of 0\.0006 h.*: the run was stopped at step \d+",
        capfd.readouterr().err,
    )


def test_a_file_that_cannot_be_written_is_refused_before_any_rank_starts(environment, capsys):
    (environment / "file").touch()
    assert (
        main(
            [
                "run",
                "--history",
                str(environment / "file" / "history"),
                str(environment / "train.py"),
            ]
        )
        == 2
    )
    expected = r"error: --history, --report: expected files that can be written, got .*/file"
    assert re.search(expected, capsys.readouterr().err)
    assert main(["run", "--max-hours", "-1", str(environment / "train.py")]) == 2
    assert capsys.readouterr().err == (
        "error: max_hours: expected a finite number of at least 0 (hours), got -1.0\n"
    )
    assert main(["run", "--max-cost", "-1", str(environment / "train.py")]) == 2
    assert capsys.readouterr().err == (
        "error: max_cost: expected a finite number of at least 0, got -1.0\n"
    )


@task(task_config=Distributed(wandb="functions"))
def recorded() -> str:
    exec(compile(SCRIPT, "train.py", "exec"), {})
    return session.checkpoints


def test_a_functions_task_is_recorded_as_a_recipes_is(environment, monkeypatch, forked_functions):
    monkeypatch.setenv("STEPS", "3")
    context = FlyteContextManager.current_context()
    params = context.user_space_params.with_enable_deck(True).build()
    state = context.execution_state.with_params(user_space_params=params)
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        checkpoints = recorded()
        report = {deck.name: deck.html for deck in params.decks}["Training"]
    (history,) = map(Path, re.findall(r"/[^<>\s]*/history\.jsonl", report))
    assert reported_steps(history) == [1, 2, 3]
    assert 'flyte_ddp_step{run="",task="recorded"} ' in (environment / "scraped").read_text()
    run_id = Path(checkpoints, "tracker-run-id").read_text()
    assert list(history.parent.rglob(f"offline-run-*-{run_id}/*.wandb"))


@task(task_config=Distributed(max_hours=0.0006))
def limited() -> None:
    exec(compile(SCRIPT, "train.py", "exec"), {})


def test_max_hours_ends_a_functions_task_for_good(environment, monkeypatch, forked_functions):
    monkeypatch.setenv("STEPS", "1000")
    monkeypatch.delenv("SCRAPED")
    with pytest.raises(UserError, match=r"max_hours: the run has reached its limit of 0\.0006 h"):
        limited()
