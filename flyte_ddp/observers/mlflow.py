"""The observer that shows a run in MLflow, by MLflow's own client, which the extra `mlflow` brings.

It runs in the parent process, which has the token; no rank ever sees it. The client repeats
requests in this recorder's thread, for minutes, and is imported there.

flyte-ddp mlflow HISTORY URL EXPERIMENT RUN [MODEL]  # uploads what a server that was away missed
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import posixpath
import re
import shlex
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flyte_ddp.code.source_code import read_settings
from flyte_ddp.config.extras import require
from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import RunFinished, RunStarted, RunState, parse_history
from flyte_ddp.observers.recorder import Entry, Recorder
from flyte_ddp.observers.reports.run_card import card_files, run_card
from flyte_ddp.process.invocation import find_flyte_ddp_command
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.storage import (
    SHORT_TIMEOUT,
    fetch_file,
    file_below,
    permit,
    read_file,
    redact_url,
    write_file,
)

RUN_TAG = "flyte_ddp.run"  # the tag by which a later attempt finds the run
AXIS_TAG = "flyte_ddp."  # and, by axis, how far it is
MAX_NAME = 250  # characters of a parameter or metric, by MLflow
MAX_VALUE = 6000  # characters of a parameter's value, by MLflow
CHANGING = ("world_size", "num_nodes")
KEY_VARIABLES = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


@dataclass(eq=False)
class Mlflow(Recorder):
    """Shows a run in MLflow. A failure of MLflow never affects the training.

    If the server was away, or the artifact store refuses files, the command of this module sends
    the rest later from the history. The token, or the user name and the password, come from `keys`,
    by `KEY_VARIABLES`, or from the environment.
    """

    service, label = "MLflow", "MLflow run"
    close_timeout = 60.0

    server: str  # URL of the server, such as http://mlflow.team:5000
    experiment: str  # created if missing
    run_id: str  # the same in every attempt of one run
    _: KW_ONLY
    origin: Mapping[str, str] = field(default_factory=dict)  # see `run_card`
    # path or URL of the run's, for the command that uploads the rest
    history: str = "history.jsonl"

    def __post_init__(self) -> None:
        require("mlflow", "mlflow")
        self._client: Any = None
        self._names: dict[str, str] = {}  # metrics by the names that MLflow takes
        words = (redact_url(self.history), redact_url(self.server), self.experiment, self.run_id)
        command = f"{find_flyte_ddp_command()} mlflow {shlex.join(filter(None, words))}"
        self.hint = f"; to upload the rest later: {command}"

    def _open(self, event: RunStarted, config: Mapping[str, Any]) -> None:
        if self._run is None:
            self._start(event)
        from mlflow.entities import Param, RunTag

        # MLflow's parameters never change, and a later attempt may have other numbers of these.
        tags = [RunTag(name, str(getattr(event, name))) for name in CHANGING]
        known = {*self._client.get_run(self._run).data.params, *CHANGING}
        parameters = [
            Param(name, value[:MAX_VALUE])
            for name, value in _flat(config).items()
            if value and name not in known
        ]
        for first in range(0, len(parameters) + 1, 100):
            self._client.log_batch(self._run, params=parameters[first : first + 100], tags=tags)

    def _start(self, event: RunStarted) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # to an outside service
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # a line for each repeated request
        from mlflow import MlflowClient, environment_variables
        from mlflow.exceptions import MlflowException

        for name in KEY_VARIABLES:
            if name in self.keys:  # not in the environment, which ranks inherit
                getattr(environment_variables, name).get = functools.partial(self.keys.get, name)
        self._client = MlflowClient(self.server)
        with contextlib.suppress(MlflowException):  # the experiment may exist already
            self._client.create_experiment(self.experiment)
        experiment = self._client.get_experiment_by_name(self.experiment).experiment_id
        tags = {
            RUN_TAG: self.run_id,
            "mlflow.note.content": self.notes,
            "group": self.group,
            "model": self.model_artifact,
        }
        found = self._client.search_runs(
            [experiment], f"tags.`{RUN_TAG}` = '{self.run_id}'", max_results=1
        )
        if not found:
            known = {name: tag for name, tag in tags.items() if tag}
            began, name = _milliseconds(event.at), self.name or self.run_id
            found = [self._client.create_run(experiment, began, known, name)]
        self._run = found[0].info.run_id
        self._client.update_run(self._run, "RUNNING")
        self._reached = {
            axis: float(found[0].data.tags.get(AXIS_TAG + axis, 0)) for axis in self._reached
        }
        self.url = f"{redact_url(self.server)}/#/experiments/{experiment}/runs/{self._run}"
        self.say(f"MLflow: {self.url}")

    def _log(self, entries: Sequence[Entry]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(self._name(name), float(value), _milliseconds(entry.at), int(entry.place))
            for entry in entries
            for name, value in entry.values.items()
            # not every store of MLflow's has numbers that are not finite
            if isinstance(value, int | float) and math.isfinite(value)
        ]
        tags = [RunTag(AXIS_TAG + axis, str(place)) for axis, place in self._reached.items()]
        if metrics:
            self._client.log_batch(self._run, metrics, tags=tags)

    def _name(self, name: str) -> str:
        """Return the name of a metric in the characters that MLflow allows, and of no other
        metric.
        """
        clean = _clean(name)
        if self._names.setdefault(clean, name) == name:
            return clean
        return f"{clean[: MAX_NAME - 9]}-{zlib.crc32(name.encode()):08x}"

    def _close(self, status: str) -> None:
        if self.is_off:
            return
        self._client.set_terminated(self._run, status)
        finished = self._state.finished
        if finished and finished.export_url:
            # last: a store that takes no files must not leave the run as running
            self._upload(finished)

    def _upload(self, finished: RunFinished) -> None:
        """Upload the run card, and the model if it is asked for: through the server, or to the
        store that it names.
        """
        uri = self._client.get_run(self._run).info.artifact_uri
        permit(uri)  # the server's choice
        scheme = urlsplit(uri).scheme
        with tempfile.TemporaryDirectory() as directory:
            for name, contents in card_files(run_card(self._state, **self.origin)).items():
                write_file(f"{directory}/card/{name}", contents)
            for name in finished.exported if self.model_artifact else ():
                # On disk, because weights may be larger than this process's memory.
                file = file_below(Path(directory, "model"), name, "export")
                file.parent.mkdir(parents=True, exist_ok=True)
                fetch_file(f"{finished.export_url}/{name}", file, timeout=SHORT_TIMEOUT)
            if scheme in ("mlflow-artifacts", "http", "https"):
                self._client.log_artifacts(self._run, directory)
            # otherwise the artifacts are on the server's own disk
            elif scheme not in ("", "file"):
                for file in filter(Path.is_file, Path(directory).rglob("*")):
                    url = f"{uri}/{file.relative_to(directory).as_posix()}"
                    write_file(url, file, timeout=SHORT_TIMEOUT)


def find_server() -> str:
    """Return the URL of MLflow's server for functions and scripts. Raises ConfigError if none is
    named.
    """
    url = os.environ.get("MLFLOW_TRACKING_URI") or read_settings().get("mlflow", {}).get("url")
    if url:
        return str(url)
    raise ConfigError(
        "MLFLOW_TRACKING_URI: expected the URL of MLflow's server there or in "
        "settings.toml, got none"
    )


def _milliseconds(at: float) -> int:
    return int(1000 * (at or time.time()))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as text under dotted names."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[_clean(prefix + name)] = str(value)
    return flat


def _clean(name: str) -> str:
    """Return `name` in the characters that MLflow allows, as a normalized path."""
    path = posixpath.normpath("/" + re.sub(r"[^/\w.\- ]", "_", name))
    return path.lstrip("/")[:MAX_NAME] or "_"


def main(arguments: Sequence[str]) -> int:
    """Upload a history, and print where its run is. Raises ConfigError if it cannot be."""
    names = ("history", "url", "experiment", "run")
    options = make_parser(
        "mlflow", "upload a run's history", [(name, "", None) for name in names]
    ).parse_args(arguments)
    place = (options.url, options.experiment, options.run)
    try:
        observer = Mlflow(*place, say=print_line)
        history = parse_history(read_file(options.history, "history"), options.history)
        for event in history:
            observer._record(event)
        observer._state = RunState.of(history)
        status = "FAILED"
        if observer._state.finished:
            status = "FINISHED"
        observer._end(status)
    except Exception as error:
        raise ConfigError(redact_url(str(error))) from None
    return 0
