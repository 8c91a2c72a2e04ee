"""MLflow's observer, by MLflow's own client: to files, and to a server that is away, refuses or
hangs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from flytekit import task

from flyte_ddp import session
from flyte_ddp.__main__ import main
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished, Event
from flyte_ddp.events.history import to_line
from flyte_ddp.flyte import Distributed
from flyte_ddp.flyte.failures import UserError
from flyte_ddp.launch import distributed
from flyte_ddp.observers import mlflow, recorder
from flyte_ddp.observers.mlflow import Mlflow
from flyte_ddp.process.invocation import find_flyte_ddp_command
from flyte_ddp.project.settings import load_settings
from flyte_ddp.storage import read_file
from tests.support.ports import free_port
from tests.support.runs import fork_functions
from tests.support.short_run import (
    epoch_finished,
    epoch_of_events,
    feed,
    loaded,
    replay,
    run_finished,
    started,
    whole_run,
    with_model,
)

TOKEN = "secret-of-mlflow"


@pytest.fixture
def finished(tmp_path: Path) -> Event:
    (tmp_path / "model_state.safetensors").write_bytes(b"weights")
    return replace(run_finished(""), export_url=str(tmp_path), exported=["model_state.safetensors"])


class Refusing(BaseHTTPRequestHandler):
    """A server that knows no key."""

    seen: list[str] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers["Authorization"])
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"who are you?")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a directory that MLflow's client keeps runs in, without a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return f"file://{tmp_path}/mlruns"


def find_run(uri: str, name: str) -> tuple[Any, Callable[[str], list[int]]]:
    """Return the one run of this name, and what returns the steps of one of its metrics."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`flyte_ddp.run` = '{name}'")
    return run, lambda metric: [
        each.step for each in client.get_metric_history(run.info.run_id, metric)
    ]


@pytest.mark.long
def test_all_attempts_are_one_run_without_double_points(files: str) -> None:
    options: dict[str, Any] = {"say": print, "config": {"sweep": {"lr": 0.1}, "a b=c/../é": 1}}
    replay(
        Mlflow(files, "tests", "one", **options),
        [started(), loaded(), *epoch_of_events(1)],
        RuntimeError(),
    )
    assert find_run(files, "one")[0].info.status == "FAILED"
    # Another attempt, with more ranks, from the checkpoint of the first epoch; its gang starts
    # again once.
    alike = {"f1@0.5": 0.1, "f1#0.5": 0.2, "f1_0.5": 0.3}
    odd = replace(epoch_finished(3), metrics={"f1(macro)": 0.5, "accuracy@5": 0.25, **alike})
    again = [
        started(world_size=4),
        loaded(4),
        *epoch_of_events(2),
        started(world_size=3),
        loaded(4),
    ]
    listener = Mlflow(files, "tests", "one", **options)
    last = [odd if isinstance(event, EpochFinished) else event for event in epoch_of_events(3)]
    replay(listener, [*again, *epoch_of_events(2), *last, run_finished("")])
    run, steps = find_run(files, "one")
    assert run.info.status == "FINISHED"
    assert run.info.run_id in listener.url
    parameters = {
        "program": "digits",
        "learning_rate": "0.1",
        "epochs": "3",
        "sweep.lr": "0.1",
        "é": "1",
    }
    assert run.data.params.items() >= parameters.items()
    assert run.data.tags["world_size"] == "3"
    assert steps("train/loss") == [*range(1, 13)]
    curves = {name: value for name, value in run.data.metrics.items() if "0.5" in name}
    assert sorted(curves.values()) == [0.1, 0.2, 0.3]
    assert curves["epoch/f1_0.5"] == 0.1
    assert steps("epoch/test_loss") == [1, 2, 3]
    assert (run.data.metrics["epoch/f1_macro_"], run.data.metrics["epoch/accuracy_5"]) == (
        0.5,
        0.25,
    )


