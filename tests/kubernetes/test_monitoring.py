"""A real Prometheus on this machine scrapes a training pod by what deploy/alerts.yaml says.

Alerts fire for faults that are caused, and stop. tests/test_metrics.py has all of them, on series
of figures.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flyte_ddp.flyte.inputs import TrainingOverrides
from flyte_ddp.recipes import config_of
from tests.kubernetes.conftest import ROOT, Namespace, eventually
from tests.kubernetes.flyte import NESTED, Flyte, Package, literals
from tests.kubernetes.store import Store
from tests.support.prometheus import needs_prometheus, pod_targets, run_prometheus, scrape_config

DOCUMENTS = list(yaml.safe_load_all((ROOT / "deploy/alerts.yaml").read_text()))
RANKS = "$(grep -l '[f]orkserver' /proc/[0-9]*/cmdline | cut -d/ -f3)"


def shorter_rules() -> list[dict[str, Any]]:
    (rules,) = (each for each in DOCUMENTS if each["kind"] == "PrometheusRule")
    groups: list[dict[str, Any]] = rules["spec"]["groups"]
    (rule,) = (
        rule
        for group in groups
        for rule in group["rules"]
        if rule["alert"] == "TrainingWithoutProgress"
    )
    assert "1800" in rule["expr"]
    rule["expr"] = rule["expr"].replace("1800", "30")  # of the times of the rules the longest
    return groups


@contextlib.contextmanager
def serve_cluster(namespace: Namespace) -> Iterator[str]:
    """Serve what Prometheus' discovery finds."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(pod_targets(namespace.items("pods"))).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@needs_prometheus
def test_prometheus_finds_a_training_pod_and_alerts_fire_for_its_faults_and_stop(
    namespace: Namespace, store: Store, tmp_path: Path
) -> None:
    import tasks.train

    store.files.makedirs("flyte", exist_ok=True)
    package = Package.of(ROOT, tmp_path, "--fast", METRICS_PORT="9465")
    flyte = Flyte(namespace, store, "watched")
    overrides = {
        "epochs": 100_000,
        "global_batch_size": 36,
        "log_interval": 1,
        "checkpoint_interval": 200,
    }
    inputs = literals(
        tasks.train.prepare,
        recipe="digits",
        config=TrainingOverrides(**overrides),
    )
    data = flyte.run(package, "tasks.train.prepare", "n0/data", inputs).literals["data"]
    config = config_of("digits", overrides)
    inputs = literals(
        tasks.train.train_on_one_node, recipe="digits", config=config, data=data, num_processes=2
    )

    (monitor,) = (each for each in DOCUMENTS if each["kind"] == "PodMonitor")
    groups = shorter_rules()
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serve_cluster(namespace))
        pods = scrape_config(monitor, namespace.name, f"http://{address}/pods")
        prometheus = stack.enter_context(run_prometheus(tmp_path, [pods], groups))

        def fires(alert: str, **labels: str) -> None:
            (found,) = eventually(lambda: prometheus.firing(alert), 300, f"{alert} fires")
            assert found.items() >= {"namespace": namespace.name, **labels}.items()

        def stops(alert: str) -> None:
            eventually(lambda: not prometheus.firing(alert), 300, f"{alert} stops")

        # The fourth attempt: Flyte has started the task three times again.
        pod = flyte.start(package, "tasks.train.train_on_one_node", NESTED, inputs, attempt=3)
        stack.callback(lambda: print(namespace.log(pod)))  # which pytest shows after a failure
        run = {"run": "watched-n2-0-n2-n1-0-n0"}
        eventually(lambda: prometheus.query("flyte_ddp_step > 10"), 300, "steps in Prometheus")
        # no other pod of a task declares the port
        (target,) = prometheus.query("up")
        assert (
            target[0].items()
            >= {"pod": pod, "namespace": namespace.name, "container": "primary"}.items()
        )
        fires("TrainingRestartsOften", **run)
        namespace.kubectl("exec", pod, "--", "bash", "-c", f"kill -STOP {RANKS}")
        fires("TrainingWithoutProgress", **run, pod=pod, severity="critical")
        namespace.kubectl("exec", pod, "--", "bash", "-c", f"kill -CONT {RANKS}")
        stops("TrainingWithoutProgress")
        ((_, step),) = prometheus.query("flyte_ddp_step")
        eventually(
            lambda: prometheus.query(f"flyte_ddp_step > {step}"),
            60,
            "more steps: the run goes on",
        )

        namespace.kubectl("delete", "pod", pod, "--wait=false")
        stops("TrainingRestartsOften")
