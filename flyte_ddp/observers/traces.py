"""The observer that sends a run to a collector of OpenTelemetry, by OTLP over HTTP. Spans are the
run, its attempts, epochs and checkpoints, and each part of the wall time. The extra `otel` brings
the client, which is imported in this observer's thread.

A span is sent when it ends, and never changed. So the spans of work that was lost stay, and a span
"redone_steps" covers them once more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.config.extras import how_to_install
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointWritten,
    EpochFinished,
    Event,
    RunStarted,
    RunState,
)
from flyte_ddp.observers.recorder import MAX_EVENTS, Sender
from flyte_ddp.storage import redact_url

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"  # nothing is sent without it
PARENT_VARIABLE = "TRACEPARENT"  # span of whoever started the run, as W3C writes it
PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
CLIENT_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
# Purposes of the wall time, in the order in which the spans of one interval follow each other.
WORK = ("program", "stepping", "evaluating", "checkpoint_stalls")
PURPOSES = ("starting", *WORK, "restarting", "announced_losses", "waiting_for_nodes")


def make_traces(run: str) -> list[Traces]:
    """Return the listener that sends spans; none if no endpoint is set, or if the caller's own
    trace is not recorded.

    Args:
        run: the same in every attempt of one run. The id of the trace follows from it.
    """
    if not os.environ.get(ENDPOINT_VARIABLE):
        return []
    found = PARENT.fullmatch(os.environ.get(PARENT_VARIABLE, "").strip())
    if found is None:
        return [Traces(run, hashlib.sha256(run.encode()).hexdigest()[:32])]
    is_recorded = int(found[3], 16) & 1
    return [Traces(run, found[1], int(found[2], 16))] * is_recorded


def _make_id() -> int:
    return int.from_bytes(os.urandom(8), "big")


@dataclass(frozen=True)
class Span:
    """A part of a run that has ended. Times are seconds since the epoch."""

    name: str
    begun_at: float
    ended_at: float
    id: int
    parent: int  # id of the span around it; 0 for none
    error: str
    attributes: Mapping[str, Any]


@dataclass(eq=False)
class Traces(Sender):
    """Sends the spans of a run. A collector that was away gets them when it is back."""

    service = "OpenTelemetry"
    close_timeout = 5.0
    _begun_at = 0.0
    _booked_at = 0.0  # the time until then has spans
    _attempt = 0  # id of the open attempt; 0 between attempts
    _attempt_begun_at = 0.0
    _num_attempts = 0
    _worked_until = 0.0  # end of the work of the last attempt
    _epoch_begun_at = 0.0
    _has_warned = False

    run: str
    trace: str  # id of the trace, 32 hexadecimal digits
    parent: int = 0  # id of the span around the run; 0 for none
    _exporter: Any = None
    _id: int = field(default_factory=_make_id)
    _booked: dict[str, float] = field(default_factory=dict)  # seconds that have spans, by purpose
    # time of the copy by step, of checkpoints that are being written
    _copied_at: dict[int, float] = field(default_factory=dict)
    # spans in the client's form
    _waiting: deque[Any] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))

    def handle(self, event: Event, state: RunState) -> None:
        self._state, at = state, event.at
        match event:
            case AttemptStarted():
                if not self._begun_at:
                    self._begun_at = self._booked_at = event.launched_at
                self._book(at)
                self._attempt, self._attempt_begun_at = _make_id(), at
                self._num_attempts += 1
            case RunStarted() | CheckpointLoaded():
                self._book(at)
                self._epoch_begun_at = at
            case EpochFinished():
                self._book(at)
                self._add("epoch", self._epoch_begun_at, at, epoch=event.position, step=event.step)
                self._epoch_begun_at = at
            case CheckpointSaved() if event.url:
                self._book(at)
                self._copied_at[event.step] = at - event.seconds
            case CheckpointWritten() if event.step in self._copied_at:
                copied_at = self._copied_at.pop(event.step)
                self._add("checkpoint", copied_at, at, step=event.step, url=event.url)
            case AttemptEnded():
                self._book(at)
                self._worked_until = at - event.idle_seconds
                error = event.reason
                if event.num_leaving:
                    error = ""
                self._end_attempt(at, error, reason=event.reason)

    def close(self, error: BaseException | None) -> None:
        if self._begun_at:
            at, text = time.time(), ""
            if self._state.finished:
                at = self._state.finished.at
            if error is not None:
                text = redact_url(f"{type(error).__name__}: {error}".partition("\n")[0])
            self._book(at)
            self._end_attempt(at, text)
            self._put(
                Span("run", self._begun_at, at, self._id, self.parent, text, {"run": self.run})
            )
        super().close(error)

    def _book(self, until: float) -> None:
        """Add a span for each purpose of the time since the last call."""
        parts, begin = self._state.time_spent(until).parts(), self._booked_at
        gained = {name: parts[name] - self._booked.get(name, 0.0) for name in parts}
        self._booked, self._booked_at = parts, until
        redone = gained["redone_steps"]
        if redone > 0:
            lost = {f"lost_{name}": -gained[name] for name in WORK}
            end = self._worked_until
            self._add("redone_steps", end - redone, end, **lost)
        for purpose in PURPOSES:
            if gained[purpose] > 0:
                end = begin + gained[purpose]
                self._add(purpose, begin, end)
                begin = end

    def _add(self, name: str, begun_at: float, ended_at: float, **attributes: Any) -> None:
        around = self._attempt or self._id
        self._put(Span(name, begun_at, ended_at, _make_id(), around, "", attributes))

    def _end_attempt(self, at: float, error: str, **attributes: Any) -> None:
        if self._attempt:
            attributes["attempt"] = self._num_attempts
            times = (self._attempt_begun_at, at)
            self._put(Span("attempt", *times, self._attempt, self._id, error, attributes))
        self._attempt = 0

    def _record(self, span: Span) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.trace import SpanContext, Status, StatusCode
        except ImportError:
            raise ConfigError(how_to_install("opentelemetry")) from None
        if self._exporter is None:
            # The line of this observer is enough: the client would log one for each try.
            logging.getLogger(CLIENT_LOGGER).setLevel(logging.CRITICAL)
            self._exporter = OTLPSpanExporter()
        trace, parent, status = int(self.trace, 16), None, Status()
        if span.parent:
            parent = SpanContext(trace, span.parent, is_remote=False)
        if span.error:
            status = Status(StatusCode.ERROR, span.error)
        service = Resource({"service.name": "flyte-ddp"})  # OTEL_SERVICE_NAME replaces it
        readable = ReadableSpan(
            span.name,
            SpanContext(trace, span.id, is_remote=False),
            parent,
            service.merge(OTELResourceDetector().detect()),
            {f"flyte_ddp.{name}": value for name, value in span.attributes.items()},
            status=status,
            start_time=int(1e9 * span.begun_at),
            end_time=int(1e9 * span.ended_at),
        )
        self._waiting.append(readable)

    def _send(self) -> None:
        if not self._waiting:
            return
        if self._exporter.export(self._waiting).name == "SUCCESS":
            self._waiting.clear()
        elif not self._has_warned:
            self._has_warned = True
            place = redact_url(os.environ[ENDPOINT_VARIABLE])
            self.say(
                f"{self.service}: {place} takes no spans; they wait, and the training continues"
            )

    def _end(self, status: str) -> None:
        self._send()
