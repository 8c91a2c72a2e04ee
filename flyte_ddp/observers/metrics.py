"""The observers that serve the figures of a task's runs to Prometheus, on a port of its pod."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from flyte_ddp.events import AttemptEnded, AttemptStarted, Event, NodeMeasured, RunStarted, RunState

PORT_VARIABLE = "FLYTE_DDP_METRICS_PORT"  # set by registration; nothing is served without it
PORT_NAME = "metrics"  # name of the port in the task's pod; deploy/alerts.yaml uses it

# The figure that each metric is, by its name in `Figures`, and the metric's help.
METRICS = {
    "flyte_ddp_world_size": ("world_size", "ranks of the current attempt"),
    "flyte_ddp_steps_planned": ("num_steps", "optimizer steps of the whole run"),
    "flyte_ddp_step": ("step", "optimizer steps done"),
    "flyte_ddp_epoch": ("epoch", "epochs done"),
    "flyte_ddp_train_loss": ("loss", "mean training loss since the previous step event"),
    "flyte_ddp_test_loss": ("test_loss", "held-out loss after the last epoch"),
    "flyte_ddp_accuracy_ratio": ("accuracy", "held-out accuracy after the last epoch, in [0, 1]"),
    "flyte_ddp_samples_per_second": (
        "samples_per_second",
        "training samples per second, over all ranks",
    ),
    "flyte_ddp_checkpoint_step": (
        "checkpoint_step",
        "step of the newest checkpoint that the store has; 0 for none",
    ),
    "flyte_ddp_checkpoint_copied_step": (
        "checkpoint_copied_step",
        "step of the newest state copied for a checkpoint",
    ),
    "flyte_ddp_restarts_total": (
        "restarts_total",
        "restarts of the ranks in this attempt of the task",
    ),
    "flyte_ddp_announced_losses_total": (
        "announced_losses_total",
        "ends of a gang because nodes left, as announced",
    ),
    "flyte_ddp_stragglers": ("stragglers", "ranks that are slower than the median of the others"),
    "flyte_ddp_straggler_ratio": (
        "straggler_factor",
        "own time per step of the slowest of them / the median",
    ),
    "flyte_ddp_attempt": ("attempt", "number of this attempt of the task, from 0"),
    "flyte_ddp_last_event_timestamp_seconds": (
        "last_event_timestamp_seconds",
        "when rank 0 last reported anything",
    ),
    "flyte_ddp_remaining_seconds": (
        "remaining_seconds",
        "until the last step, by the pace since the ranks' first report",
    ),
    "flyte_ddp_finished": ("finished", "1 when the run has ended well"),
}
# A gauge: steps that are lost with an attempt move to the purpose "redone_steps".
WALL_SECONDS = "flyte_ddp_wall_seconds"
RANK_INFO = "flyte_ddp_rank_info"
HELP = {name: text for name, (_, text) in METRICS.items()} | {
    WALL_SECONDS: "wall time of the run by purpose, see flyte_ddp.events.TimeSpent",
    RANK_INFO: "always 1: where each rank of the current attempt runs, to join other exporters",
}

NO_STRAGGLERS = {"stragglers": 0, "straggler_factor": 1}
AT_START = {"finished": 0, "restarts_total": 0, "announced_losses_total": 0, **NO_STRAGGLERS}

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RunFigures:
    """The listener of a run in Flyte's `attempt`, from 0: its newest figures, with `labels`, until
    it has ended.
    """

    labels: dict[str, str]
    attempt: int = 0
    is_open: bool = True
    # copies for the thread that serves them
    _ends_at: float | None = None  # see `RunState`
    _values: dict[str, float] = field(default_factory=lambda: dict(AT_START))
    # labels of each rank of the current attempt, by node
    _ranks: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    # time of the newest event, the seconds of each purpose then, and one second later
    _spent: tuple[float, dict[str, float], dict[str, float]] = (0.0, {}, {})

    def handle(self, event: Event, state: RunState) -> None:
        self._follow_ranks(event)
        figures = event.figures()
        found = {**figures.values, "step": figures.step, "epoch": figures.epoch}
        if isinstance(event, AttemptEnded):
            found |= NO_STRAGGLERS  # until there are ranks to compare
        elif isinstance(event, RunStarted):
            found["checkpoint_step"] = self._values.get("checkpoint_step", 0)
            # the ranks that wrote another are gone
            found["checkpoint_copied_step"] = found["checkpoint_step"]
        found["restarts_total"] = max(0, state.num_starts - 1 - state.num_announced_losses)
        found["announced_losses_total"] = state.num_announced_losses
        known = {name: value for name, value in found.items() if value is not None}
        self._ends_at = state.ends_at
        if event.at:
            spent, later = (state.time_spent(event.at + more).parts() for more in (0, 1))
            self._spent = event.at, spent, later
        # at once: the other thread sees all values of an event, or no value
        self._values = {**self._values, **known, "last_event_timestamp_seconds": time.time()}

    def _follow_ranks(self, event: Event) -> None:
        if isinstance(event, AttemptStarted | AttemptEnded):
            self._ranks = {}  # the next attempt may place its ranks elsewhere
        elif isinstance(event, NodeMeasured):
            ranks = [
                {"rank": str(rank), "node": event.host, "pod": event.pod, "gpu_uuid": uuid}
                for rank, uuid in enumerate(event.gpu_uuids, event.first_rank)
            ]
            self._ranks = {**self._ranks, event.node: ranks}

    def values(self) -> dict[str, float]:
        """Return all metrics that are known, by name."""
        known, ends_at = {**self._values, "attempt": self.attempt}, self._ends_at
        if ends_at is not None:
            known["remaining_seconds"] = max(0.0, ends_at - time.time())
        return {name: known[figure] for name, (figure, _) in METRICS.items() if figure in known}

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Return the name, the labels and the value of each sample."""
        for name, value in self.values().items():
            yield name, self.labels, value
        at, spent, later = self._spent
        elapsed = max(0.0, time.time() - at)
        for purpose, seconds in spent.items():
            growth = elapsed * (later[purpose] - seconds)
            yield WALL_SECONDS, {**self.labels, "purpose": purpose}, seconds + growth

        for ranks in self._ranks.values():
            for rank in ranks:
                yield RANK_INFO, {**self.labels, **rank}, 1.0

    def close(self, error: BaseException | None) -> None:
        self.is_open = False


