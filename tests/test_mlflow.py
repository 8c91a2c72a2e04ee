"""MLflow's observer, in front of a real MLflow server, which has an environment of its own, and of one that is away."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.events import Event
from flyte_ddp.events.history import to_line
from flyte_ddp.observers import mlflow
from flyte_ddp.observers.mlflow import Mlflow
from tasks.settings import SettingsError, load_settings
from tests.support.short_run import epoch_of_events, loaded, run_finished, started, whole_run

VERSION = "3.17.2"
TOKEN = "secret-of-mlflow"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def replay(listener: Mlflow, events: list[Event], error: BaseException | None = None) -> None:
    for event in events:
        listener.handle(event)
    listener.close(error)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with MLflow's server: its packages are of other versions than ours."""
    if sys.version_info < (3, 11):
        pytest.skip("one Python is enough")
    place = tmp_path_factory.mktemp("mlflow")
    if given := os.environ.get("MLFLOW_PACKAGES"):
        return Path(given)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place), f"mlflow=={VERSION}"]
    subprocess.run(command, check=True, timeout=400)
    return place


class Server:
    """A real MLflow server that can be stopped and started again."""

    def __init__(self, packages: Path, place: Path) -> None:
        self.port, self.place, self.packages = free_port(), place, packages
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        stores = [f"--backend-store-uri=sqlite:///{self.place}/runs.db", f"--artifacts-destination={self.place}/files"]
        command = [sys.executable, "-S", "-m", "mlflow", "server", f"--port={self.port}", "--workers=1", *stores]
        path = os.environ["PATH"] + os.pathsep + str(self.packages / "bin")
        environment = {**os.environ, "PYTHONPATH": str(self.packages), "PATH": path}
        with open(self.place / "log", "ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=self.place, start_new_session=True
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.place / "log").read_text()[-2000:]
                time.sleep(0.5)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None

    def call(self, path: str, **values: Any) -> Any:
        body = json.dumps(values).encode() if values else None
        request = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/{path}", body, {"Content-Type": "application/json"}
        )
        return json.loads(urllib.request.urlopen(request, timeout=30).read())

    def runs(self, name: str) -> list[Any]:
        experiment = self.call("experiments/get-by-name?experiment_name=tests")["experiment"]["experiment_id"]
        found = self.call("runs/search", experiment_ids=[experiment], filter=f"tags.`flyte_ddp.run` = '{name}'")
        return list(found.get("runs", []))

    def steps(self, run: Any, metric: str) -> list[int]:
        history = self.call(f"metrics/get-history?run_id={run['info']['run_id']}&metric_key={metric}")["metrics"]
        return [int(each["step"]) for each in history]

    def files(self, run: Any, directory: str) -> list[str]:
        listed = self.call(f"artifacts/list?run_id={run['info']['run_id']}&path={directory}").get("files", [])
        return [each["path"] for each in listed]


