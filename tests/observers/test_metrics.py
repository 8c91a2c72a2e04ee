"""Prometheus reads a run's newest figures from the port that registration asked for."""

from __future__ import annotations

import dataclasses
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from flytekit import task
from flytekit.configuration import Image, ImageConfig, SerializationSettings

from flyte_ddp.cluster.config import GRACE_VARIABLE
from flyte_ddp.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    NodeMeasured,
    Straggler,
    StragglersFound,
)
from flyte_ddp.flyte import resources
from flyte_ddp.observers.metrics import (
    HELP,
    PORT_VARIABLE,
    RANK_INFO,
    WALL_SECONDS,
    MetricsServer,
    requested_port,
)
from tests.support.prometheus import needs_prometheus, promtool
from tests.support.short_run import feed, loaded, reported, run_finished, started, whole_run

DEPLOY = Path(__file__).parents[2] / "deploy"


def scrape(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    return text, {
        name: float(value)
        for name, value in re.findall(
            (
                r"^(\w+)\{[^\n]*\} "
                r"(\S+)$"
            ),
            text,
            re.M,
        )
    }


def test_a_scrape_returns_the_newest_figures_of_the_run_with_its_labels():
    server = MetricsServer(0)
    run = server.follow(2, recipe="digits", run='f1-"n1"')
    try:
        assert scrape(server)[1] == {
            "flyte_ddp_attempt": 2,
            "flyte_ddp_restarts_total": 0,
            "flyte_ddp_announced_losses_total": 0,
            "flyte_ddp_stragglers": 0,
            "flyte_ddp_straggler_ratio": 1,
            "flyte_ddp_finished": 0,
        }
        for at, event in enumerate(whole_run()[:-12]):
            feed(run, dataclasses.replace(event, at=time.time() + at))
        assert 0 < scrape(server)[1]["flyte_ddp_remaining_seconds"] < 60
        for event in whole_run()[-12:]:
            feed(run, event)
        # The store does not have this checkpoint.
        feed(run, CheckpointSaved(13, "file:///c/13.json", False, 0.1))
        text, found = scrape(server)
        assert set(found) == set(HELP) - {RANK_INFO}
        expected = {
            "step": 12,
            "steps_planned": 12,
            "checkpoint_step": 12,
            "checkpoint_copied_step": 13,
            "epoch": 3,
            "world_size": 2,
            "attempt": 2,
            "restarts_total": 0,
        }
        assert {name: found[f"flyte_ddp_{name}"] for name in expected} == expected
        assert found["flyte_ddp_accuracy_ratio"] == pytest.approx(1 - 0.1 / 3)
        assert abs(found["flyte_ddp_last_event_timestamp_seconds"] - time.time()) < 60
        assert 'flyte_ddp_step{recipe="digits",run="f1-\\"n1\\""} 12' in text
        assert text.count("# TYPE ") == len(HELP) - 1
        slow = Straggler(1, "node 0", "", "data", 0.3, 0.1, 0.6, 0.4)
        for event, stragglers in (
            (StragglersFound(12, [slow]), (1, pytest.approx(1.5))),
            # The run waits for nodes after this attempt.
            (AttemptEnded(12, "a node was lost", 0.0), (0, 1)),
        ):
            feed(run, event)
            found = scrape(server)[1]
            assert (found["flyte_ddp_stragglers"], found["flyte_ddp_straggler_ratio"]) == stragglers
        for event in (started(), loaded(8), run_finished()):
            feed(run, event)
        found = scrape(server)[1]
        expected = {"restarts_total": 1, "step": 8, "finished": 1, "checkpoint_step": 8}
        assert {name: found[f"flyte_ddp_{name}"] for name in expected} == expected
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        scrape(server)


def test_the_wall_time_is_served_by_purpose_and_grows_between_two_events(monkeypatch):
    server = MetricsServer(0)
    run = server.follow(run="f1-n1")

    def seconds(now):
        monkeypatch.setattr(time, "time", lambda: now)
        (found,) = (each for each in server.collect() if each.name == WALL_SECONDS)
        return {
            each.labels["purpose"]: each.value for each in found.samples if round(each.value, 3)
        }

    for at, event in (
        (1060.0, AttemptStarted(2, 1000.0, 50.0)),
        (1070.0, started()),
        (1072.0, loaded()),
        (1100.0, reported(1)),
    ):
        feed(run, dataclasses.replace(event, at=at))
    spent = {"waiting_for_nodes": 50, "starting": 22, "stepping": 28}
    assert seconds(1100.0) == pytest.approx(spent)
    assert seconds(1110.0) == pytest.approx({**spent, "stepping": 38})
    feed(run, dataclasses.replace(AttemptEnded(1, "rank 1 exited", 5.0), at=1120.0))
    spent = {**spent, "stepping": 43, "restarting": 5}
    assert seconds(1150.0) == pytest.approx({**spent, "restarting": 35})
    for at, event in ((1160.0, AttemptStarted(2, 1000.0, 0.0)), (1170.0, started())):
        feed(run, dataclasses.replace(event, at=at))
    feed(run, dataclasses.replace(loaded(), at=1171.0))
    redone = {**spent, "stepping": 0, "restarting": 56, "redone_steps": 43}
    del redone["stepping"]
    assert seconds(1171.0) == pytest.approx(redone)
    # Nothing is lost after the end.
    feed(run, dataclasses.replace(run_finished(), at=1180.0))
    assert seconds(5000.0) == seconds(1180.0)
    server.close()


def place(node, first_rank, host, pod, *uuids):
    """Return the measurement of a node with a rank for each of `uuids`."""
    return NodeMeasured(node, 0.5, 0.5, 2**30, None, None, host, pod, first_rank, list(uuids))


# Attempts of a run: two ranks on a node and one on another; the second node is replaced after a
# restart; a third node joins.
PLACES = [
    [place(0, 0, "m1", "w-a", "GPU-1", "GPU-2"), place(1, 2, "m2", "w-b", "GPU-3")],
    [place(0, 0, "m1", "w-a", "GPU-1", "GPU-2"), place(1, 2, "m3", "w-c", "GPU-4")],
    [
        place(0, 0, "m3", "w-c", "GPU-4", "GPU-5"),
        place(1, 2, "m1", "w-a", "GPU-1"),
        place(2, 3, "m4", "w-d", "GPU-6"),
    ],
]
RANK_OF_GPU = [
    {"GPU-1": "0", "GPU-2": "1", "GPU-3": "2"},
    {"GPU-1": "0", "GPU-2": "1", "GPU-4": "2"},
    {"GPU-4": "0", "GPU-5": "1", "GPU-1": "2", "GPU-6": "3"},
]
DCGM_BY_RANK = """label_replace(DCGM_FI_DEV_GPU_UTIL, "gpu_uuid", "$1", "UUID", "(.+)")
  * on (gpu_uuid) group_left (run, rank) flyte_ddp_rank_info{gpu_uuid!=""}"""


def attempts_of_ranks():
    """Yield the served `flyte_ddp_rank_info` in each attempt, and between two attempts."""
    server = MetricsServer(0)
    run = server.follow(run="f1-n1")
    for places in PLACES:
        feed(run, AttemptStarted(len(places), 1000.0, 0.0), started(), *places)
        # The next measurement replaces the first one.
        feed(run, places[0])
        yield [each for found in server.collect() for each in found.samples if is_info(each)]
        feed(run, AttemptEnded(1, "a node was lost", 0.0))
        yield [each for found in server.collect() for each in found.samples if is_info(each)]
    server.close()


def is_info(sample):
    return sample.name == RANK_INFO


def test_each_rank_says_where_it_runs_until_its_attempt_ends():
    attempts = list(attempts_of_ranks())
    assert attempts[1::2] == [[], [], []]
    for samples, expected in zip(attempts[::2], RANK_OF_GPU, strict=True):
        assert {each.labels["gpu_uuid"]: each.labels["rank"] for each in samples} == expected
        assert {each.value for each in samples} == {1}
    labels = {"run": "f1-n1", "rank": "3", "node": "m4", "pod": "w-d", "gpu_uuid": "GPU-6"}
    assert attempts[4][-1].labels == labels


@needs_prometheus
def test_the_documented_query_joins_series_of_dcgm_with_ranks_after_restarts_and_growth(tmp_path):
    assert DCGM_BY_RANK in (DEPLOY.parent / "docs" / "outputs.md").read_text()
    infos = {}  # values of each series of ranks, one for each of the three attempts
    for number, samples in enumerate([*attempts_of_ranks()][::2]):
        for each in samples:
            key = tuple(each.labels.items())
            infos.setdefault(key, ["stale"] * 3)[number] = "1"
    found = [
        # The series of DCGM's exporter: the labels that it has in Kubernetes.
        series(
            "DCGM_FI_DEV_GPU_UTIL",
            "9+0x2",
            UUID=f"GPU-{number}",
            gpu="0",
            Hostname="m",
            pod="dcgm-exporter-x",
        )
        for number in range(1, 8)  # the run does not use the last GPU
    ]
    for key, values in infos.items():
        # A series does not begin with a mark of staleness.
        text = " ".join(values[:1]).replace("stale", "_") + " " + " ".join(values[1:])
        found.append(series(RANK_INFO, text, **dict(key), namespace="n"))
    # Two ranks of another run have no GPU.
    for rank in "01":
        found.append(series(RANK_INFO, "1 1 1", run="f2-n1", rank=rank, gpu_uuid=""))
    checks = []
    for minute, ranks in enumerate(RANK_OF_GPU):
        samples = [
            {
                "labels": f'{{UUID="{uuid}", gpu_uuid="{uuid}", rank="{rank}", run="f1-n1", '
                'gpu="0", Hostname="m", pod="dcgm-exporter-x"}',
                "value": 9,
            }
            for uuid, rank in ranks.items()
        ]
        checks.append({"expr": DCGM_BY_RANK, "eval_time": f"{minute}m", "exp_samples": samples})
    case = {"interval": "1m", "input_series": found, "promql_expr_test": checks}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [case]}))
    promtool("test", "rules", tmp_path / "test.yaml")


