"""The registration of all tasks, workflows and launch plans, read from the packaged protos."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2
from flyteidl.core import literals_pb2, tasks_pb2, types_pb2
from flyteidl.core.execution_pb2 import WorkflowExecution
from google.protobuf.json_format import MessageToDict

from flyte_ddp.cluster.config import GRACE_VARIABLE

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
IMAGE = "registry.example.com/flyte-ddp:7"
RESOURCES = {
    "cpu": "CPU",
    "memory": "MEMORY",
    "ephemeral-storage": "EPHEMERAL_STORAGE",
    "gpu": "GPU",
}

PROFILES = {
    "sandbox": {"SANDBOX": "1"},
    "gpu": {
        "GPUS": "4",
        "GPU_TYPE": "nvidia-tesla-a100",
        "WANDB_ENTITY": "team",
        "RETRAIN_SCHEDULE": "0 */6 * * *",
        "NOTIFY_EMAILS": "night@example.com, day@example.com",
        "RETRAIN_INPUTS": (
            '{"recipe": "mnist", "data": "s3://bucket/mnist", "config": {"epochs": 3}, "margin": 0}'
        ),
    },
}

SMALL = {"sandbox": ("1", "2Gi", "4Gi", ""), "gpu": ("1", "2Gi", "20Gi", "")}
DRIVER = {"sandbox": ("1", "2Gi", "4Gi", ""), "gpu": ("1", "8Gi", "20Gi", "")}
TRAINING = {"sandbox": ("2", "4Gi", "4Gi", ""), "gpu": ("16", "64Gi", "50Gi", "4")}
# hours, of a small task and of one that trains, predicts or drives
TIMEOUTS = {"sandbox": (1, 4), "gpu": (6, 48)}
EVALUATION = {"sandbox": ("2", "4Gi", "4Gi", ""), "gpu": ("4", "16Gi", "50Gi", "1")}


@dataclasses.dataclass(frozen=True)
class Expected:
    """Of a task; whoever is not listed below has to keep to the rules alone."""

    resources: dict[str, tuple[str, str, str, str]]  # CPUs, memory, disk and GPUs, by profile
    trains: bool = False  # The task has a Deck, and the W&B key where W&B is online.


KNOWN = {
    "tasks.train.prepare": Expected(SMALL),
    "tasks.train.train_on_one_node": Expected(TRAINING, trains=True),
    "tasks.train.train_on_cluster": Expected(DRIVER, trains=True),
    "tasks.script.run_script": Expected(DRIVER, trains=True),
    "tasks.retrain.plan_retraining": Expected(SMALL),
    "tasks.retrain.judge_challenger": Expected(EVALUATION),
    "tasks.retrain.keep_champion": Expected(SMALL),
    "tasks.predict.predict_on_one_node": Expected(TRAINING),
    "tasks.predict.predict_on_cluster": Expected(DRIVER),
}


@dataclasses.dataclass(frozen=True)
class Package:
    profile: str
    tasks: dict[str, tasks_pb2.TaskTemplate]
    workflows: dict[str, workflow_pb2.WorkflowSpec]
    launch_plans: dict[str, launch_plan_pb2.LaunchPlanSpec]
    # seconds, of the tasks' pods
    graces: dict[str, int | None] = dataclasses.field(default_factory=dict)


def move_to_container(template):
    """Have a task that describes its pod name that pod's container; return the pod's grace, if it
    names one.
    """
    if not template.HasField("k8s_pod"):
        return None
    spec = MessageToDict(template.k8s_pod.pod_spec)
    (container,) = spec["containers"]
    assert container["name"] == template.config["primary_container_name"]
    given = template.container
    given.image, given.args[:] = container["image"], container["args"]
    given.env.extend(
        literals_pb2.KeyValuePair(key=each["name"], value=each["value"])
        for each in container["env"]
    )
    for kind in ("requests", "limits"):
        for name, value in container["resources"][kind].items():
            number = tasks_pb2.Resources.ResourceName.Value(RESOURCES[name])
            getattr(given.resources, kind).add(name=number, value=value)
    return spec.get("terminationGracePeriodSeconds")


def clean_environment(**changes):
    ours = ("SANDBOX", "GPUS", "GPU_TYPE", "NOTIFY_EMAILS", "IMAGE", "VERSION")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("RETRAIN_", "WANDB_"))
    }
    return {**kept, **changes}


@pytest.fixture(scope="module", params=list(PROFILES))
def package(request, tmp_path_factory):
    """All that `pyflyte package` finds, in each profile."""
    target = tmp_path_factory.mktemp("package") / "package.tgz"
    subprocess.run(
        [BIN / "pyflyte", "--pkgs", "workflows", "package", "--image", IMAGE, "--output", target],
        cwd=REPOSITORY,
        env=clean_environment(**PROFILES[request.param]),
        check=True,
        capture_output=True,
        timeout=180,
    )
    found = Package(request.param, {}, {}, {})
    with tarfile.open(target) as archive:
        for member in archive:
            contents = archive.extractfile(member).read()
            kind = member.name.removesuffix(".pb").rpartition("_")[2]
            if kind == "1":
                template = task_pb2.TaskSpec.FromString(contents).template
                found.graces[template.id.name] = move_to_container(template)
                found.tasks[template.id.name] = template
            elif kind == "2":
                spec = workflow_pb2.WorkflowSpec.FromString(contents)
                found.workflows[spec.template.id.name] = spec
            else:
                plan = launch_plan_pb2.LaunchPlan.FromString(contents)
                found.launch_plans[plan.id.name] = plan.spec
    return found


def resources(entries):
    names = tasks_pb2.Resources.ResourceName
    given = {names.Name(entry.name): entry.value for entry in entries}
    return tuple(given.get(name, "") for name in ("CPU", "MEMORY", "EPHEMERAL_STORAGE", "GPU"))


# Tasks


@pytest.mark.long
def test_every_task_has_its_image_sizes_and_time_for_a_last_checkpoint(package):
    for name, task in package.tasks.items():
        container, extended = task.container, task.extended_resources
        environment = {pair.key: pair.value for pair in container.env}
        limits = resources(container.resources.limits)
        assert container.image == IMAGE, name
        assert resources(container.resources.requests) == limits, name
        # The task fails if it finds fewer GPUs than this variable says.
        assert environment.get("FLYTE_DDP_REQUESTED_GPUS", "") == limits[3], name
        type_of_gpu = "nvidia-tesla-a100" if limits[3] else ""
        assert extended.gpu_accelerator.device == type_of_gpu, name
        if name in KNOWN:
            assert limits == KNOWN[name].resources[package.profile], name
            grace = environment.get(GRACE_VARIABLE)
            expected = (60, "60") if KNOWN[name].trains else (None, None)
            assert task.metadata.generates_deck.value >= KNOWN[name].trains, name
            assert (package.graces[name], grace) == expected, name
            shared = {TRAINING["gpu"]: "8Gi", EVALUATION["gpu"]: "8Gi", TRAINING["sandbox"]: "1Gi"}
            assert extended.shared_memory.size_limit == shared.get(limits, ""), name


def test_the_key_of_wandb_goes_to_tasks_that_use_it_and_nowhere_when_offline(package):
    for name, task in package.tasks.items():
        secrets = [(secret.group, secret.key) for secret in task.security_context.secrets]
        environment = {pair.key: pair.value for pair in task.container.env}
        trains = KNOWN[name].trains if name in KNOWN else "WANDB_MODE" in environment
        mode = "offline" if package.profile == "sandbox" else "online"
        assert environment.get("WANDB_MODE") == (mode if trains else None), name
        is_used = trains and mode == "online"
        assert secrets == ([("wandb", "api_key")] if is_used else []), name
        assert not [key for key in environment if "key" in key.lower() or "secret" in key.lower()]


def test_a_change_of_the_training_code_alone_makes_cached_results_stale(package):
    from flyte_ddp.code.source_code import recipe_packages
    from flyte_ddp.flyte.resources import code_version

    cached = {name: task for name, task in package.tasks.items() if task.metadata.discoverable}
    assert {"tasks.train.train_on_one_node", "tasks.train.train_on_cluster"} < cached.keys()
    for name, task in cached.items():
        assert task.metadata.discovery_version == code_version(recipe_packages()), name
        assert list(task.metadata.cache_ignore_input_vars) == ["checkpoints"], name


def test_every_attempt_of_every_task_has_a_timeout(package):
    """Also in the nodes: Flyte reads it there."""
    small, training = TIMEOUTS[package.profile]
    for name, task in package.tasks.items():
        trains = name.rpartition(".")[2].startswith(("train_", "run_", "predict_"))
        assert task.metadata.timeout.seconds == 3600 * (training if trains else small), name
    for spec in package.workflows.values():
        for node in spec.template.nodes:
            if (task := package.tasks.get(node.task_node.reference_id.name)) is not None:
                assert node.metadata.timeout == task.metadata.timeout, node.id


def test_the_link_to_wandb_is_registered_where_it_is_known(package):
    config = package.tasks["tasks.train.train_on_one_node"].config
    assert dict(config).get("entity", "") == ("team" if package.profile == "gpu" else "")


# The conditional


def test_an_unnecessary_training_is_not_scheduled(package):
    """Training is in a branch, and what the branches read is there when the condition is
    evaluated.
    """
    nodes = package.workflows["workflows.retrain.retrain_wf"].template.nodes
    assert [node.metadata.name for node in nodes] == ["plan_retraining", "what_to_train"]
    branch = nodes[1].branch_node.if_else
    chosen = [branch.case.then_node, branch.other[0].then_node, branch.else_node]
    assert [node.metadata.name for node in chosen] == [
        "keep_champion",
        "challenge_on_cluster",
        "challenge_on_one_node",
    ]
    read = {binding.binding.promise.node_id for node in chosen for binding in node.inputs}
    assert read <= {"", "n0"}
    # The challenge is judged after the training.
    trained = ["train_on_cluster", "train_on_one_node"]
    for node, name in zip(chosen[1:], trained, strict=True):
        inner = package.workflows[f"workflows.retrain.{node.metadata.name}"].template.nodes
        assert [each.metadata.name for each in inner] == [name, "judge_challenger"]
        assert list(inner[1].upstream_node_ids) == ["n0"]


# Launch plans

# Schedules from settings.toml and from the environment.
SCHEDULES = {"sandbox": "0 3 * * *", "gpu": "0 */6 * * *"}


def test_the_one_schedule_is_that_of_the_settings_and_starts_one_run_at_a_time(package):
    from workflows.retrain import RETRAIN

    scheduled = {
        name: spec.entity_metadata.schedule
        for name, spec in package.launch_plans.items()
        if spec.entity_metadata.schedule.WhichOneof("ScheduleExpression")
    }
    assert scheduled.keys() == {"retrain"}
    assert scheduled["retrain"].cron_schedule.schedule == SCHEDULES[package.profile]
    assert package.launch_plans["retrain"].concurrency_policy.max == 1
    assert not RETRAIN.should_auto_activate


def test_a_launch_plan_without_a_schedule_starts_by_hand_alone(monkeypatch):
    from flyte_ddp.flyte import registration
    from workflows.retrain import retrain_wf

    monkeypatch.setattr(
        registration, "SETTINGS", dataclasses.replace(registration.SETTINGS, schedule="")
    )
    assert registration.launch_plan("by_hand", retrain_wf).schedule is None


def test_a_schedule_fills_in_the_kickoff_time_and_needs_nothing_else(package):
    spec = package.launch_plans["retrain"]
    workflow = package.workflows[spec.workflow_id.name]
    required = [key for key, value in spec.default_inputs.parameters.items() if value.required]
    assert not required
    assert (
        workflow.template.interface.inputs.variables["kickoff_time"].type.simple
        == types_pb2.DATETIME
    )
    assert spec.entity_metadata.schedule.kickoff_time_input_arg == "kickoff_time"


def test_recipients_of_failures_and_inputs_of_retrainings_come_from_the_environment(package):
    is_given = package.profile == "gpu"
    notified = []
    for each in package.launch_plans["retrain"].entity_metadata.notifications:
        phases = [WorkflowExecution.Phase.Name(phase) for phase in each.phases]
        notified.append((list(each.email.recipients_email), phases))
    recipients = ["night@example.com", "day@example.com"]
    assert notified == [(recipients, ["FAILED", "ABORTED", "TIMED_OUT"])] * is_given
    given = package.launch_plans["retrain"].default_inputs.parameters
    assert given["recipe"].default.scalar.primitive.string_value == (
        "mnist" if is_given else "digits"
    )
    assert given["margin"].default.scalar.primitive.float_value == (0 if is_given else 0.01)
    assert given["data"].default.scalar.union.value.scalar.blob.uri == (
        "s3://bucket/mnist" if is_given else ""
    )
    assert ("config" in package.launch_plans["retrain"].fixed_inputs.literals) == is_given


def remote_command(name, package):
    """Return flytekit's command for a registered launch plan, with the interface as Flyte hands it
    out, and the context of a call.
    """
    from flytekit.clis.sdk_in_container.run import DynamicEntityLaunchCommand, RunLevelParams
    from flytekit.models.interface import TypedInterface
    from flytekit.models.launch_plan import LaunchPlan
    from flytekit.remote.entities import FlyteLaunchPlan
    from rich_click import RichContext

    spec = package.launch_plans[name]
    command = DynamicEntityLaunchCommand(name, "", name, DynamicEntityLaunchCommand.LP_LAUNCHER)
    model = LaunchPlan.from_flyte_idl(launch_plan_pb2.LaunchPlan(spec=spec))
    command._entity = FlyteLaunchPlan.promote_from_model(model.id, model.spec)
    interface = package.workflows[spec.workflow_id.name].template.interface
    command._entity._interface = TypedInterface.from_flyte_idl(interface)
    parameters = RunLevelParams.from_dict({"project": "p", "domain": "d"})
    return command, RichContext(command, info_name=name, obj=parameters)


@pytest.mark.long
def test_flytekits_remote_commands_can_build_the_options_of_every_launch_plan(package, capsys):
    assert len(package.launch_plans) > 1  # each workflow has one of its own
    for name, spec in package.launch_plans.items():
        command, context = remote_command(name, package)
        options = {option.name for option in command.get_params(context)}
        assert options >= set(spec.default_inputs.parameters) - set(spec.fixed_inputs.literals), (
            name
        )
        # Some versions of rich-click print the help instead of returning it.
        assert command.get_help(context) or capsys.readouterr().out, name


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "NOTIFY_EMAILS",
            "somebody",
            "NOTIFY_EMAILS[0]: expected an e-mail address, got 'somebody'",
        ),
        ("RETRAIN_INPUTS", "{", "RETRAIN_INPUTS: expected an object with strings as keys, got '{'"),
        ("RETRAIN_INPUTS", "[]", "RETRAIN_INPUTS: expected an object with strings as keys, got []"),
        (
            "RETRAIN_INPUTS",
            '{"kickoff_time": "now"}',
            "retrain_inputs: expected one of the inputs champion, recipe",
        ),
        ("RETRAIN_INPUTS", '{"recipe": 3}', "retrain_inputs.recipe: expected a string, got 3"),
        ("RETRAIN_INPUTS", '{"data": "here"}', "retrain_inputs.data: expected a URL, got 'here'"),
        ("RETRAIN_INPUTS", '{"config": {"epochs": 0}}', "epochs: "),
        (
            "RETRAIN_SCHEDULE",
            "daily",
            "RETRAIN_SCHEDULE: expected cron's five fields (minute 0-59, hour 0-23, day 1-31, "
            "month 1-12, weekday 0-7), of a day that comes, such as 0 3 * * *, got 'daily'",
        ),
        ("RETRAIN_SCHEDULE", "99 99 * * *", "RETRAIN_SCHEDULE: expected cron's five fields"),
        ("WANDB_MODE", "onlin", "WANDB_MODE: expected one of online, offline, disabled, got"),
        (
            "MLFLOW_TRACKING_URI",
            "https://me:secret@mlflow.team",
            "mlflow.url: expected a URL without a user name and a password",
        ),
        ("GPUS", "-1", "GPUS: expected a whole number of at least 0, got -1"),
        ("GPUS", "many", "GPUS: expected a whole number of at least 0, got 'many'"),
        ("SANDBOX", "yes", "SANDBOX: expected 0, 1, false or true, got 'yes'"),
    ],
)
def test_bad_settings_fail_the_registration_and_no_import(name, value, expected, monkeypatch):
    from flyte_ddp.flyte import registration
    from flyte_ddp.project import settings
    from workflows.retrain import retrain_wf

    monkeypatch.setattr(settings, "_problems", [])
    with settings.delaying_errors():
        given = settings.load_settings(environment={name: value}).retrain_inputs
        registration.convert_inputs(retrain_wf, given)
    with pytest.raises(settings.SettingsError, match=re.escape(expected)):
        settings.check_settings()
