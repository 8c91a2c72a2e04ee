"""The observer that shows a run in MLflow, by the REST API of its server: no package of MLflow is needed.

It runs in the parent process, which has the token; no rank ever sees it. MLflow's own client is not used: it limits the
versions of protobuf, pyarrow and packaging, and repeats requests in the thread that calls it, for minutes.

python -m flyte_ddp.observers.mlflow HISTORY URL EXPERIMENT RUN [MODEL]  # uploads what a server that was away missed
"""

from __future__ import annotations

import json
import logging
import math
import os
import posixpath
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from flyte_ddp.config.source_code import read_settings
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import (
    CheckpointLoaded,
    Event,
    Figures,
    Listener,
    RunFinished,
    RunStarted,
    RunState,
    parse_history,
)
from flyte_ddp.observers.reports.run_card import card_files, run_card
from flyte_ddp.storage import fetch_file, read_file, redact_url, redact_values, write_file

RUN_TAG = "flyte_ddp.run"  # by which a later attempt finds the run
TIMEOUT = 10.0  # seconds, of a request
FILE_TIMEOUT = 60.0  # seconds, of a request with a file, which a server writes before it answers
PAUSE = 5.0  # seconds between two tries while the server is away
FINISH_TIMEOUT = 60.0  # seconds for what is left at the end
MAX_METRICS, MAX_PARAMETERS = 1000, 100  # of a request, by MLflow
MAX_VALUE = 500  # characters of a parameter, by MLflow's first versions
MAX_NAME = 250  # characters of a parameter or metric
MAX_EVENTS = 100_000  # kept while the server is away; beyond, epochs alone
AXES = {"train": "step", "epoch": "epoch"}  # of figures, by the beginning of a metric's name
UPLOAD = "to upload the rest later"  # begins a command
MODULE = "flyte_ddp.observers.mlflow"  # `__name__` of the command is another
KEY_VARIABLES = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")

logger = logging.getLogger(__name__)


class _Away(Exception):
    """The server does not answer, or not now."""


class _Refused(Exception):
    """The server has refused a request, and would again."""