@pytest.fixture(scope="module")
def server(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Server(packages, tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def finished(tmp_path: Path) -> Event:
    (tmp_path / "model_state.safetensors").write_bytes(b"weights")
    return replace(run_finished(""), export_url=str(tmp_path), exported=["model_state.safetensors"])


@pytest.mark.slow
def test_all_attempts_are_one_run_with_parameters_metrics_card_and_model(server: Server, finished: Event) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"say": lines.append, "config": {"sweep": {"lr": 0.1}}, "model_artifact": "digits"}
    replay(Mlflow(server.url, "tests", "one", **options), [started(), loaded(), *epoch_of_events(1)], RuntimeError())
    (run,) = server.runs("one")
    assert run["info"]["status"] == "FAILED"
    # Another attempt, with more ranks, from the checkpoint of the first epoch; its gang starts again once.
    again = [started(world_size=4), loaded(4), *epoch_of_events(2), started(world_size=3), loaded(4)]
    listener = Mlflow(server.url, "tests", "one", **options)
    replay(listener, [*again, *epoch_of_events(2), *epoch_of_events(3), finished])
    (run,) = server.runs("one")
    assert lines == 2 * [f"MLflow: {listener.url}"]
    assert run["info"]["run_id"] in listener.url
    assert run["info"]["status"] == "FINISHED"
    parameters = {each["key"]: each["value"] for each in run["data"]["params"]}
    assert parameters.items() >= {"program": "digits", "learning_rate": "0.1", "epochs": "3", "sweep.lr": "0.1"}.items()
    assert {each["key"]: each["value"] for each in run["data"]["tags"]}["world_size"] == "3"
    assert server.steps(run, "train/loss") == [*range(1, 13)]
    assert server.steps(run, "epoch/test_loss") == [1, 2, 3]
    assert server.files(run, "card") == ["card/README.md", "card/run_card.json"]
    assert server.files(run, "model") == ["model/model_state.safetensors"]


@pytest.mark.slow
def test_what_a_server_misses_while_it_is_away_is_sent_when_it_is_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow, "PAUSE", 0.2)
    lines: list[str] = []
    listener = Mlflow(server.url, "tests", "away", say=lines.append)
    for event in (started(), loaded(), *epoch_of_events(1)):
        listener.handle(event)
    deadline = time.monotonic() + 30
    while listener._queue:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.stop()
    for event in (*epoch_of_events(2), *epoch_of_events(3), run_finished("")):
        listener.handle(event)
    time.sleep(1)
    server.start()
    listener.close(None)
    (run,) = server.runs("away")
    assert [*map(len, (server.steps(run, "train/loss"), lines))] == [12, 2]
    assert "does not answer" in lines[1]
    assert run["info"]["status"] == "FINISHED"


@pytest.mark.slow
def test_a_history_uploads_a_run_later_and_again_without_double_points(
    server: Server, tmp_path: Path, finished: Event
) -> None:
    history = tmp_path / "history.jsonl"
    history.write_text("".join(map(to_line, [*whole_run(), finished])))
    for _ in range(2):
        mlflow.main([str(history), server.url, "tests", "late"])
    (run,) = server.runs("late")
    assert server.steps(run, "train/loss") == [*range(1, 13)]
    assert run["info"]["status"] == "FINISHED"


def test_a_server_that_is_away_costs_the_training_nothing_and_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "PAUSE", 0.05)
    monkeypatch.setattr(mlflow, "FINISH_TIMEOUT", 0.5)
    lines: list[str] = []
    url = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    replay(Mlflow(url, "tests", "r1", say=lines.append), [*whole_run(), run_finished("")])
    assert time.monotonic() - began < 5
    assert lines == [
        f"MLflow: {url} does not answer (NewConnectionError); the training continues, and what is to be recorded is "
        "sent later",
        f"MLflow: {url} did not take all of this run; to upload the rest later: python -m flyte_ddp.observers.mlflow "
        f"history.jsonl {url} tests r1",
    ]


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


def test_a_refusal_is_one_line_without_the_token() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        lines: list[str] = []
        url = f"http://127.0.0.1:{refusing.server_port}"
        environment = {"MLFLOW_TRACKING_TOKEN": TOKEN}
        replay(Mlflow(url, "tests", "r1", say=lines.append, environment=environment), [started(), *epoch_of_events(1)])
        refusing.shutdown()
    assert Refusing.seen == [f"Bearer {TOKEN}"]
    assert lines == [
        f"MLflow records no more of this run; the training continues: {url} refuses GET "
        "api/2.0/mlflow/experiments/get-by-name with 401: who are you?"
    ]


def test_mlflow_without_a_server_is_one_line() -> None:
    with pytest.raises(SettingsError, match="mlflow.url: expected the URL of the server, .* got none"):
        load_settings(environment={"TRACKING": "mlflow"})
    with pytest.raises(SettingsError, match="TRACKING: expected one of wandb, mlflow, got 'mflow'"):
        load_settings(environment={"TRACKING": "mflow"})


def test_a_history_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*gone\.jsonl"):
        mlflow.main([str(tmp_path / "gone.jsonl"), "http://127.0.0.1:1", "tests", "r1"])
