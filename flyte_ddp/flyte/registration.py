"""The launch plan of a retraining: its schedule, inputs and notifications from settings.toml. Also
a workaround for flytekit's conditionals.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from flytekit import FlyteContextManager, LaunchPlan
from flytekit.core.notification import Email
from flytekit.core.schedule import CronSchedule
from flytekit.core.workflow import PythonFunctionWorkflow
from flytekit.models.concurrency import ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.config.fields import check, expect_known
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.inputs import ClusterInput, TrainingOverrides
from flyte_ddp.project.settings import SETTINGS, delaying_errors

KICKOFF_TIME = "kickoff_time"  # the input that a schedule fills in
STRUCTS = {"config": TrainingOverrides, "cluster": ClusterInput}  # inputs that are JSON objects

# A success sends no message: one message every night would hide the others.
PHASES = [
    WorkflowExecutionPhase.FAILED,
    WorkflowExecutionPhase.ABORTED,
    WorkflowExecutionPhase.TIMED_OUT,
]


def launch_plan(name: str, workflow: PythonFunctionWorkflow) -> LaunchPlan:
    """Return the launch plan of `workflow`, with the schedule in the settings. Registration does
    not activate it.

    A fixed rate is no option: Flyte's scheduler passes the kickoff time to cron schedules only. A
    start is skipped while the previous execution still runs.

    A bad input in the settings fails the run, not the import.
    """
    inputs: dict[str, Any] = {}
    with delaying_errors():
        inputs = convert_inputs(workflow, SETTINGS.retrain_inputs)
    # Flytekit's commands for registered launch plans cannot show a JSON object as a default.
    fixed = {name: value for name, value in inputs.items() if name in STRUCTS}
    defaults = {name: value for name, value in inputs.items() if name not in STRUCTS}
    schedule = None
    if SETTINGS.schedule:
        schedule = CronSchedule(schedule=SETTINGS.schedule, kickoff_time_input_arg=KICKOFF_TIME)
    notifications = []
    if SETTINGS.notify_emails:
        notifications.append(Email(PHASES, list(SETTINGS.notify_emails)))
    return LaunchPlan.get_or_create(
        workflow=workflow,
        name=name,
        default_inputs=defaults,
        fixed_inputs=fixed,
        schedule=schedule,
        notifications=notifications,
        concurrency=ConcurrencyPolicy(max_concurrency=1),
        auto_activate=False,
    )


@contextlib.contextmanager
def inner_branch() -> Iterator[None]:
    """Let the block contain a conditional in a branch of another conditional.

    Without this a local run of flytekit has one state for both conditionals. It runs the branch
    that the inner conditional does not take, and nothing after it.
    """
    builder = FlyteContextManager.current_context().new_builder()
    builder.in_a_condition = False
    with FlyteContextManager.with_context(builder):
        yield


def convert_inputs(workflow: PythonFunctionWorkflow, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs in the settings, converted to the types of the workflow."""
    kinds = {
        name: kind
        for name, kind in workflow.python_interface.inputs.items()
        if name != KICKOFF_TIME
    }
    for name in given:
        if name not in kinds:
            raise ConfigError(f"retrain_inputs: {expect_known('input', kinds, name)}")
    return {name: _convert(name, value, kinds[name]) for name, value in given.items()}


def _convert(name: str, value: Any, kind: Any) -> Any:
    if name in STRUCTS:
        return STRUCTS[name].from_json(json.dumps(value))
    if kind in (str, int, float):
        return check(f"retrain_inputs.{name}", value, kind)
    # A path would be uploaded at every import.
    if not isinstance(value, str) or "://" not in value:
        raise ConfigError(f"retrain_inputs.{name}: expected a URL, got {value!r}")
    return FlyteDirectory(value)
