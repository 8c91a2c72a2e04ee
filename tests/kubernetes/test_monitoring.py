"""A real Prometheus on this machine scrapes a training pod by what deploy/alerts.yaml says.

Alerts fire for faults that are caused, and stop. tests/test_metrics.py has all of them, on series
of figures.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import shlex
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from flyte_ddp.promotion.champion import ChampionStore
from flyte_ddp.recipes import config_of
from tests.kubernetes.conftest import IMAGE, ROOT, Namespace, eventually, kubectl
from tests.kubernetes.flyte import NESTED, Flyte, Package, literals
from tests.kubernetes.store import Store
from tests.support.prometheus import needs_prometheus, pod_targets, run_prometheus, scrape_config
from tests.test_champion import promote

DOCUMENTS = list(yaml.safe_load_all((ROOT / "deploy/alerts.yaml").read_text()))
# Times of the rules, and shorter ones for a test.
SHORTER = {
    "TrainingWithoutProgress": ("1800", "30"),
    "RetrainingSilentOrStuck": ("5400", "90"),
}
RANKS = "$(grep -l '[f]orkserver' /proc/[0-9]*/cmdline | cut -d/ -f3)"


def shorter_rules() -> list[dict[str, Any]]:
    (rules,) = (each for each in DOCUMENTS if each["kind"] == "PrometheusRule")
    groups: list[dict[str, Any]] = rules["spec"]["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        time, shorter = SHORTER.get(rule["alert"], ("", ""))
        texts = {
            name: rule[name].replace(time, shorter)
            for name in ("expr", "for")
            if time and name in rule
        }
        assert not time or texts != {name: rule[name] for name in texts}, rule
        rule.update(texts)
    return groups


def seconds(time: str) -> float:
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


@contextlib.contextmanager
def serve_cluster(namespace: Namespace) -> Iterator[str]:
    """Serve what Prometheus' discovery finds, at /pods, and kube-state-metrics' figures of
    CronJobs, at /metrics.
    """

    def figures() -> str:
        lines = []
        for each in namespace.items("cronjobs"):
            labels = f'{{namespace="{namespace.name}",cronjob="{each["metadata"]["name"]}"}}'
            lines.append(
                f"kube_cronjob_created{labels} {seconds(each['metadata']['creationTimestamp'])}"
            )
            if succeeded_at := each["status"].get("lastSuccessfulTime"):
                lines.append(
                    f"kube_cronjob_status_last_successful_time{labels} {seconds(succeeded_at)}"
                )
        return "".join(f"{line}\n" for line in lines)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_pods = self.path == "/pods"
            body = json.dumps(pod_targets(namespace.items("pods"))) if is_pods else figures()
            self.send_response(200)
            self.send_header(
                "Content-Type", "application/json" if is_pods else "text/plain; version=0.0.4"
            )
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@needs_prometheus
def test_prometheus_finds_a_training_pod_and_alerts_fire_for_its_faults_and_stop(
    namespace: Namespace, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tasks.prepare
    import tasks.train

    namespace.kubectl("apply", "-f", str(ROOT / "deploy/pod-template.yaml"))
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
        tasks.prepare.prepare, recipe="digits", config=tasks.inputs.TrainingOverrides(**overrides)
    )
    data = flyte.run(package, "tasks.prepare.prepare", "n0/data", inputs).literals["data"]
    config = config_of("digits", overrides)
    inputs = literals(
        tasks.train.train_on_one_node, recipe="digits", config=config, data=data, num_processes=2
    )

    (monitor,) = (each for each in DOCUMENTS if each["kind"] == "PodMonitor")
    groups = shorter_rules()
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serve_cluster(namespace))
        pods = scrape_config(monitor, namespace.name, f"http://{address}/pods")
        cron_jobs = {
            "job_name": "kube-state-metrics",
            "honor_labels": True,
            "scrape_interval": "5s",  # it asks the API server each time
            "static_configs": [{"targets": [address]}],
        }
        prometheus = stack.enter_context(run_prometheus(tmp_path, [pods, cron_jobs], groups))

        def fires(alert: str, **labels: str) -> None:
            (found,) = eventually(lambda: prometheus.firing(alert), 300, f"{alert} fires")
            assert found.items() >= {"namespace": namespace.name, **labels}.items()

        def stops(alert: str) -> None:
            eventually(lambda: not prometheus.firing(alert), 300, f"{alert} stops")

        champion = start_champion_status(namespace, store, monkeypatch)

        # The fourth attempt: Flyte has started the task three times again.
        pod = flyte.start(package, "tasks.train.train_on_one_node", NESTED, inputs, attempt=3)
        stack.callback(lambda: print(namespace.log(pod)))  # which pytest shows after a failure
        run = {"run": "watched-n2-0-n2-n1-0-n0"}
        eventually(lambda: prometheus.query("flyte_ddp_step > 10"), 300, "steps in Prometheus")
        # no other pod of a task declares the port
        (target,) = prometheus.query("up{job!='kube-state-metrics'}")
        assert (
            target[0].items()
            >= {"pod": pod, "namespace": namespace.name, "container": "primary"}.items()
        )
        fires("TrainingRestartsOften", **run)
        eventually(
            lambda: prometheus.query("flyte_ddp_checkpoint_step > 0"),
            300,
            "a checkpoint in Prometheus",
        )

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

        fires("RetrainingSilentOrStuck", cronjob="champion-status")
        promote(champion, 1)
        champion.record_run("promoted", "f1", True)
        assert run_champion_status(namespace, "good") == 0
        stops("RetrainingSilentOrStuck")

        namespace.kubectl("delete", "pod", pod, "--wait=false")
        stops("TrainingRestartsOften")


def start_champion_status(
    namespace: Namespace, store: Store, patch: pytest.MonkeyPatch
) -> ChampionStore:
    """Create the CronJob of deploy/ for a champion that does not exist, see its Job fail, and
    return its place.
    """
    for name, value in {
        **store.keys,
        "AWS_ENDPOINT_URL": store.url,
    }.items():  # what pods have from the Secret `storage`
        patch.setenv(name, value)
    text = (ROOT / "deploy/champion-status.yaml").read_text()
    for name, value in {
        "NAMESPACE": namespace.name,
        "IMAGE": IMAGE,
        "CHAMPION_URL": "s3://runs/champion",
    }.items():
        text = text.replace(name, value)
    kubectl("apply", "-f", "-", stdin=text)
    assert run_champion_status(namespace, "first") == 1
    return ChampionStore("s3://runs/champion")


def run_champion_status(namespace: Namespace, name: str) -> int:
    """Return the exit status of a Job of the CronJob that starts now. Its reason must be the right
    one.
    """
    namespace.kubectl("create", "job", f"champion-status-{name}", "--from=cronjob/champion-status")
    pods = eventually(
        lambda: namespace.items("pods", f"job-name=champion-status-{name}"),
        60,
        "the pod of the Job",
    )
    pod = pods[0]["metadata"]["name"]
    status = namespace.wait_for_end(pod)
    expected = "is in use" if status == 0 else "error: no retraining has ended yet"
    assert expected in namespace.log(pod), json.dumps(pods)
    return status


def test_the_runbook_finds_the_quota_that_an_execution_without_a_pod_waits_for(
    operator: None,
) -> None:
    name = f"ddp-quota-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    try:
        kubectl("--namespace", name, "create", "quota", "training", "--hard=pods=0")
        eventually(
            lambda: "pods" in kubectl("--namespace", name, "describe", "resourcequota"),
            60,
            "the quota's use",
        )
        with pytest.raises(
            AssertionError,
            match="exceeded quota: training, requested: pods=1, used: pods=0, limited",
        ):
            # as Flyte creates a task's pod
            kubectl("--namespace", name, "run", "task", f"--image={IMAGE}")
        (row,) = re.findall(r"^\| \*queued\*.*", (ROOT / "deploy/RUNBOOK.md").read_text(), re.M)
        symptom, command = row.split(" | ")[0:2]
        (command,) = re.findall("`k (.+?)`", command)
        assert re.search(r"\npods +0 +0\n", kubectl("--namespace", name, *shlex.split(command))), (
            symptom
        )
        events = kubectl("--namespace", name, "get", "events", "--output", "json")
        assert "quota" not in events
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