@needs_prometheus
def test_promtool_accepts_names_help_and_values_of_all_figures():
    server = MetricsServer(0)
    run = server.follow(1, recipe="digits", run="f1-n1")
    not_a_number = dataclasses.replace(reported(12), values={"loss": float("nan")})
    for event in (*whole_run(), not_a_number):
        feed(run, event)
    text = scrape(server)[0]
    server.close()
    counters = {"flyte_ddp_restarts_total", "flyte_ddp_announced_losses_total"}
    assert set(re.findall("^# TYPE (.*) counter$", text, re.M)) == counters
    promtool("check", "metrics", stdin=text)


def test_a_port_that_is_taken_is_a_warning_and_the_run_goes_on(caplog):
    first = MetricsServer(0)
    second = MetricsServer(first.port)
    assert f"metrics are not served: port {first.port}: " in caplog.text
    feed(second.follow(), started())
    second.close()
    first.close()


def test_runs_side_by_side_are_served_until_each_has_ended():
    server = MetricsServer(0)
    runs = [server.follow(trial=str(number)) for number in (1, 2)]
    for number, run in enumerate(runs):
        feed(run, loaded(number))
    text = scrape(server)[0]
    assert 'flyte_ddp_step{trial="1"} 0.0\nflyte_ddp_step{trial="2"} 1.0\n' in text
    assert text.count("# TYPE flyte_ddp_step gauge") == 1
    runs[0].close(None)
    text = scrape(server)[0]
    assert 'trial="1"' not in text
    runs[1].close(RuntimeError())
    assert scrape(server)[0] == ""
    server.close()


