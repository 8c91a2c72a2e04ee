"""Read a task's metrics while it trains, as Prometheus would; Prometheus itself, and its tool."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import yaml

from flyte_ddp.flyte.deck import DeckPublisher
from flyte_ddp.observers.metrics import PORT_VARIABLE
from tests.support.ports import free_port

needs_prometheus = pytest.mark.skipif(
    not shutil.which("promtool"),
    reason="no promtool on this machine: apt-get install --no-install-recommends prometheus",
)


def promtool(*arguments, stdin=""):
    """Run promtool; AssertionError with everything that it printed if it fails or warns."""
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def record_figures(patch):
    """Let tasks serve their figures, and return the list to which each new report adds them, or
    "".
    """
    port = free_port()
    figures = []

    def scrape(_):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                figures.append(answer.read().decode())
        except urllib.error.URLError:
            figures.append("")

    patch.setenv(PORT_VARIABLE, str(port))
    patch.setattr(DeckPublisher, "_publish", scrape)
    return figures


class Prometheus:
    """A Prometheus process of this machine that answers at `url`."""

    def __init__(self, url):
        self.url = url

    def get(self, path, **parameters):
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        """Return the labels and the value of each series of an instant query."""
        return [
            (each["metric"], float(each["value"][1]))
            for each in self.get("query", query=expression)["result"]
        ]

    def firing(self, alert):
        """Return the labels of each alert of this name that fires."""
        found = [
            each for each in self.get("alerts")["alerts"] if each["labels"]["alertname"] == alert
        ]
        return [each["labels"] for each in found if each["state"] == "firing"]


@contextlib.contextmanager
def run_prometheus(directory, scrape_configs, groups):
    """Start a Prometheus that scrapes and evaluates the groups of rules each second, and end it
    with the block.
    """
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    every_second = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {
        "global": every_second,
        "rule_files": ["rules.yaml"],
        "scrape_configs": scrape_configs,
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    promtool("check", "config", directory / "prometheus.yaml")
    address = f"127.0.0.1:{free_port()}"
    with open(directory / "prometheus.log", "w") as log:
        process = subprocess.Popen(
            [
                *(
                    "prometheus",
                    f"--config.file={directory}/prometheus.yaml",
                    f"--web.listen-address={address}",
                ),
                *(f"--storage.tsdb.path={directory}/data", "--log.level=warn"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=10),
            ):
                break
            has_time = process.poll() is None and time.monotonic() < deadline
            assert has_time, (directory / "prometheus.log").read_text()
            time.sleep(0.2)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(60)


def pod_targets(pods):
    """Return what Prometheus' discovery of pods finds: a target for each declared port, or one
    without for a container.

    By its discovery/kubernetes/pod.go. Debian's Prometheus has no discovery by Kubernetes, but one
    by HTTP.
    """
    found = []
    for pod in pods:
        metadata, address = pod["metadata"], pod["status"].get("podIP")
        if not address:
            continue
        of_pod = {
            "namespace": metadata["namespace"],
            "pod_name": metadata["name"],
            "pod_phase": pod["status"]["phase"],
        }
        for name, value in metadata.get("labels", {}).items():
            of_pod |= {
                f"pod_label_{_clean(name)}": value,
                f"pod_labelpresent_{_clean(name)}": "true",
            }
        for container in pod["spec"]["containers"]:
            of_container = {**of_pod, "pod_container_name": container["name"]}
            for port in container.get("ports", []):
                number = str(port["containerPort"])
                of_port = {
                    "pod_container_port_name": port.get("name", ""),
                    "pod_container_port_number": number,
                }
                found.append((f"{address}:{number}", {**of_container, **of_port}))
            if not container.get("ports"):
                found.append((address, of_container))
    return [
        {
            "targets": [target],
            "labels": {f"__meta_kubernetes_{name}": value for name, value in labels.items()},
        }
        for target, labels in found
    ]


def scrape_config(monitor, namespace, pods_url):
    """Return the scrape configuration that the Prometheus operator makes of a PodMonitor in a
    namespace, but for times.

    By its pkg/prometheus/promcfg.go: a pod without the declared port that the endpoint names is no
    target. `pods_url` serves `pod_targets`.
    """
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint.keys() <= {"port", "targetPort", "path", "interval"}
    kept = [("namespace", namespace)]
    for name, value in spec["selector"].get("matchLabels", {}).items():
        kept.append((f"pod_label_{_clean(name)}", value))
    for each in spec["selector"].get("matchExpressions", []):
        assert each["operator"] == "Exists"
        kept.append((f"pod_labelpresent_{_clean(each['key'])}", "true"))
    kind = "name" if "port" in endpoint else "number"
    kept.append((f"pod_container_port_{kind}", str(endpoint.get("port") or endpoint["targetPort"])))
    meta = "__meta_kubernetes_"
    return {
        "job_name": f"podMonitor/{namespace}/{monitor['metadata']['name']}/0",
        "metrics_path": endpoint["path"],
        "http_sd_configs": [{"url": pods_url, "refresh_interval": "1s"}],
        "relabel_configs": [
            {
                "action": "drop",
                "source_labels": [f"{meta}pod_phase"],
                "regex": "(Failed|Succeeded)",
            },
            *(
                {"action": "keep", "source_labels": [meta + label], "regex": re.escape(value)}
                for label, value in kept
            ),
            {"source_labels": [f"{meta}namespace"], "target_label": "namespace"},
            {"source_labels": [f"{meta}pod_container_name"], "target_label": "container"},
            {"source_labels": [f"{meta}pod_name"], "target_label": "pod"},
            {"target_label": "job", "replacement": f"{namespace}/{monitor['metadata']['name']}"},
        ],
    }


def _clean(label):
    """Return the name of a Kubernetes label as Prometheus has it."""
    return re.sub(r"\W", "_", label)
