"""Each panel of deploy/dashboard.json finds data in a Prometheus that has recorded a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import yaml

from flyte_ddp.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    CheckpointWritten,
    Straggler,
    StragglersFound,
)
from flyte_ddp.observers import metrics
from flyte_ddp.observers.metrics import HELP, MetricsServer
from tests.support.ports import free_port
from tests.support.prometheus import needs_prometheus, promtool
from tests.support.short_run import epoch_finished, feed, loaded, reported, started

DEPLOY = Path(__file__).parents[2] / "deploy"
ALL = re.compile(r"\$(namespace|run|script)\b")
INTERVAL = 30  # seconds between two scrapes
MINUTES = 20


def events_by_second():
    """Return the events of a run with three restarts, by the second after its launch."""
    yield 60, AttemptStarted(2, 0.0, 50.0)
    yield 90, started(num_steps=100)
    yield 95, loaded()
    yield 120, reported(4)
    yield 150, epoch_finished(1)
    yield 160, CheckpointSaved(4, "file:///c/4.json", True, 1.0)
    yield 170, CheckpointWritten(4, "file:///c/4.json", True)
    for second in (300, 500, 700):
        yield second, reported(8)
        yield second + 40, AttemptEnded(8, "rank 1 exited", 10.0)
        yield second + 60, AttemptStarted(2, 0.0, 5.0)
        yield second + 80, started(num_steps=100)
        yield second + 85, loaded(4)
    yield 900, reported(12)
    yield 1100, reported(20)
    slow = Straggler(1, "node 0", "", "data", 0.3, 0.1, 0.6, 0.4)
    yield 1120, StragglersFound(20, [slow])


def record_run(file, begin, patch):
    """Write what Prometheus would scrape from a run that was launched at `begin`, in Unix time."""
    now = begin
    # Only this module's clock: the server and the events do not wait.
    clock = type("Clock", (), {"time": staticmethod(lambda: now)})
    patch.setattr(metrics, "time", clock)
    server = MetricsServer(0)
    run = server.follow(1, recipe="digits", run="f1-n1")
    waiting = list(events_by_second())
    families = {}
    for second in range(0, MINUTES * 60, INTERVAL):
        while waiting and waiting[0][0] <= second:
            at, event = waiting.pop(0)
            now = begin + at
            changes = {"launched_at": begin} if isinstance(event, AttemptStarted) else {}
            feed(run, dataclasses.replace(event, at=now, **changes))
        now = begin + second
        for metric in server.collect():
            for sample in metric.samples:
                labels = {**sample.labels, "namespace": "n", "pod": "f1-n1-0"}
                text = ",".join(f'{name}="{value}"' for name, value in labels.items())
                _, lines = families.setdefault(metric.name, (metric.type, []))
                lines.append(f"{sample.name}{{{text}}} {sample.value} {now}")
    server.close()
    with open(file, "w") as text:
        for name, (kind, lines) in families.items():
            # Lines of one series have to follow each other.
            print(f"# TYPE {name} {kind}", *sorted(lines, key=series_of), sep="\n", file=text)
        print("# EOF", file=text)


def series_of(line):
    return line.split("}")[0]


@contextlib.contextmanager
def prometheus(directory):
    """Yield the function that queries a Prometheus with the data in `directory`, and the rules of
    deploy/alerts.yaml.
    """
    (rules,) = (
        each
        for each in yaml.safe_load_all((DEPLOY / "alerts.yaml").read_text())
        if each["kind"] == "PrometheusRule"
    )
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules["spec"]))
    config = {"global": {"evaluation_interval": "1s"}, "rule_files": ["rules.yaml"]}
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"

    def query(expression):
        parameters = urllib.parse.urlencode({"query": expression})
        url = f"http://{address}/api/v1/query?{parameters}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]["result"]

    with open(directory / "log", "w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stderr=log,
        )
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                if query('ALERTS{alertstate="firing"}') and query("flyte_ddp:lost:ratio3d"):
                    break
            time.sleep(0.2)
        assert process.poll() is None, (directory / "log").read_text()
        yield query
    finally:
        process.terminate()
        process.wait()


def panel_queries():
    """Return the title and the query of each target in the dashboard."""
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    return [
        (panel["title"], target["expr"])
        for panel in panels
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


@needs_prometheus
def test_each_panel_and_each_recording_rule_returns_data_of_a_recorded_run(tmp_path, monkeypatch):
    record_run(tmp_path / "run.txt", int(time.time()) - MINUTES * 60, monkeypatch)
    promtool("tsdb", "create-blocks-from", "openmetrics", tmp_path / "run.txt", tmp_path / "data")
    rules = (DEPLOY / "alerts.yaml").read_text()
    recorded = re.findall(r"record: (\S+)", rules)
    with prometheus(tmp_path) as query:
        empty = [title for title, text in panel_queries() if not query(ALL.sub(".*", text))]
        assert empty == []
        assert [name for name in recorded if not query(name)] == []
        (goodput,) = query("flyte_ddp:goodput:ratio")
        assert goodput["metric"] == {
            "__name__": "flyte_ddp:goodput:ratio",
            "namespace": "n",
            "run": "f1-n1",
        }
        # Of the 1,170 s up to the last scrape, 95 s are the start. Each restart costs 55 s, and
        # the steps after the checkpoint.
        assert 0.2 < float(goodput["value"][1]) < 0.8
        (recovery,) = query("flyte_ddp:time_to_recover:seconds")
        assert 55 < float(recovery["value"][1]) < 400
        assert not query("flyte_ddp_misspelled")


def test_the_dashboard_uses_figures_that_are_served_and_asks_for_its_data_source():
    text = (DEPLOY / "dashboard.json").read_text()
    used = set(re.findall(r"flyte_ddp_\w+", text))
    assert used <= set(HELP)
    dashboard = json.loads(text)
    rows = [each["title"] for each in dashboard["panels"] if each["type"] == "row"]
    assert rows == [
        "Progress",
        "Time and goodput",
        "Speed and slow ranks",
        "Checkpoints",
        "Restarts and announced losses",
        "Alerts",
    ]
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = [each["name"] for each in dashboard["templating"]["list"]]
    assert variables == ["datasource", "namespace", "run", "script"]
