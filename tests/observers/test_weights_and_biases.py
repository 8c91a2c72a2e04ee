"""W&B's observer. W&B is the real package, offline or in front of a server of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.events import (
    PictureShown,
    Prediction,
    PredictionsMade,
)
from flyte_ddp.observers.weights_and_biases import Wandb
from flyte_ddp.rank.pictures import encode_picture
from tests.support.short_run import (
    epoch_finished,
    epoch_of_events,
    loaded,
    replay,
    reported,
    run_finished,
    started,
    whole_run,
    with_model,
)
from tests.support.wandb_log import config_of, records_of, rows_of, summary_of

KEY = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def own_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W&B as on a machine where it was never used, whatever this one has."""
    # Another file's test in this process may have left settings. This comes first: it ends W&B's
    # service, which a variable names.
    forget_settings()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    forget_settings()


def forget_settings() -> None:
    """Have W&B read the environment again."""
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()


def assert_nowhere(secret: str, directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert secret.encode() not in path.read_bytes(), path


def test_an_offline_run_holds_all_records(tmp_path: Path) -> None:
    state = tmp_path / "state.pt"
    state.write_bytes(b"the weights")
    lines: list[str] = []
    listener = Wandb(
        "project",
        "run-1",
        tmp_path / "w",
        config={"team": "vision"},
        say=lines.append,
    )
    picture = PictureShown(12, "mine", encode_picture([[0]]))
    replay(listener, [*with_model(), picture, run_finished(str(state))])
    assert listener.url == ""
    (directory,) = (tmp_path / "w" / "wandb").glob("offline-run-*-run-1")
    assert lines == [
        (
            "W&B: no API key was found, so the run is recorded offline; to upload it: "
            f"wandb sync {directory}"
        )
    ]

    (run,) = records_of(directory, "run")
    assert (run.run_id, run.project) == ("run-1", "project")
    config = config_of(directory)
    assert (config["learning_rate"], config["program"], config["team"]) == (0.1, "digits", "vision")

    axes = {metric.glob_name: metric.step_metric for metric in records_of(directory, "metric")}
    assert axes["train/*"] == axes["gradients/*"] == axes["parameters/*"] == "step"
    assert axes["epoch/*"] == "epoch"
    rows = rows_of(directory)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 13))
    assert rows[1] == {
        "step": 2,
        "train/epoch": 0.5,
        "train/loss": 0.5,
        "train/learning_rate": 0.1,
        "train/gradient_norm": 2.5,
        "train/samples_per_second": 1234.5,
    }
    assert [row["epoch/accuracy"] for row in rows if "epoch/accuracy" in row] == [
        0.9,
        0.95,
        1 - 0.1 / 3,
    ]
    (mine,) = (row["pictures/mine"] for row in rows if "pictures/mine" in row)
    assert (directory / "files" / mine["path"]).read_bytes().startswith(b"\x89PNG")
    histograms = [row for row in rows if "gradients/fc.weight" in row]
    assert [row["step"] for row in histograms] == [4, 8, 12]
    histogram = histograms[0]["parameters/fc.weight"]
    assert (histogram["values"], histogram["bins"]) == ([3, 1], [-1, 0, 1])

    (files,) = [
        artifact.manifest.contents
        for artifact in records_of(directory, "artifact")
        if artifact.type == "run_table"
    ]
    kept = {file.path: Path(file.local_path).read_bytes() for file in files}
    table = json.loads(kept["predictions/test.table.json"])
    assert table["columns"] == ["sample", "image", "guess", "truth", "score 3", "score 8"]
    assert [row[0] for row in table["data"]] == [None, None]
    assert [row[2:] for row in table["data"]] == [["8", "3", 0.25, 0.75], ["3", "3", 0.25, 0.75]]
    assert kept[table["data"][0][1]["path"]].startswith(b"\x89PNG")

    summary = summary_of(directory)
    assert summary["graph_0"]["_type"] == "graph-file"
    graph = json.loads((directory / "files" / summary["graph_0"]["path"]).read_text())
    assert [node["name"] for node in graph["nodes"]] == ["conv", "fc"]
    assert (summary["best_epoch"], summary["best_test_loss"]) == (3, 0.6667)
    (model,) = [
        artifact for artifact in records_of(directory, "artifact") if artifact.type == "model"
    ]
    (entry,) = model.manifest.contents
    assert model.name == "model-digits"
    assert Path(entry.local_path).read_bytes() == b"the weights"
    assert [end.exit_code for end in records_of(directory, "exit")] == [0]


def test_disabled_mode_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    lines: list[str] = []
    listener = Wandb(
        "project", "run-1", tmp_path / "w", keys={"WANDB_API_KEY": KEY}, say=lines.append
    )
    replay(listener, [*whole_run(), run_finished()])
    assert (listener.url, lines, list(tmp_path.iterdir())) == ("", [], [])