@dataclass(eq=False)
class Mlflow(Listener):
    """Shows a run in MLflow. A failure of MLflow never affects the training.

    A thread sends. While the server is away it keeps the events and tries again; a line says so once. What is not sent
    `FINISH_TIMEOUT` seconds after the end, and files that the artifact store refuses, can be sent later from the
    history, by the command of this module. A run with the same `run_id` is continued: only what it does not have yet is
    logged.
    """

    server: str  # its URL, such as http://mlflow.team:5000
    experiment: str  # created if missing
    run_id: str  # the same in every attempt of one run
    _: KW_ONLY
    name: str | None = None  # of the run on MLflow's pages
    notes: str | None = None  # there, too
    group: str | None = None  # of runs that belong together, such as a sweep: a tag
    config: Mapping[str, Any] = field(default_factory=dict)  # parameters besides the run's own
    # Variables with the token, or the user name and the password; they appear in no message.
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    model_artifact: str = ""  # a name, shown as a tag, has the weights uploaded as safetensors; "" for none
    origin: Mapping[str, str] = field(default_factory=dict)  # see `run_card`
    history: str = "history.jsonl"  # path or URL of the run's, for the command that uploads the rest
    say: Callable[[str], None] = logger.warning  # prints a line for people
    is_failure: Callable[[BaseException], bool] = lambda error: True  # whether an error that ends the run is one of it

    label = "MLflow run"

    def __post_init__(self) -> None:
        self.url = ""  # of the run's page, when the server has answered
        self._run: dict[str, Any] = {}  # as MLflow has it
        self._done = {"step": 0.0, "epoch": 0.0}  # what MLflow's run has, by axis
        self._state = RunState(keep_reports=False)
        self._queue: list[Event | str] = []  # a str is the status at the end, the last item
        self._changed = threading.Condition()
        self._is_off = self._was_away = False
        self.is_incomplete = False  # True if the server or its store has not taken everything
        self._pause = threading.Event()  # set: try at once
        self._thread = threading.Thread(target=self._work, name="mlflow-listener", daemon=True)

    def handle(self, event: Event) -> None:
        self._state.handle(event)  # read after the last event alone
        figures = event.figures()
        is_needed = figures.axis == "epoch" or isinstance(event, (RunStarted, CheckpointLoaded, RunFinished))
        if is_needed or (figures.values and len(self._queue) < MAX_EVENTS):
            self._put(event)

    def close(self, error: BaseException | None) -> None:
        """Finish MLflow's run, as failed if there is a failure. Wait at most `FINISH_TIMEOUT`."""
        if not self._thread.is_alive():
            return
        self._put("FINISHED" if error is None else "FAILED" if self.is_failure(error) else "KILLED")
        self._pause.set()
        self._thread.join(FINISH_TIMEOUT)
        if self._thread.is_alive():
            self._is_off = self.is_incomplete = True
            self.say(f"MLflow: {redact_url(self.server)} did not take all of this run; {self._how_to_upload()}")

    def _how_to_upload(self) -> str:
        words = (redact_url(self.history), redact_url(self.server), self.experiment, self.run_id, self.model_artifact)
        return f"{UPLOAD}: python -m {MODULE} {shlex.join(filter(None, words))}"

    def _put(self, item: Event | str) -> None:
        if self._is_off:
            return
        if not self._thread.is_alive():
            self._thread.start()
        with self._changed:
            self._queue.append(item)
            self._changed.notify()

    def _work(self) -> None:
        while not self._is_off:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                items = list(self._queue)
            try:
                self._send(items)
            except _Away as error:
                if not self._was_away:
                    self.say(f"MLflow: {error}; the training continues, and what is to be recorded is sent later")
                self._was_away = True
                self._pause.wait(PAUSE)
                if self._pause.is_set():  # at the end, where the last tries are a second apart
                    time.sleep(1)
                continue
            except Exception as error:  # of any kind: no failure of MLflow may end the training
                self._is_off = self.is_incomplete = True
                self.say(f"MLflow records no more of this run; the training continues: {redact_url(str(error))}")
                return
            with self._changed:
                del self._queue[: len(items)]
            if isinstance(items[-1], str):
                return

    def _send(self, items: list[Event | str]) -> None:
        """Send all of `items`, or what of them MLflow does not have yet after a try that has failed."""
        metrics: list[dict[str, Any]] = []
        done = dict(self._done)
        for item in items:
            if isinstance(item, str):
                continue
            if isinstance(item, RunStarted):
                is_first = not self._run
                self._start(item)
                done = dict(self._done) if is_first else done
            epochs = item.epochs if isinstance(item, CheckpointLoaded) else []
            for event in (*epochs, item):
                metrics += _metrics(event.figures(), event.at, done)
        if not self._run:
            return
        self._log("metrics", metrics, MAX_METRICS)
        self._done = done  # only now: a try that failed is repeated whole
        if isinstance(status := items[-1], str):
            self._call("POST", "runs/update", run_id=self._id, status=status, end_time=_milliseconds(0))
            try:
                self._upload_files()  # last: a store that takes no files must not leave the run as running
            except Exception as error:  # the server has answered just before, so a repetition would hardly help
                self.is_incomplete = True
                self.say(f"MLflow has not all files of this run: {redact_url(str(error))}; {self._how_to_upload()}")

    def _upload_files(self) -> None:
        """Upload the run card, and the model if it is asked for."""
        finished = self._state.finished
        if finished is None or not finished.export_url:
            return
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "file")
            for name, contents in card_files(run_card(self._state, **self.origin)).items():
                file.write_bytes(contents)
                self._upload(f"card/{name}", file)
            for name in finished.exported if self.model_artifact else ():
                # Not in memory: weights may be larger than that of this process.
                fetch_file(f"{finished.export_url}/{name}", file, timeout=TIMEOUT)
                self._upload(f"model/{name}", file)

    def _start(self, event: RunStarted) -> None:
        if not self._run:
            self._open(event)
        known = {each["key"] for each in self._run["data"].get("params", [])}  # MLflow's never change
        values = {"program": event.name, "data": event.data, "device": event.device, "backend": event.backend}
        counts = ("num_train_samples", "num_test_samples", "num_steps")  # a function's are not known
        values |= {name: str(count) for name in counts if (count := getattr(event, name))}
        values |= {"data_fingerprint": event.data_fingerprint, "recipe_version": event.recipe_version}
        values = {**_flat(redact_values(self.config)), **_flat(redact_values(event.config)), **values}
        parameters = _entries({name: value[:MAX_VALUE] for name, value in values.items() if name not in known})
        self._log("params", parameters, MAX_PARAMETERS)
        self._run["data"]["params"] = [*self._run["data"].get("params", []), *parameters]
        # No parameters: a later attempt may have others.
        tags = {"world_size": str(event.world_size), "num_nodes": str(event.num_nodes)}
        self._log("tags", _entries(tags), MAX_PARAMETERS)

    def _open(self, event: RunStarted) -> None:
        """Find MLflow's run of this `run_id`, or create it."""
        place = f"experiments/get-by-name?experiment_name={quote(self.experiment, safe='')}"
        try:
            experiment = str(self._call("GET", place)["experiment"]["experiment_id"])
        except _Refused as error:
            if "RESOURCE_DOES_NOT_EXIST" not in str(error):
                raise
            try:
                experiment = str(self._call("POST", "experiments/create", name=self.experiment)["experiment_id"])
            except _Refused as race:
                if "RESOURCE_ALREADY_EXISTS" not in str(race):
                    raise
                experiment = str(self._call("GET", place)["experiment"]["experiment_id"])  # of another trial
        wanted = f"tags.`{RUN_TAG}` = '{self.run_id}'"
        found = self._call("POST", "runs/search", experiment_ids=[experiment], filter=wanted, max_results=1).get("runs")
        if found:
            self._run = found[0]
            self._call("POST", "runs/update", run_id=self._id, status="RUNNING")
            for metric in self._run["data"].get("metrics", []):
                if axis := AXES.get(metric["key"].partition("/")[0]):
                    self._done[axis] = max(self._done[axis], float(metric.get("step", 0)))
        else:
            tags = {RUN_TAG: self.run_id, "mlflow.note.content": self.notes or ""}
            tags |= {"group": self.group or "", "model": self.model_artifact}
            created = self._call(
                "POST",
                "runs/create",
                experiment_id=experiment,
                run_name=self.name or self.run_id,
                start_time=_milliseconds(event.at),
                tags=_entries(tags),
            )
            self._run = created["run"]
            self._run.setdefault("data", {})
        self.url = f"{redact_url(self.server)}/#/experiments/{experiment}/runs/{self._id}"
        self.say(f"MLflow: {self.url}")

    @property
    def _id(self) -> str:
        return str(self._run["info"]["run_id"])

    def _upload(self, name: str, file: Path) -> None:
        """Keep a file as an artifact of the run: through the server, or in the store that it names."""
        uri = str(self._run["info"]["artifact_uri"])
        root = urlsplit(uri)
        if root.scheme in ("mlflow-artifacts", "http", "https"):
            path = f"api/2.0/mlflow-artifacts/artifacts{root.path}/{name}"
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(file.stat().st_size)}
            with file.open("rb") as contents:
                self._request("PUT", path, contents, headers)
        elif root.scheme not in ("", "file"):  # the server's own disk, of which this process knows nothing
            write_file(f"{uri}/{name}", file, timeout=FILE_TIMEOUT)

    def _log(self, kind: str, entries: list[dict[str, Any]], max_entries: int) -> None:
        for first in range(0, len(entries), max_entries):
            some = {kind: entries[first : first + max_entries]}
            self._call("POST", "runs/log-batch", run_id=self._id, **some)

    def _call(self, method: str, path: str, /, **values: Any) -> dict[str, Any]:
        body = json.dumps(values).encode() if values else None
        answer = self._request(method, f"api/2.0/mlflow/{path}", body, {"Content-Type": "application/json"})
        return dict(json.loads(answer)) if answer else {}

    def _request(self, method: str, path: str, body: bytes | BinaryIO | None, headers: dict[str, str]) -> bytes:
        """Return the server's answer. Raises _Away if there is none now, and _Refused if it has refused."""
        import urllib3

        values = self.environment
        if token := values.get("MLFLOW_TRACKING_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
        elif user := values.get("MLFLOW_TRACKING_USERNAME"):
            basic = f"{user}:{values.get('MLFLOW_TRACKING_PASSWORD', '')}"
            headers |= urllib3.make_headers(basic_auth=basic)
        place = redact_url(self.server)
        timeout = TIMEOUT if method != "PUT" else FILE_TIMEOUT
        try:
            answer = urllib3.request(
                method, f"{self.server.rstrip('/')}/{path}", body=body, headers=headers, timeout=timeout, retries=False
            )
        except urllib3.exceptions.HTTPError as error:
            raise _Away(f"{place} does not answer ({type(error).__name__})") from None
        if answer.status >= 500 or answer.status == 429:
            raise _Away(f"{place} answers with {answer.status}")
        if answer.status >= 300:
            text = " ".join(answer.data.decode(errors="replace").split())[:300]
            raise _Refused(f"{place} refuses {method} {path.partition('?')[0]} with {answer.status}: {text}")
        return bytes(answer.data)


def find_server() -> str:
    """Return the URL of MLflow's server for functions and scripts. Raises ConfigError if none is named."""
    if url := os.environ.get("MLFLOW_TRACKING_URI") or read_settings().get("mlflow", {}).get("url", ""):
        return str(url)
    raise ConfigError("MLFLOW_TRACKING_URI: expected the URL of MLflow's server there or in settings.toml, got none")


def _metrics(figures: Figures, at: float, done: dict[str, float]) -> list[dict[str, Any]]:
    """Return figures in MLflow's form; those of an axis only if they are beyond `done`, which is updated."""
    prefix, step = "", 0
    if figures.axis:
        place = figures.step if figures.axis == "step" else figures.epoch
        if place is None or place <= done[figures.axis]:
            return []
        done[figures.axis] = float(place)
        prefix, step = ("train/" if figures.axis == "step" else "epoch/"), int(place)
    return [
        {"key": prefix + _clean(name), "value": float(value), "timestamp": _milliseconds(at), "step": step}
        for name, value in figures.values.items()
        if math.isfinite(value)  # not every store of MLflow's has the others
    ]


def _entries(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return values that are not empty in MLflow's form."""
    return [{"key": name, "value": value} for name, value in values.items() if value]


def _milliseconds(at: float) -> int:
    return int(1000 * (at or time.time()))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as text under dotted names."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {_clean(prefix + name): str(value)}
    return flat


def _clean(name: str) -> str:
    """Return `name` in the characters that MLflow allows, as a normalized path."""
    path = posixpath.normpath("/" + re.sub(r"[^/\w.\- ]", "_", name))
    return path.lstrip("/")[: MAX_NAME - len("epoch/")] or "_"


def main(arguments: list[str]) -> str:
    """Upload a history, and return a line for people."""
    if len(arguments) not in (4, 5):
        raise SystemExit(f"usage: python -m {MODULE} HISTORY URL EXPERIMENT RUN [MODEL]")
    history, url, experiment, run_id, *model = arguments
    lines: list[str] = []
    observer = Mlflow(url, experiment, run_id, say=lines.append, model_artifact="".join(model))
    try:
        events = parse_history(read_file(history, "history"), history)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    for event in events:
        observer.handle(event)
    is_finished = any(isinstance(event, RunFinished) for event in events)
    observer.close(None if is_finished else RuntimeError("the run did not finish"))
    if observer.is_incomplete:
        raise SystemExit("\n".join(lines))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]) + "\n")
