"""The place of a task in its Flyte execution: the names and URLs of the task, and of the current
attempt.
"""

from __future__ import annotations

import os
import re
import tempfile

import flytekit
from flytekit.core.context_manager import FlyteContextManager

from flyte_ddp.storage import storage_environment
from flyte_ddp.task_run.execution import Execution, champions_of


def current_execution() -> Execution:
    """Return the execution to which the current task belongs.

    Also give the user's own libraries (boto3, pandas) in this process and the ranks the task's
    storage configuration. The package itself does not need it: `flyte_ddp.storage` reads Flyte's
    variables.

    Flyte's own checkpoint path is not used. It belongs to one attempt. The next attempt knows only
    the path of the previous attempt, which may have died before it wrote anything
    (flyteorg/flyte#2894).
    """
    parameters = flytekit.current_context()
    os.environ.update(storage_environment())
    state = FlyteContextManager.current_context().execution_state
    if state is None or state.is_local_execution():
        os.makedirs(parameters.working_directory, exist_ok=True)
        checkpoints = tempfile.mkdtemp(prefix="checkpoints-", dir=parameters.working_directory)
        return Execution(checkpoints, run_id="", is_local=True)
    execution = parameters.execution_id
    node, attempt = node_and_attempt(
        execution.name, parameters.raw_output_prefix, parameters.output_metadata_prefix
    )
    # The prefix is .../SHARD/EXECUTION-NODE-ATTEMPT. Its beginning is the same for all attempts.
    root, project, domain = store_of_outputs(), execution.project, execution.domain
    run_id = f"{execution.name}-{node}"
    previous_pod = ""
    if attempt:
        previous_pod = f"{run_id}-{attempt - 1}"
    return Execution(
        checkpoints=f"{root}/checkpoints/{project}/{domain}/{execution.name}/{node}",
        run_id=run_id,
        is_local=False,
        champions=champions_of(root, project, domain),
        attempt_id=f"{run_id}-{attempt}",
        url=os.environ.get("FLYTE_EXECUTION_URL", ""),
        attempt=attempt,
        previous_pod=previous_pod,
    )


def list_own_places() -> list[str]:
    """Return the URLs and directories that the current task of Flyte may open whatever its
    registration allows.
    """
    parameters, execution = flytekit.current_context(), current_execution()
    return [
        str(parameters.working_directory),
        parameters.raw_output_prefix,
        execution.checkpoints.rpartition("/")[0],  # the checkpoints of the whole execution
        execution.champions,
    ]


def store_of_outputs() -> str:
    """Return the URL at which Flyte keeps the outputs of all tasks."""
    return str(flytekit.current_context().raw_output_prefix).rstrip("/").rsplit("/", 2)[0]


def is_flyte_task() -> bool:
    """Return True in a task that Flyte has started. Such a task has rights of its own, which its
    launcher's inputs must not abuse.
    """
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.mode is not None and not state.is_local_execution()


def node_and_attempt(
    execution: str, raw_output_prefix: str, output_metadata_prefix: str
) -> tuple[str, int]:
    """Return the id of a task's node, unique in its execution at any depth, and the number of the
    attempt.

    The raw output prefix ends in EXECUTION-NODE-ATTEMPT, which is also the pod's name. Flyte
    replaces this name by a hash if it is too long. Then the path of the metadata prefix below
    .../PROJECT-DOMAIN-EXECUTION/ has the same parts, such as n2/data/0/n2-n1/0/n0/1 for the second
    attempt of a node two levels down.
    """
    name = raw_output_prefix.rstrip("/").rpartition("/")[2]
    match = re.fullmatch(rf"{re.escape(execution)}-(.+)-(\d+)", name)
    if match:
        return match[1], int(match[2])
    *_, path = re.split(
        rf"/[^/]*-{re.escape(execution)}/", output_metadata_prefix.rstrip("/"), maxsplit=1
    )
    node, _, attempt = path.rpartition("/")
    if not node or not attempt.isdigit():
        return name, 0
    return node.replace("/", "-"), int(attempt)