@pytest.mark.parametrize("location", ["memory://mlflow", "mlflow-artifacts:/1"])
def test_a_history_is_uploaded_later_with_its_files_to_the_server_or_the_store_that_it_names(
    files: str, tmp_path: Path, finished: Event, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    from mlflow import MlflowClient

    MlflowClient(files).create_experiment("tests", artifact_location=location)
    (history := tmp_path / "a.jsonl").write_text("".join(map(to_line, [*with_model(), finished])))
    sent: list[str] = []

    def send(client: object, run: str, directory: str) -> None:
        sent.extend(str(each.relative_to(directory)) for each in Path(directory).rglob("*.*"))

    monkeypatch.setattr(MlflowClient, "log_artifacts", send)
    for _ in range(2):
        mlflow.main([str(history), files, "tests", "late"])
    run, steps = find_run(files, "late")
    assert (steps("train/loss"), run.info.status) == ([*range(1, 13)], "FINISHED")
    if location.startswith("memory"):
        assert read_file(f"{run.info.artifact_uri}/model/model_state.safetensors") == b"weights"
        assert b"digits" in read_file(f"{run.info.artifact_uri}/card/README.md")
    else:
        expected = {"card/README.md", "card/run_card.json", "model/model_state.safetensors"}
        assert {*sent} == expected


class Hanging(Refusing):
    """A server that does not answer until it ends."""

    ends = threading.Event()

    def do_GET(self) -> None:
        self.ends.wait()


@pytest.mark.parametrize("kind", ["away", "refuses", "hangs"])
def test_a_server_that_fails_costs_the_training_one_line(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(Mlflow, "close_timeout", 0.5 if kind == "hangs" else 600)
    monkeypatch.setattr(Hanging, "ends", threading.Event())
    lines: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hanging if kind == "hangs" else Refusing) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{free_port() if kind == 'away' else server.server_port}"
        keys = {"MLFLOW_TRACKING_TOKEN": TOKEN}
        replay(
            Mlflow(url, "tests", "r1", say=lines.append, keys=keys),
            [*whole_run(), run_finished("")],
        )
        Hanging.ends.set()
        server.shutdown()
    (line,) = lines
    assert line.startswith(
        "MLflow failed and records no more of this run; the training continues: "
    )
    command = f"{find_flyte_ddp_command()} mlflow history.jsonl {url} tests r1"
    assert line.endswith(f"; to upload the rest later: {command}")
    assert ("who are you?" in line) == (kind == "refuses")
    assert ("TimeoutError: it did not finish within" in line) == (kind == "hangs")
    assert TOKEN not in line
    assert {*Refusing.seen} <= {f"Bearer {TOKEN}"}


def test_events_beyond_the_bound_of_the_queue_end_the_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "MAX_EVENTS", 4)
    is_open = threading.Event()
    monkeypatch.setattr(Mlflow, "_open", lambda self, *arguments: is_open.wait())
    lines: list[str] = []
    listener = Mlflow("http://127.0.0.1:1", "tests", "r1", say=lines.append)
    for event in whole_run():
        feed(listener, event)
    is_open.set()
    assert len(lines) == 1
    assert "TimeoutError: it is 4 events behind" in lines[0]


@pytest.mark.long
def test_every_task_finds_the_server_that_registration_was_given(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f'tracking = "mlflow"\n{Path("settings.toml").read_text()}')
    command = (
        "import json; from flyte_ddp.flyte.resources import *\n"
        "tasks = (pod(SETTINGS.small), pod(SETTINGS.training, trains=True))\n"
        "print(json.dumps([task['environment'] for task in tasks]))"
    )
    given = {**os.environ, "TRACKING": "mlflow", "MLFLOW_TRACKING_URI": "http://mlflow.team:5000"}
    done = subprocess.run(
        [sys.executable, "-c", command], env=given, capture_output=True, check=True, text=True
    )
    for environment in json.loads(done.stdout.splitlines()[-1]):
        assert load_settings(settings, environment).mlflow_url == "http://mlflow.team:5000"


SCRIPT = """
import os
from flyte_ddp import session
assert "MLFLOW_TRACKING_TOKEN" not in os.environ
for step in (1, 2):
    session.report(step=step, loss=1 / step)
"""


def run_script(place: Path, *options: str) -> int:
    (place / "train.py").write_text(SCRIPT)
    return main(["run", "--checkpoints", str(place / "c"), *options, str(place / "train.py")])


@task(task_config=Distributed(mlflow="tests"))
def recorded(width: int = 3) -> str:
    exec(compile(SCRIPT, "train.py", "exec"), {})
    return session.checkpoints


def run_recipe(place: Path) -> str:
    from workflows.single_node import single_node_training_wf

    checkpoints = str(place / "recipe")
    single_node_training_wf(
        recipe="tests.support.recipes.Tiny", num_processes=1, checkpoints=checkpoints
    )
    return checkpoints


@pytest.mark.long
def test_functions_scripts_and_recipes_are_recorded(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_functions(monkeypatch)
    for module in (mlflow, distributed):
        monkeypatch.setattr(module, "find_server", lambda: files)
    monkeypatch.setattr("flyte_ddp.flyte.task.TRACKING", ("mlflow", files, "tests"))
    for run, argument in (
        (lambda: run_script(tmp_path, "--mlflow", "tests") or str(tmp_path / "c"), None),
        (recorded, "3"),
        (lambda: run_recipe(tmp_path), None),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
        found, steps = find_run(files, Path(run(), "tracker-run-id").read_text())
        assert (steps("train/loss")[:2], found.info.status) == ([1, 2], "FINISHED")
        assert found.data.params.get("width") == argument


def test_functions_and_scripts_without_a_server_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "MLFLOW_TRACKING_URI: expected the URL of MLflow's server there or in settings.toml, "
        "got none"
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert run_script(tmp_path, "--mlflow", "tests") == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    with pytest.raises(UserError, match=line):
        recorded()
    with pytest.raises(ConfigError, match="mlflow: expected none beside wandb"):
        Distributed(wandb="project", mlflow="tests")
    with pytest.raises(ConfigError, match="mlflow.url: expected the URL of the server, .* none"):
        load_settings(environment={"TRACKING": "mlflow"})


def test_a_history_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        mlflow.main([str(tmp_path / "gone.jsonl"), "http://127.0.0.1:1", "tests", "r1"])