def test_text_predictions_and_generated_text_are_recorded(tmp_path: Path) -> None:
    epoch = replace(epoch_finished(1), sample="<b>first line\nsecond")
    made = PredictionsMade(3, [Prediction("a", "b", {}, text="Bell", sample=4)])
    replay(Wandb("project", "run-1", tmp_path, say=lambda line: None), [started(), epoch, made])
    rows = rows_of(tmp_path)
    (page, table) = [
        next(tmp_path.rglob(Path(row[key]["path"]).name)).read_text()
        for row in rows
        for key in ("epoch/sample", "predictions/test")
        if key in row
    ]
    assert page == "<pre>&lt;b&gt;first line\nsecond</pre>"
    assert json.loads(table)["data"] == [[4, "Bell", "b", "a"]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.requests.append(str(body))
        server.answers.wait()
        answer = b"" if self.command == "PUT" else server.answer(self.path, json.loads(body))
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@dataclass(eq=False)
class WandbServer(ThreadingHTTPServer):
    """A minimal W&B server: it keeps the history and the summary, and returns them to a resumed
    run.
    """

    requests: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: str = "{}"
    exit_codes: list[int] = field(default_factory=list)
    run_ids: set[str] = field(default_factory=set)
    # Without it the server gives no answer.
    answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = True
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> bytes:
        return json.dumps(self.find_answer(path, body)).encode()

    def find_answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            files = body.get("files") or {}
            self.rows += [
                json.loads(line) for line in files.get("wandb-history.jsonl", {}).get("content", [])
            ]
            self.summary = (files.get("wandb-summary.json", {}).get("content") or [self.summary])[
                -1
            ]
            self.exit_codes += [body["exitcode"]] if body.get("complete") else []
            return {}
        project = {"name": "project", "entity": {"name": "someone"}}
        bucket = {
            "id": "b",
            "name": "run-1",
            "displayName": "run-1",
            "config": "{}",
            "project": project,
            "summaryMetrics": self.summary,
            "historyLineCount": len(self.rows),
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[-1:]]),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "eventsTail": "[]",
            "tags": [],
            "wandbConfig": '{"t": 1}',
        }
        if "upsertBucket" in body["query"]:
            self.run_ids.add(body["variables"]["name"])
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": not self.rows}}}
        if "RunResumeStatus" in body["query"]:
            return {"data": {"model": {**project, "bucket": bucket if self.rows else None}}}
        if "createRunFiles" in body["query"]:
            files = [
                {"name": name, "uploadUrl": f"{self.url}/{name}"}
                for name in body["variables"]["files"]
            ]
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
        return {"data": {"serverInfo": {"features": []}, "viewer": {"entity": "someone"}}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server
        server.answers.set()
        server.shutdown()


def test_online_run_is_continued_by_the_next_attempt(tmp_path: Path, server: WandbServer) -> None:
    lines: list[str] = []
    first = Wandb("project", "run-1", tmp_path / "1", keys={"WANDB_API_KEY": KEY}, say=lines.append)
    replay(
        first,
        [started(), *epoch_of_events(1), reported(5), reported(6)],
        RuntimeError("lost its node"),
    )
    second = Wandb(
        "project", "run-1", tmp_path / "2", keys={"WANDB_API_KEY": KEY}, say=lines.append
    )
    replay(second, [started(), loaded(4), *epoch_of_events(2)])

    assert first.url == second.url
    assert first.url.endswith("/someone/project/runs/run-1")
    assert lines == [f"W&B: {first.url}"] * 2
    assert server.run_ids == {"run-1"}
    assert [row["step"] for row in server.rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["epoch"] for row in server.rows if "epoch/accuracy" in row] == [1, 2]
    assert [row["_step"] for row in server.rows] == list(range(len(server.rows))), (
        "W&B refuses steps that go back"
    )
    assert server.exit_codes == [1, 0]
    assert KEY not in "".join(server.requests)
    assert_nowhere(KEY, tmp_path)


def test_a_model_that_cannot_be_read_ends_the_recording_and_the_message_hides_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    lines: list[str] = []
    options: dict[str, Any] = {"keys": {"WANDB_API_KEY": KEY}}
    listener = Wandb("project", "run-1", tmp_path, say=lines.append, **options)
    replay(listener, [*with_model(), run_finished(str(tmp_path / f"missing {KEY}.pt"))])
    assert "FileNotFoundError" in lines[1]
    assert "missing ***.pt" in lines[1]
    assert lines[1].endswith("What it recorded is in " + lines[0].rsplit(" ", 1)[-1])


MUTE_AFTER_START = """
import sys
from flyte_ddp.observers import weights_and_biases
from tests.support.short_run import epoch_of_events, feed, replay, started
from tests.observers.test_weights_and_biases import KEY

weights_and_biases.SHORT_TIMEOUT = 1.0
say = lambda line: print(line, flush=True)
listener = weights_and_biases.Wandb("project", "run-1", sys.argv[1], keys={"WANDB_API_KEY": KEY}, say=say)
feed(listener, started())
sys.stdin.readline()
replay(listener, epoch_of_events(1))
print("goes on")
"""  # noqa: E501


@pytest.mark.long
def test_a_silent_server_delays_neither_the_end_nor_the_exit(
    tmp_path: Path, server: WandbServer
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MUTE_AFTER_START, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().startswith("W&B: http")
        server.answers.clear()
        # would time out, were the process's exit held up
        output, _ = process.communicate("\n", timeout=30)
    failed, goes_on = output.splitlines()
    assert "TimeoutError: Timed out finishing run" in failed
    assert goes_on == "goes on"
