"""settings.toml: each field reaches a registration, and a mistake is one line."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from flytekit.configuration import ImageConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.code import source_code
from flyte_ddp.config.fields import is_cron
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte import register
from flyte_ddp.project.settings import Settings, load_settings

REPOSITORY = Path(__file__).parents[2]
FILE = """
profile = "sandbox"
image = "registry.example.com/own:7"
service_account = "own-account"
recipes = ["own_recipes"]
notify_emails = ["night@example.com"]
metrics_port = 9123
filler_priority_class = "own-filler"
schedule = "17 3 * * MON-FRI"
retrain_inputs = {recipe = "digits", margin = 0.25}
termination_grace = 77
tracking = "TRACKER"

[wandb]
project = "own-project"
entity = "own-entity"
base_url = "https://wandb.example.com"

[mlflow]
url = "https://mlflow.example.com"
experiment = "own-experiment"

[tensorboard]
logdir = "s3://own/logs"

[sandbox]
gpus = 3
gpu_type = "own-gpu"
wandb_mode = "offline"
training = {cpus = 5, memory_gib = 11, disk_gib = 51, timeout_hours = 13, shared_memory_gib = 7}
driver = {cpus = 6, memory_gib = 12, disk_gib = 52, timeout_hours = 14}
small = {cpus = 7, memory_gib = 13, disk_gib = 53, timeout_hours = 15}

[allowed]
urls = ["s3://own/*"]

[prices]
"zone=own" = 17.5
"""
# Where a registration shows each field. `profile` chooses among the others.
SEEN = {
    "profile": "cpu='15'",
    "image": "registry.example.com/own:7",
    "service_account": "own-account",
    "recipes": "own_recipes",
    "notify_emails": "night@example.com",
    "metrics_port": "'container_port': 9123",
    "schedule": "17 3 * * MON-FRI",
    "retrain_inputs": "'margin': 0.25",
    "termination_grace": "'termination_grace_period_seconds': 77",
    "tracking": "'TRACKING': 'mlflow'",
    "wandb_project": "'WANDB_PROJECT': 'own-project'",
    "wandb_entity": "'WANDB_ENTITY': 'own-entity'",
    "wandb_base_url": "'WANDB_BASE_URL': 'https://wandb.example.com'",
    "wandb_mode": "'WANDB_MODE': 'offline'",
    "mlflow_url": "'MLFLOW_TRACKING_URI': 'https://mlflow.example.com'",
    "mlflow_experiment": "'MLFLOW_EXPERIMENT_NAME': 'own-experiment'",
    "tensorboard_logdir": "'TENSORBOARD_LOGDIR': 's3://own/logs'",
    "gpus": "'FLYTE_DDP_REQUESTED_GPUS': '3'",
    "gpu_type": "own-gpu",
    "training": "mem='33Gi'",
    "driver": "mem='12Gi'",
    "small": "mem='13Gi'",
    "allowed": "s3://own/*",
    "prices": "{'zone=own': 17.5}",
    "filler_priority_class": "'priorityClassName': 'own-filler'",
}
# Prints what a registration makes of the settings, once for each tracker.
REGISTRATION = """
import importlib, os, sys
sys.path.insert(0, os.getcwd())
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.flyte import registration, resources
from flyte_ddp.project import settings
from flyte_ddp.project.admission import with_filler_class
from workflows.retrain import retrain_wf

for tracker in ("wandb", "mlflow", "tensorboard"):
    os.environ["TRACKING"] = tracker
    for module in (settings, resources, registration):
        importlib.reload(module)
    settings.check_settings()
    own = settings.SETTINGS
    pods = [resources.pod(own.training, own.gpus, trains=True)]
    pods += [resources.pod(size) for size in (own.driver, own.small)]
    for pod in pods:
        print(pod, pod["pod_template"].pod_spec, getattr(pod.get("accelerator"), "_device", ""))
    print(own.allowed, own.prices)
