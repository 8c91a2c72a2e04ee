"""The observers that serve the figures of a task's runs to Prometheus, as text, on a port of its pod.

Needs no library: the text format is lines of `name{labels} value`.
"""

from __future__ import annotations

import http.server
import logging
import os
import threading
import time

from flyte_ddp.events import (
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointWritten,
    EpochFinished,
    Event,
    Reported,
    RunFinished,
    RunStarted,
)

PORT_VARIABLE = "FLYTE_DDP_METRICS_PORT"  # set by registration; nothing is served without it
PORT_NAME = "metrics"  # of that port in the task's pod, by which deploy/alerts.yaml finds it
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP = {
    "flyte_ddp_world_size": "ranks of the current attempt",
    "flyte_ddp_steps_planned": "optimizer steps of the whole run",
    "flyte_ddp_step": "optimizer steps done",
    "flyte_ddp_epoch": "epochs done",
    "flyte_ddp_train_loss": "mean training loss since the previous step event",
    "flyte_ddp_test_loss": "held-out loss after the last epoch",
    "flyte_ddp_accuracy_ratio": "held-out accuracy after the last epoch, in [0, 1]",
    "flyte_ddp_samples_per_second": "training samples per second, over all ranks",
    "flyte_ddp_checkpoint_step": "step of the newest checkpoint that the store has whole; 0 for none",
    "flyte_ddp_checkpoint_copied_step": "step of the newest state that was copied to become a checkpoint; 0 for none",
    "flyte_ddp_restarts_total": "times that the ranks were started again in this attempt of the task",
    "flyte_ddp_attempt": "number of this attempt of the task, from 0: times that Flyte has started the task again",
    "flyte_ddp_last_event_timestamp_seconds": "when rank 0 last reported anything, in seconds since the epoch",
    "flyte_ddp_finished": "1 when the run has ended well",
}

logger = logging.getLogger(__name__)


class RunFigures:
    """The listener of one run: its newest figures, until the run has ended.

    Args:
        labels: of every figure, as in Prometheus' text format.
        attempt: Flyte's number of the task's attempt, from 0.
    """

    def __init__(self, labels: str, attempt: int = 0) -> None:
        self.labels = labels
        self._values: dict[str, float] = {
            "flyte_ddp_attempt": attempt,
            "flyte_ddp_restarts_total": -1.0,
            "flyte_ddp_finished": 0.0,
        }
        self._lock = threading.Lock()
        self.is_open = True

    def handle(self, event: Event) -> None:
        """Keep the figures of the event."""
        found: dict[str, float] = {"flyte_ddp_last_event_timestamp_seconds": time.time()}
        with self._lock:
            if isinstance(event, RunStarted):
                found["flyte_ddp_world_size"] = event.world_size
                found.update({"flyte_ddp_steps_planned": event.num_steps} if event.num_steps else {})
                found["flyte_ddp_restarts_total"] = max(
                    self._values["flyte_ddp_restarts_total"] + 1, event.num_restarts
                )
                found.update(_checkpoint_steps(self._values.get("flyte_ddp_checkpoint_step", 0)))
            elif isinstance(event, CheckpointLoaded):
                found["flyte_ddp_step"] = event.step
                found.update(_checkpoint_steps(event.step))
            elif isinstance(event, Reported):
                found["flyte_ddp_step"] = event.step
                found.update({"flyte_ddp_epoch": event.epoch} if event.epoch is not None else {})
                for name, value in (("train_loss", "loss"), ("samples_per_second", "samples_per_second")):
                    if value in event.values:
                        found[f"flyte_ddp_{name}"] = event.values[value]
            elif isinstance(event, EpochFinished):
                found["flyte_ddp_epoch"] = event.epoch
                found["flyte_ddp_test_loss"] = event.test_loss
                found["flyte_ddp_accuracy_ratio"] = event.accuracy
            elif isinstance(event, CheckpointSaved):
                found["flyte_ddp_checkpoint_copied_step"] = event.step
            elif isinstance(event, CheckpointWritten):
                found["flyte_ddp_checkpoint_step"] = event.step
            elif isinstance(event, RunFinished):
                found["flyte_ddp_finished"] = 1
            self._values.update(found)

    def values(self) -> dict[str, float]:
        """Return all figures that are known, by name."""
        with self._lock:
            return {**self._values, "flyte_ddp_restarts_total": max(0.0, self._values["flyte_ddp_restarts_total"])}

    def close(self, error: BaseException | None) -> None:
        """Serve the run no more."""
        self.is_open = False


class MetricsServer:
    """A server of the figures of open runs, at GET /metrics. A port that is taken is a warning, not an error.

    Args:
        port: to listen on, at all addresses; 0 for any free one.
    """

    def __init__(self, port: int) -> None:
        self.port = 0  # at which it listens; 0 if it does not
        self._runs: list[RunFigures] = []
        self._lock = threading.Lock()
        text = self.text

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                body = text().encode() if is_known else b""
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        try:
            self._server = http.server.ThreadingHTTPServer(("", port), Handler)
        except OSError as error:
            logger.warning("metrics are not served: port %d: %s", port, error)
            return
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def follow(self, attempt: int = 0, /, **labels: str) -> RunFigures:
        """Return the listener of one more run of the task's `attempt`, whose figures get `labels`."""
        run = RunFigures(",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()), attempt)
        with self._lock:
            self._runs.append(run)
        return run

    def text(self) -> str:
        """Return the figures of all runs that have not ended, in Prometheus' text format."""
        with self._lock:
            self._runs = [run for run in self._runs if run.is_open]
            found = [(run.labels, run.values()) for run in self._runs]
        lines = []
        for name in sorted({name for _, values in found for name in values}):
            lines += [
                f"# HELP {name} {HELP[name]}",
                f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}",
            ]
            lines += [f"{name}{{{labels}}} {values[name]!r}" for labels, values in found if name in values]
        return "".join(f"{line}\n" for line in lines)

    def close(self) -> None:
        """Stop serving."""
        if self.port:
            self._server.shutdown()
            self._server.server_close()


def requested_port() -> int:
    """Return the port that registration asked for; 0 for none."""
    return int(os.environ.get(PORT_VARIABLE) or 0)


def _checkpoint_steps(step: float) -> dict[str, float]:
    """Return the figures of an attempt that starts: what an earlier one copied and did not write is lost."""
    return {"flyte_ddp_checkpoint_step": step, "flyte_ddp_checkpoint_copied_step": step}


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
