"""What makes a LaunchPlan ours, and what of it is read from the environment at registration.

`NOTIFY_EMAILS=a@example.com,b@example.com` is who learns of an execution that did not end well. `RETRAIN_INPUTS`, a
JSON object such as '{"recipe": "mnist", "data": "s3://bucket/mnist", "config": {"epochs": 3}}', is what the LaunchPlans
train by default: inputs that differ from the workflow's own.
"""

from __future__ import annotations

import json
import os
from typing import Any

from flytekit import LaunchPlan
from flytekit.core.notification import Email
from flytekit.core.schedule import CronSchedule, FixedRate
from flytekit.core.workflow import PythonFunctionWorkflow
from flytekit.models.concurrency import ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.types.directory import FlyteDirectory

from tasks.inputs import ClusterInput, TrainingOverrides

KICKOFF_TIME = "kickoff_time"  # the input that a schedule fills in

# Not a success: who wants to read of one every night.
PHASES = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.ABORTED, WorkflowExecutionPhase.TIMED_OUT]


def launch_plan(name: str, workflow: PythonFunctionWorkflow, schedule: CronSchedule | FixedRate | None) -> LaunchPlan:
    """A LaunchPlan of `workflow` that never runs twice at once; not active until registration asks for it.

    A start that finds the one before still running is skipped. That holds within one LaunchPlan: between two of them,
    what a promotion compares and replaces is what keeps them apart.

    Raises:
        ValueError: the environment has something that cannot be used.
    """
    addresses = [address.strip() for address in os.environ.get("NOTIFY_EMAILS", "").split(",") if address.strip()]
    for address in addresses:
        if address.count("@") != 1:
            raise ValueError(
                f"NOTIFY_EMAILS: {address!r} is no address; accepted is a list of them, with commas between"
            )
    return LaunchPlan.get_or_create(
        workflow=workflow,
        name=name,
        default_inputs=_inputs(workflow),
        schedule=schedule,
        notifications=[Email(PHASES, addresses)] if addresses else [],
        concurrency=ConcurrencyPolicy(max_concurrency=1),
        auto_activate=False,
    )


def _inputs(workflow: PythonFunctionWorkflow) -> dict[str, Any]:
    """The inputs in RETRAIN_INPUTS, as the workflow takes them."""
    text = os.environ.get("RETRAIN_INPUTS", "{}")
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"RETRAIN_INPUTS: {text!r} is not JSON: {error}; accepted is a JSON object") from error
    accepted = {name: kind for name, kind in workflow.python_interface.inputs.items() if name != KICKOFF_TIME}
    if not isinstance(given, dict) or not set(given) <= set(accepted):
        raise ValueError(f"RETRAIN_INPUTS: {text!r} cannot be used; accepted is a JSON object of {', '.join(accepted)}")
    return {name: _converted(name, value, accepted[name]) for name, value in given.items()}


def _converted(name: str, value: Any, kind: type) -> Any:
    if kind in (TrainingOverrides, ClusterInput):
        return kind.from_json(json.dumps(value))  # type: ignore[attr-defined]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (str, int, float):
        if type(value) is not kind:  # a bool is an int, too
            raise ValueError(f"RETRAIN_INPUTS: {name}: {value!r} is of the wrong type; accepted is a {kind.__name__}")
        return value
    if not isinstance(value, str) or "://" not in value:  # a path would be uploaded at every import
        raise ValueError(f"RETRAIN_INPUTS: {name}: {value!r} cannot be used; accepted is a URL")
    return FlyteDirectory(value)