filler = ClusterConfig(kind="kubernetes", preset="filler")
print(with_filler_class(filler).kubernetes.pod_template)
plan = registration.launch_plan("own", retrain_wf)
print(plan._saved_inputs, plan.schedule, plan.notifications)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in which all settings differ from their defaults."""
    (tmp_path / "settings.toml").write_text(FILE.replace("TRACKER", "wandb"))
    for name in ("workflows", "own_recipes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "wine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("IMAGE", "SANDBOX", "GPUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(source_code, "find_project", Path.cwd)
    return tmp_path


def register_here(monkeypatch, capsys, *arguments):
    """Return the command of pyflyte that `flyte-ddp register` calls, and what it prints."""
    commands = []
    monkeypatch.setattr(register.subprocess, "call", lambda command, env: commands.append(command))
    register.main(arguments)
    return " ".join(map(str, commands[0])), capsys.readouterr().err


@pytest.mark.long
def test_a_registration_shows_each_field(project, monkeypatch, capsys):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", REGISTRATION],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    command, _ = register_here(monkeypatch, capsys)
    (project / "own_recipes" / "wine.py").unlink()
    (project / "own_recipes").rmdir()
    # The registration looks at these packages, so it fails.
    with pytest.raises(ConfigError) as refused:
        register.main([])
    shown = f"{done.stdout}\n{command}\n{refused.value}"
    missing = {name for name, text in SEEN.items() if text not in shown}
    assert missing == set()
    assert set(SEEN) == {each.name for each in dataclasses.fields(Settings)}


def test_each_field_is_part_of_the_version():
    own = Settings()
    others = {
        "profile": "sandbox",
        "image": "registry.example.com/other:1",
        "recipes": ["own"],
        "notify_emails": ["a@b.c"],
        "gpus": 2,
        "metrics_port": 1,
        "schedule": "0 3 * * *",
        "retrain_inputs": {"recipe": "digits"},
        "wandb_mode": "offline",
        "termination_grace": 61,
        "tracking": "tensorboard",
        "mlflow_url": "http://mlflow.team",
        "allowed": {"urls": []},
        "prices": {"zone=own": 17.5},
        **dict.fromkeys(("training", "driver"), own.small),
        "small": own.driver,
    }
    for each in dataclasses.fields(Settings):
        changed = dataclasses.replace(own, **{each.name: others.get(each.name, "other")})
        assert changed.digest != own.digest, each.name


@pytest.mark.parametrize(
    ("environment", "arguments", "image", "origin"),
    [
        ("", (), "registry.example.com/own:7", "settings.toml"),
        ("env:1", (), "env:1", "IMAGE"),
        ("env:1", ("--image", "option:1"), "option:1", "--image"),
    ],
)
def test_a_registration_prints_which_image_runs(
    project, monkeypatch, capsys, environment, arguments, image, origin
):
    monkeypatch.setenv("IMAGE", environment)
    command, printed = register_here(monkeypatch, capsys, *arguments)
    assert f" --image {image} " in command
    assert printed == f"image: {image} ({origin}), of every task, driver and worker\n"


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("environment", [{}, {"IMAGE": "env:1"}])
def test_the_image_of_a_command_wins_over_environment_and_file(project, environment, group):
    """As `pyflyte run --image X` does, also where the tasks are imported in a command below."""

    def invoke(*arguments):
        found = []

        def load(**parameters):
            found.append(load_settings(project / "settings.toml", environment).image)

        option = click.Option(
            ["-i", "--image", "image_config"],
            multiple=True,
            default=list,
            callback=ImageConfig.validate_image,
        )
        if group:
            inner = click.Command("task", callback=load)
            command = click.Group("run", {"task": inner}, params=[option])
            command.callback = lambda image_config: None
            arguments = [*arguments, "task"]
        else:
            command = click.Command("register", params=[option], callback=load)
        command.main([*arguments], standalone_mode=False)
        return found

    otherwise = environment.get("IMAGE", "registry.example.com/own:7")
    assert invoke("--image", "option.example/x:1") == ["option.example/x:1"]
    assert invoke() == [otherwise]
    assert invoke("--image", "named=option.example/x:1") == [otherwise]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wandb = 3\n", "wandb: expected a table, got 3"),
        ("mlflow = 'x'\n", "mlflow: expected a table, got 'x'"),
        ("tensorboard = []\n", "tensorboard: expected a table, got []"),
        ("production = 1.5\n", "production: expected a table, got 1.5"),
        ("sandbox = 'x'\n", "sandbox: expected a table, got 'x'"),
        ("allowed = ['x']\n", "allowed: expected a table, got ['x']"),
        ("image = 3\n", "image: expected a string, got 3"),
        ("image = 'localhost:5000/mine'\n", "image: expected an image with its tag, such as "),
        ("[allowed]\nurls = 's3://x'\n", "allowed.urls: expected a list, got 's3://x'"),
        (
            "[sandbox]\ngpuz = 1\n",
            "sandbox: expected a known field (did you mean gpus?), got 'gpuz'",
        ),
        ("[production]\nzzz = 1\n", "production: expected one of the fields "),
        ("[sandbox]\ngpus = -1\n", "sandbox: gpus: expected a whole number of at least 0, got -1"),
        (
            "[sandbox]\nwandb_mode = 'onlin'\n",
            "sandbox: wandb_mode: expected one of online, offline",
        ),
        ("[production]\nwandb_mode = 'onlin'\n", "wandb_mode: expected one of online, offline"),
        ("[wandb]\nmode = 'onlin'\n", "wandb_mode: expected one of online, offline, disabled, got"),
        ("[sandbox]\nsmall = 3\n", "sandbox: small: expected an object with fields, got 3"),
        ("schedule = '99 99 * * *'\n", "schedule: expected cron's five fields (minute 0-59"),
        ("schedule = '0 0 31 2 *'\n", "schedule: expected cron's five fields (minute 0-59"),
        ("profile = 'sandbx'\n", "profile: expected one of production, sandbox, got 'sandbx'"),
        (
            "tracking = 'mlflow'\n[mlflow]\nurl = 'http://a:b@c'\n",
            "mlflow.url: expected a URL without a user name and a password",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_the_choices(tmp_path, text, expected):
    file = tmp_path / "settings.toml"
    file.write_text(f"recipes = ['recipes']\n{text}")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {})
    assert str(caught.value).startswith("settings.toml: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_recipes_are_a_list(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("recipes = 'recipes'\n")
    with pytest.raises(ConfigError, match="^settings.toml: recipes: expected a list of names, got"):
        load_settings(file, {})


def test_a_variable_wins_over_either_profile(project):
    file = project / "settings.toml"
    for switch in ("0", "1"):
        environment = {"SANDBOX": switch, "GPUS": "4", "GPU_TYPE": "other"}
        found = load_settings(file, environment)
        assert (found.gpus, found.gpu_type) == (4, "other")
    assert load_settings(file, {"SANDBOX": "1"}).gpus == 3


CRON = (range(60), range(24), range(1, 32), range(1, 13), range(8))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.tuples(*(st.tuples(st.sampled_from(each), st.sampled_from(each)) for each in CRON)))
def test_a_cron_schedule_is_checked_field_by_field(pairs):
    ranges = [sorted(pair) for pair in pairs]
    assert is_cron(" ".join(f"{low}-{high}/2,{low}" for low, high in ranges))
    for number, bounds in enumerate(CRON):
        for wrong in (max(bounds) + 1, "-1", "x", "", "*/0", "1-", "2-1", "1,,2", "\u0663"):
            fields = ["*"] * 5
            fields[number] = str(wrong)
            assert not is_cron(" ".join(fields))


@pytest.mark.parametrize("text", ["0 0 30 2 *", "0 0 31 4,jun *", "0 0 30-31 2/13 *"])
def test_a_schedule_of_no_day_is_refused(text):
    assert not is_cron(text)
    assert is_cron(f"{text[:-1]}MON")  # The pattern now includes Mondays.
    assert is_cron(f"{text[:-1].replace('3', '2', 1)}*")  # earlier in the month


@pytest.mark.parametrize(
    "text", ["0 3 * * SUN-FRI", "0 0 29 2 *", "0 0 1 jan,jul *", "*/15 * * * *", ""]
)
def test_usual_cron_schedules_are_accepted(text):
    assert is_cron(text)
    assert not is_cron(f"{text} *")
