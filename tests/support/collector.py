"""A collector of OpenTelemetry: a real HTTP server on this machine that decodes OTLP."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it gets. `status` is its answer; while `is_hanging`, there is none."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.is_hanging = threading.Event()
        self.has_ended = threading.Event()
        self.num_requests = 0
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def find(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def seconds(self, name: str) -> float:
        """Return the length of all spans with this name."""
        return sum(length(span) for span in self.find(name))


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.num_requests += 1
        if self.server.is_hanging.is_set():
            self.server.has_ended.wait()
            return
        if self.server.status == 200 and self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.services.add(attributes(resource.resource)["service.name"])
                for scope in resource.scope_spans:
                    self.server.spans += scope.spans
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def length(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@contextlib.contextmanager
def open_collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.has_ended.set()
            server.shutdown()
            thread.join()