def test_the_pod_of_a_training_task_declares_the_port_that_the_pod_monitor_names(monkeypatch):
    without = resources.pod(resources.SETTINGS.training, trains=True)
    assert PORT_VARIABLE not in without["environment"]
    assert without["pod_template"].pod_spec.containers[0].ports is None
    asked = dataclasses.replace(resources.SETTINGS, metrics_port=9500)
    monkeypatch.setattr(resources, "SETTINGS", asked)

    @task(**resources.pod(asked.training, trains=True))
    def train() -> None: ...

    image = Image("default", "registry.example.com/flyte-ddp", "1")
    pod = train.get_k8s_pod(SerializationSettings(ImageConfig(image)))
    (container,) = pod.pod_spec["containers"]
    (monitor,) = (each for each in documents("alerts.yaml") if each["kind"] == "PodMonitor")
    # Flyte's label on every task's pod
    selected = {"matchExpressions": [{"key": "execution-id", "operator": "Exists"}]}
    assert monitor["spec"]["selector"] == selected
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    # Otherwise Prometheus renames the pod of each rank to exported_pod.
    assert endpoint["honorLabels"] is True
    assert container["ports"] == [{"name": endpoint["port"], "containerPort": 9500}]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert (environment[PORT_VARIABLE], environment[GRACE_VARIABLE]) == ("9500", "60")
    monkeypatch.setenv(PORT_VARIABLE, environment[PORT_VARIABLE])
    assert requested_port() == 9500
    assert pod.pod_spec["terminationGracePeriodSeconds"] == 60
    assert container["name"] == train.get_config(None)["primary_container_name"]
    assert container["image"] == "registry.example.com/flyte-ddp:1"
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert train.shared_memory == f"{asked.training.shared_memory_gib}Gi"


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def alert_groups():
    (rules,) = (each for each in documents("alerts.yaml") if each["kind"] == "PrometheusRule")
    return rules["spec"]["groups"]


