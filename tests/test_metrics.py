"""Prometheus reads a run's newest figures from the port that registration asked for."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from flyte_ddp.events import CheckpointLoaded, CheckpointSaved, CheckpointWritten, FunctionStarted, Reported
from flyte_ddp.observers.metrics import HELP, PORT_VARIABLE, MetricsServer, RunFigures, requested_port
from tests.support.short_run import run_finished, started, whole_run

DEPLOY = Path(__file__).parents[1] / "deploy"


def scrape(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    return text, {name: float(value) for name, value in re.findall(r"^(\w+)\{[^\n]*\} (\S+)$", text, re.M)}


def test_a_scrape_returns_the_newest_figures_of_the_run_with_its_labels():
    server = MetricsServer(0)
    run = server.follow(recipe="digits", run='f1-"n1"')
    try:
        assert scrape(server)[1] == {"flyte_ddp_restarts": 0, "flyte_ddp_finished": 0}
        for event in whole_run():
            run.handle(event)
        run.handle(CheckpointSaved(13, "file:///c/13.json", False, 0.1))  # the store does not have it
        text, found = scrape(server)
        assert set(found) == set(HELP)
        assert found["flyte_ddp_step"] == found["flyte_ddp_steps_planned"] == found["flyte_ddp_checkpoint_step"] == 12
        assert found["flyte_ddp_checkpoint_copied_step"] == 13
        assert (found["flyte_ddp_epoch"], found["flyte_ddp_world_size"], found["flyte_ddp_restarts"]) == (3, 2, 0)
        assert found["flyte_ddp_accuracy"] == pytest.approx(1 - 0.1 / 3)
        assert abs(found["flyte_ddp_last_event_timestamp_seconds"] - time.time()) < 60
        assert 'flyte_ddp_step{recipe="digits",run="f1-\\"n1\\""} 12' in text
        assert text.count("# TYPE ") == len(HELP)
        for event in (started(resumed_step=8), run_finished()):
            run.handle(event)
        found = scrape(server)[1]
        assert (found["flyte_ddp_restarts"], found["flyte_ddp_step"], found["flyte_ddp_finished"]) == (1, 8, 1)
        assert found["flyte_ddp_checkpoint_step"] == found["flyte_ddp_checkpoint_copied_step"] == 8
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=10)
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        scrape(server)


def test_a_port_that_is_taken_is_a_warning_and_the_run_goes_on(caplog):
    first = MetricsServer(0)
    second = MetricsServer(first.port)
    assert f"metrics are not served: port {first.port}: " in caplog.text
    second.follow().handle(started())
    second.close()
    first.close()


def test_runs_side_by_side_are_served_until_each_has_ended():
    server = MetricsServer(0)
    runs = [server.follow(trial=str(number)) for number in (1, 2)]
    for number, run in enumerate(runs):
        run.handle(started(resumed_step=number))
    text = scrape(server)[0]
    assert 'flyte_ddp_step{trial="1"} 0\nflyte_ddp_step{trial="2"} 1\n' in text
    assert text.count("# TYPE flyte_ddp_step gauge") == 1
    runs[0].close(None)
    text = scrape(server)[0]
    assert 'trial="1"' not in text
    for event in (FunctionStarted("f", 4, 2, num_restarts=3), Reported(7, 1.5, {"loss": 0.25})):
        runs[1].handle(event)
    found = scrape(server)[1]
    assert [found[f"flyte_ddp_{name}"] for name in ("world_size", "restarts", "step", "epoch")] == [4, 3, 7, 1.5]
    assert 'trial="2"' in text
    runs[1].close(RuntimeError())
    assert scrape(server)[0] == ""
    server.close()


def test_a_checkpoint_that_the_store_does_not_have_yet_is_seen():
    run = RunFigures("")

    def steps(*events):
        for event in events:
            run.handle(event)
        figures = run.values()
        return figures["flyte_ddp_checkpoint_copied_step"], figures["flyte_ddp_checkpoint_step"]

    copied = [CheckpointSaved(step, "", False, 0.1) for step in range(20)]
    written = [CheckpointWritten(step, "", False) for step in range(20)]
    assert steps(FunctionStarted("f", 4, 2, num_restarts=0)) == (0, 0)
    assert steps(CheckpointLoaded(4, "")) == (4, 4)
    assert steps(copied[8]) == (8, 4)
    assert steps(copied[10], written[8]) == (10, 8)
    assert steps(FunctionStarted("f", 4, 2, num_restarts=1)) == (8, 8)  # what was not written is lost
    assert steps(copied[12]) == (12, 8)
    assert steps(started(resumed_step=8)) == (8, 8)
    assert steps(copied[12], written[12]) == (12, 12)


def test_nothing_is_served_unless_registration_asked_for_it(monkeypatch):
    from tasks.resources import DRIVER_TASK, TRAINING_TASK, metrics_environment

    monkeypatch.delenv(PORT_VARIABLE, raising=False)
    assert requested_port() == 0
    assert metrics_environment(0) == {}
    for task in (DRIVER_TASK, TRAINING_TASK):
        assert PORT_VARIABLE not in task["environment"]
    for name, value in metrics_environment(9464).items():
        monkeypatch.setenv(name, value)
    assert requested_port() == 9464


def test_the_alert_rules_of_deploy_use_figures_that_are_served():
    documents = list(yaml.safe_load_all((DEPLOY / "alerts.yaml").read_text()))
    (rules,) = (each for each in documents if each["kind"] == "PrometheusRule")
    expressions = " ".join(rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"])
    used = set(re.findall(r"flyte_ddp_\w+", expressions))
    assert used
    assert used <= set(HELP)
    symptoms = re.findall('symptom "(.+?)"', str(rules))
    assert len(symptoms) == 2
    assert set(symptoms) <= set(re.findall(r"^\| \*(.+?)\*", (DEPLOY / "RUNBOOK.md").read_text(), re.M))
