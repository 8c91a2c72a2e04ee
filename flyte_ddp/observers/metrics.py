"""The observer that serves a run's figures to Prometheus, as text, on a port of the driver or single-node task.

Needs no library: the text format is lines of `name{labels} value`.
"""

from __future__ import annotations

import http.server
import logging
import os
import threading
import time

from flyte_ddp.events import CheckpointSaved, EpochFinished, Event, RunFinished, RunStarted, StepFinished

PORT_VARIABLE = "FLYTE_DDP_METRICS_PORT"  # set by registration; nothing is served without it
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP = {
    "flyte_ddp_world_size": "ranks of the current attempt",
    "flyte_ddp_steps_planned": "optimizer steps of the whole run",
    "flyte_ddp_step": "optimizer steps done",
    "flyte_ddp_epoch": "epochs done",
    "flyte_ddp_train_loss": "mean training loss since the previous step event",
    "flyte_ddp_test_loss": "held-out loss after the last epoch",
    "flyte_ddp_accuracy": "held-out accuracy after the last epoch, in [0, 1]",
    "flyte_ddp_samples_per_second": "training samples per second, over all ranks",
    "flyte_ddp_checkpoint_step": "step of the newest checkpoint",
    "flyte_ddp_restarts": "times that the ranks were started again in this task's attempt",
    "flyte_ddp_last_event_timestamp_seconds": "when rank 0 last reported anything, in seconds since the epoch",
    "flyte_ddp_finished": "1 when the run has ended well",
}

logger = logging.getLogger(__name__)


class MetricsServer:
    """A listener that answers GET /metrics with the newest figures. A port that is taken is a warning, not an error.

    Args:
        port: to listen on, at all addresses; 0 for any free one.
        labels: of every figure.
    """

    def __init__(self, port: int, **labels: str) -> None:
        self.port = 0  # at which it listens; 0 if it does not
        self._labels = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
        self._values: dict[str, float] = {"flyte_ddp_restarts": -1.0, "flyte_ddp_finished": 0.0}
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

    def handle(self, event: Event) -> None:
        """Keep the figures of the event."""
        found: dict[str, float] = {"flyte_ddp_last_event_timestamp_seconds": time.time()}
        with self._lock:
            if isinstance(event, RunStarted):
                found["flyte_ddp_world_size"] = event.world_size
                found["flyte_ddp_steps_planned"] = event.num_steps
                found["flyte_ddp_step"] = event.resumed_step
                found["flyte_ddp_restarts"] = self._values["flyte_ddp_restarts"] + 1
            elif isinstance(event, StepFinished):
                found["flyte_ddp_step"] = event.step
                found["flyte_ddp_train_loss"] = event.loss
                found["flyte_ddp_samples_per_second"] = event.samples_per_second
            elif isinstance(event, EpochFinished):
                found["flyte_ddp_epoch"] = event.epoch
                found["flyte_ddp_test_loss"] = event.test_loss
                found["flyte_ddp_accuracy"] = event.accuracy
            elif isinstance(event, CheckpointSaved):
                found["flyte_ddp_checkpoint_step"] = event.step
            elif isinstance(event, RunFinished):
                found["flyte_ddp_finished"] = 1
            self._values.update(found)

    def text(self) -> str:
        """Return all figures that are known in Prometheus' text format."""
        with self._lock:
            values = {
                name: max(0.0, value) if name == "flyte_ddp_restarts" else value for name, value in self._values.items()
            }
        return "".join(
            f"# HELP {name} {HELP[name]}\n# TYPE {name} gauge\n{name}{{{self._labels}}} {value!r}\n"
            for name, value in sorted(values.items())
        )

    def close(self, error: BaseException | None) -> None:
        """Stop serving."""
        if self.port:
            self._server.shutdown()
            self._server.server_close()


def requested_port() -> int:
    """Return the port that registration asked for; 0 for none."""
    return int(os.environ.get(PORT_VARIABLE) or 0)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