def test_the_alert_rules_of_deploy_use_figures_that_are_served():
    every = [rule for group in alert_groups() for rule in group["rules"]]
    rules = [rule for rule in every if "alert" in rule]
    used = set(re.findall(r"flyte_ddp_\w+", " ".join(rule["expr"] for rule in every)))
    recorded = {rule["record"] for rule in every if "record" in rule}
    # A recorded series has a name such as flyte_ddp:goodput:ratio.
    assert set(re.findall(r"flyte_ddp:[\w:]+", str(every))) == recorded
    assert used
    assert used <= set(HELP)
    symptoms = set(re.findall(r"^\| \*(.+?)\*", (DEPLOY / "RUNBOOK.md").read_text(), re.M))
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        symptom = re.fullmatch('deploy/RUNBOOK.md, symptom "(.+)"', rule["annotations"]["runbook"])
        assert symptom[1] in symptoms
    assert {rule["alert"] for rule in rules} == {fault[0] for fault in FAULTS}


def series(name, values, **labels):
    return {
        "series": name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}",
        "values": values,
    }


# For each fault of an alert: its series with a value each minute, the labels of the alert, and
# minutes at which it does not fire yet, fires, and does not fire any more.
RUN = {"namespace": "n", "run": "f1-n1"}
MONITOR = {"namespace": "n", "cronjob": "champion-status"}
FAULTS = [
    (
        "TrainingWithoutProgress",
        [
            series(
                "flyte_ddp_last_event_timestamp_seconds", "60+0x34 2100+60x10", **RUN, pod="f1-n1-0"
            ),
            series("flyte_ddp_finished", "0+0x50", **RUN, pod="f1-n1-0"),
            series("flyte_ddp_last_event_timestamp_seconds", "60+0x50", run="f2-n1"),
            series("flyte_ddp_finished", "1+0x50", run="f2-n1"),  # This attempt has ended.
        ],
        {**RUN, "pod": "f1-n1-0"},
        (30, 33, 36),
    ),
    (
        "TrainingRestartsOften",
        [  # two restarts in the first attempt; the second attempt; one restart in it
            series("flyte_ddp_restarts_total", "0 1 2 _x7", **RUN, pod="f1-n1-0"),
            series("flyte_ddp_attempt", "0 0 0 _x7", **RUN, pod="f1-n1-0"),
            series("flyte_ddp_restarts_total", "_x8 0 0 1 1 stale", **RUN, pod="f1-n1-1"),
            series("flyte_ddp_attempt", "_x8 1 1 1 1 stale", **RUN, pod="f1-n1-1"),
        ],
        RUN,
        (7, 9, 14),
    ),
    (
        "TrainingSlowRank",
        [  # The rank is slow for two minutes, and again from minute 20 on.
            series("flyte_ddp_stragglers", "0 1 1 0+0x16 1+0x20 0+0x9", **RUN),
            series("flyte_ddp_finished", "0+0x50", **RUN),
        ],
        RUN,
        (24, 26, 42),
    ),
    (
        "CheckpointsLate",
        # each upload takes ten minutes, and a state is copied every minute; from minute 40 on none
        # arrives for 35
        [
            series("flyte_ddp_checkpoint_copied_step", "0+10x90", **RUN),
            series(
                "flyte_ddp_checkpoint_step",
                "0+0x9 90+0x9 190+0x9 290+0x9 390+0x34 740+0x15",
                **RUN,
            ),
            series("flyte_ddp_finished", "0+0x90", **RUN),
        ],
        RUN,
        (65, 71, 76),
    ),
    (
        "TrainingGoodputBurnsFast",
        # an hour of training, and 80 minutes of waiting for a node that was lost; 72 % of an hour
        # are lost after 44 minutes. Training goes on, and the short window ends the alert.
        [
            series(
                "flyte_ddp_wall_seconds", "0+60x60 3600+0x80 3600+60x30", **RUN, purpose="stepping"
            ),
            series(
                "flyte_ddp_wall_seconds",
                "0+0x60 0+60x80 4800+0x30",
                **RUN,
                purpose="waiting_for_nodes",
            ),
        ],
        RUN,
        (102, 106, 147),
    ),
    (
        "TrainingGoodputBurnsFast",
        # Restarts take 40 % of the time: 30 % of six hours are lost after 270 minutes.
        [
            series("flyte_ddp_wall_seconds", "0+36x420 15120+60x60", **RUN, purpose="stepping"),
            series("flyte_ddp_wall_seconds", "0+24x420 10080+0x60", **RUN, purpose="restarting"),
        ],
        RUN,
        (260, 280, 475),
    ),
    (
        "TrainingGoodputBurnsSlowly",
        # A tenth of the time is lost: 5 % of three days are lost after 36 hours.
        [
            series("flyte_ddp_wall_seconds", "0+54x2400 129600+60x400", **RUN, purpose="stepping"),
            series("flyte_ddp_wall_seconds", "0+6x2400 14400+0x400", **RUN, purpose="redone_steps"),
        ],
        RUN,
        (2100, 2200, 2780),
    ),
    (
        "RetrainingSilentOrStuck",
        [  # The alert fires at minutes 31, 91 and 211, but not at 151.
            series("kube_cronjob_created", "0+0x300", **MONITOR),
            series(
                "kube_cronjob_status_last_successful_time",
                "_x31 1860+0x59 5460+0x119 12660+0x59",
                **MONITOR,
            ),
        ],
        MONITOR,
        (180, 182, 212),
    ),
    (
        "RetrainingSilentOrStuck",
        [  # never, until minute 95
            series("kube_cronjob_created", "0+0x300", **MONITOR),
            series("kube_cronjob_status_last_successful_time", "_x95 5700+0x30", **MONITOR),
        ],
        MONITOR,
        (89, 91, 95),
    ),
]
LONG = ("TrainingGoodputBurnsSlowly",)


@needs_prometheus
@pytest.mark.parametrize(
    ("alert", "found", "labels", "minutes"),
    [
        pytest.param(*fault, id=fault[0], marks=[pytest.mark.long] * (fault[0] in LONG))
        for fault in FAULTS
    ],
)
def test_an_alert_fires_once_for_its_fault_and_stops(tmp_path, alert, found, labels, minutes):
    (rule,) = (
        rule for group in alert_groups() for rule in group["rules"] if rule.get("alert") == alert
    )
    firing = {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": rule["annotations"]}
    checks = [
        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [firing] if is_firing else []}
        for minute, is_firing in zip(minutes, (False, True, False), strict=True)
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": alert_groups()}))
    promtool("check", "rules", tmp_path / "rules.yaml")
    case = {"interval": "1m", "input_series": found, "alert_rule_test": checks}
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", tmp_path / "test.yaml")
