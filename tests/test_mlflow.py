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
from types import SimpleNamespace
from typing import Any

import pytest
from flytekit import task

from flyte_ddp import session
from flyte_ddp.__main__ import main
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import Event
from flyte_ddp.events.history import to_line
from flyte_ddp.flytekit_plugin import Distributed
from flyte_ddp.flytekit_plugin.failures import UserError
from flyte_ddp.observers import mlflow
from flyte_ddp.observers.mlflow import Mlflow
from flyte_ddp.storage import read_file, write_file
from tasks.settings import SettingsError, load_settings
from tasks.study import _Observer
from tasks.study_report import StudyReport
from tests.support.runs import fork_functions
from tests.support.short_run import epoch_finished, epoch_of_events, loaded, run_finished, started, whole_run

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


class Answering(BaseHTTPRequestHandler):
    """A server that answers as `answers` has it, by the end of a path: (status, JSON), the last one for ever."""

    answers: dict[str, list[tuple[int, Any]]] = {}
    seen: list[tuple[str, Any]] = []

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path = self.path.partition("?")[0].partition("mlflow/")[2] or "artifact"
        self.seen.append((path, json.loads(body) if path != "artifact" and body else {}))
        answers = self.answers.get(path, [(200, {})])
        status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_PUT = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(URL of `Answering`, the class)"""
    missing = (404, {"error_code": "RESOURCE_DOES_NOT_EXIST"})
    run = {"info": {"run_id": "1", "artifact_uri": "mlflow-artifacts:/1/artifacts"}}
    answers = {
        "experiments/get-by-name": [missing, (200, {"experiment": {"experiment_id": "7"}})],
        "experiments/create": [(400, {"error_code": "RESOURCE_ALREADY_EXISTS"})],
        "runs/create": [(200, {"run": run})],
    }
    monkeypatch.setattr(Answering, "answers", answers)
    monkeypatch.setattr(Answering, "seen", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", Answering
        server.shutdown()


def test_an_experiment_that_another_run_creates_meanwhile_is_used(answering: Any) -> None:
    url, server = answering
    lines: list[str] = []
    replay(Mlflow(url, "tests", "r1", say=lines.append), [started()])
    assert lines == [f"MLflow: {url}/#/experiments/7/runs/1"]
    assert ("runs/create", "7") in [(path, body.get("experiment_id")) for path, body in server.seen]


@pytest.mark.parametrize("status", [403, 503])
def test_files_that_are_not_taken_are_one_line_of_a_run_that_has_ended(
    status: int, answering: Any, finished: Event
) -> None:
    url, server = answering
    server.answers["artifact"] = [(status, {"message": "no artifacts here"})]
    lines: list[str] = []
    began = time.monotonic()
    replay(Mlflow(url, "tests", "r1", say=lines.append, model_artifact="digits"), [*whole_run(), finished])
    assert time.monotonic() - began < 5
    assert [body["status"] for path, body in server.seen if path == "runs/update"] == ["FINISHED"]
    assert len(lines) == 2
    assert lines[1].startswith("MLflow has not all files of this run: ")
    assert lines[1].endswith(f"python -m flyte_ddp.observers.mlflow history.jsonl {url} tests r1 digits")


def test_files_go_to_the_store_that_the_server_names(answering: Any, finished: Event) -> None:
    url, server = answering
    server.answers["runs/create"][0][1]["run"]["info"]["artifact_uri"] = "memory://mlflow/1"
    replay(Mlflow(url, "tests", "r1", say=print, model_artifact="digits"), [*whole_run(), finished])
    assert read_file("memory://mlflow/1/model/model_state.safetensors") == b"weights"


def test_names_that_mlflow_refuses_are_changed(answering: Any) -> None:
    url, server = answering
    odd = replace(loaded(), epochs=[replace(epoch_finished(1), metrics={"f1(macro)": 0.5, "accuracy@5": 0.25})])
    replay(Mlflow(url, "tests", "r1", config={"options": {"a b=c/../é": 1}}, say=print), [started(), odd])
    bodies = [body for path, body in server.seen if path == "runs/log-batch"]
    names = [each["key"] for body in bodies for part in ("metrics", "params") for each in body.get(part, [])]
    assert {"epoch/f1_macro_", "epoch/accuracy_5", "é"} <= {*names}


@pytest.mark.slow
def test_a_real_server_takes_the_changed_names_and_the_model_of_a_later_upload(
    server: Server, tmp_path: Path, finished: Event
) -> None:
    odd = replace(epoch_finished(1), metrics={"f1(macro)": 0.5, "accuracy@5": 0.25, "a//b": 0.1})
    history = tmp_path / "history.jsonl"
    history.write_text("".join(map(to_line, [started(config={"a b=c/../é": 1}), loaded(), odd, finished])))
    mlflow.main([str(history), server.url, "tests", "odd", "digits"])
    (run,) = server.runs("odd")
    assert server.steps(run, "epoch/accuracy_5") == [1]
    assert server.files(run, "model") == ["model/model_state.safetensors"]


@pytest.mark.slow
def test_trials_that_start_at_once_share_a_new_experiment(server: Server) -> None:
    lines: list[str] = []
    trials = [Mlflow(server.url, "new", f"trial-{number}", say=lines.append) for number in range(6)]
    for trial in trials:
        trial.handle(started())
    for trial in trials:
        trial.close(None)
    assert len({*lines}) == 6
    assert all(line.startswith("MLflow: http") for line in lines), lines


def test_each_trial_that_is_not_recorded_has_its_command_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "FINISH_TIMEOUT", 0.1)
    url = f"http://127.0.0.1:{free_port()}"
    lines: list[str] = []
    frame: Any = SimpleNamespace(run_id=lambda: "group", say=lines.append)
    observer = _Observer(frame, StudyReport("digits"))
    for key in ("a", "b"):
        options: dict[str, Any] = {"history": f"s3://c/{key}/outcome.jsonl", "say": observer._say_of_wandb}
        replay(Mlflow(url, "tests", f"group-{key}", **options), [started()])
    for key in ("a", "b"):
        command = f"python -m flyte_ddp.observers.mlflow s3://c/{key}/outcome.jsonl {url} tests group-{key}"
        assert any(line.endswith(command) for line in lines)


def test_a_history_may_be_in_a_store(answering: Any) -> None:
    write_file("memory://histories/a.jsonl", "".join(map(to_line, whole_run())).encode())
    url, _ = answering
    assert mlflow.main(["memory://histories/a.jsonl", url, "tests", "r1"]).startswith("MLflow: http")


def test_a_later_upload_that_fails_exits_as_failed(answering: Any, tmp_path: Path) -> None:
    url, server = answering
    server.answers["runs/search"] = [(403, {})]
    (tmp_path / "history.jsonl").write_text("".join(map(to_line, whole_run())))
    with pytest.raises(SystemExit, match="records no more"):
        mlflow.main([str(tmp_path / "history.jsonl"), url, "tests", "r1"])


def test_events_that_have_nothing_for_mlflow_are_not_kept_while_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "FINISH_TIMEOUT", 0.1)
    monkeypatch.setattr(mlflow, "MAX_EVENTS", 4)
    observer = Mlflow(f"http://127.0.0.1:{free_port()}", "tests", "r1", say=lambda line: None)
    replay(observer, [started(), *(event for epoch in (1, 2) for event in epoch_of_events(epoch))])
    kinds = [type(item).__name__ for item in observer._queue]
    assert kinds.count("EpochFinished") == 2
    assert len(kinds) <= 4 + 2 + 1  # epochs and the status are always kept
    assert not {"HistogramsTaken", "PredictionsMade"} & {*kinds}


def test_every_task_finds_the_server_that_registration_was_given(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(Path("settings.toml").read_text().replace('tracking = "wandb"', 'tracking = "mlflow"'))
    command = (
        "import json; from tasks.resources import *\n"
        "tasks = (SMALL_TASK, EVALUATION_TASK, TRAINING_TASK, DRIVER_TASK)\n"
        "print(json.dumps([task['environment'] for task in tasks]))"
    )
    given = {**os.environ, "TRACKING": "mlflow", "MLFLOW_TRACKING_URI": "http://mlflow.team:5000"}
    done = subprocess.run([sys.executable, "-c", command], env=given, capture_output=True, check=True, text=True)
    for environment in json.loads(done.stdout.splitlines()[-1]):
        assert load_settings(settings, environment).mlflow_url == "http://mlflow.team:5000"


@pytest.mark.slow
def test_a_workflow_whose_rank_was_killed_is_one_run_with_its_card(server: Server, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("pyflyte")), "run", "workflows/single_node.py"]
    command += ["single_node_training_wf", "--recipe", "tests.support.recipes.Tiny"]
    command += ["--num_processes", "2", "--checkpoints", str(tmp_path / "c"), "--model_artifact", "tiny"]
    given = {**os.environ, "TRACKING": "mlflow", "MLFLOW_TRACKING_URI": server.url, "MLFLOW_EXPERIMENT_NAME": "tests"}
    given |= {"MLFLOW_TRACKING_TOKEN": TOKEN, "FAULT": "kill 1 5", "PYTHONPATH": "."}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert TOKEN not in done.stdout + done.stderr
    (run,) = server.runs((tmp_path / "c" / "wandb-run-id").read_text())
    assert run["info"]["status"] == "FINISHED"
    steps = server.steps(run, "train/loss")
    assert steps == sorted({*steps})
    assert server.files(run, "model") == ["model/model_state.safetensors"]
    (card,) = server.place.rglob(f"{run['info']['run_id']}/artifacts/card/run_card.json")
    assert json.loads(card.read_text())["origin"]["code_version"]
    assert json.loads(card.read_text())["ranks"]["restarts"] >= 1


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
def recorded() -> str:
    exec(compile(SCRIPT, "train.py", "exec"), {})
    return session.checkpoints


def test_functions_and_scripts_are_recorded_as_recipes_are(
    answering: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = answering
    fork_functions(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    for run in (lambda: run_script(tmp_path, "--mlflow", "tests") or str(tmp_path / "c"), recorded):
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
        server.seen.clear()
        run_id = Path(run(), "wandb-run-id").read_text()
        bodies = {path: [body for each, body in server.seen if each == path] for path, _ in server.seen}
        assert {"key": "flyte_ddp.run", "value": run_id} in bodies["runs/create"][0]["tags"]
        metrics = [metric for body in bodies["runs/log-batch"] for metric in body.get("metrics", [])]
        assert [metric["step"] for metric in metrics if metric["key"] == "train/loss"] == [1, 2]
        assert bodies["runs/update"][0]["status"] == "FINISHED"


def test_functions_and_scripts_without_a_server_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "MLFLOW_TRACKING_URI: expected the URL of MLflow's server there or in settings.toml, got none"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert run_script(tmp_path, "--mlflow", "tests") == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    with pytest.raises(UserError, match=line):
        recorded()
    with pytest.raises(ConfigError, match="mlflow: expected none beside wandb"):
        Distributed(wandb="project", mlflow="tests")


@pytest.mark.slow
def test_a_script_that_is_started_again_is_one_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    for _ in range(2):
        assert run_script(tmp_path, "--mlflow", "tests") == 0
    (run,) = server.runs((tmp_path / "c" / "wandb-run-id").read_text())
    assert server.steps(run, "train/loss") == [1, 2]


def test_mlflow_without_a_server_is_one_line() -> None:
    with pytest.raises(SettingsError, match="mlflow.url: expected the URL of the server, .* got none"):
        load_settings(environment={"TRACKING": "mlflow"})
    with pytest.raises(SettingsError, match="TRACKING: expected one of wandb, mlflow, got 'mflow'"):
        load_settings(environment={"TRACKING": "mflow"})


def test_a_history_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*gone\.jsonl"):
        mlflow.main([str(tmp_path / "gone.jsonl"), "http://127.0.0.1:1", "tests", "r1"])