class MetricsServer(Collector):
    """Serves the figures of open runs at `port` of all addresses, 0 for any. A port that is taken
    is a warning.
    """

    def __init__(self, port: int) -> None:
        self.port = 0  # at which it listens; 0 if it does not
        self._runs: list[RunFigures] = []
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, registry=registry)
        except OSError as error:
            logger.warning("metrics are not served: port %d: %s", port, error)
            return
        self.port = self._server.server_port

    def follow(self, attempt: int = 0, /, **labels: str) -> RunFigures:
        """Return the listener of one more run of the task's `attempt`. Its figures get `labels`."""
        run = RunFigures(labels, attempt)
        self._runs.append(run)
        return run

    def collect(self) -> Iterator[Metric]:
        """Return the figures of all runs that have not ended."""
        metrics: dict[str, Metric] = {}
        for run in list(self._runs):
            if not run.is_open:
                continue
            for name, labels, value in run.samples():
                kind = "counter" if name.endswith("_total") else "gauge"
                metric = Metric(name.removesuffix("_total"), HELP[name], kind)
                metrics.setdefault(name, metric).add_sample(name, labels, value)
        yield from metrics.values()

    def close(self) -> None:
        if self.port:
            self._server.shutdown()
            self._server.server_close()


def requested_port() -> int:
    """Return the port that registration asked for; 0 for none."""
    return int(os.environ.get(PORT_VARIABLE) or 0)
