"""The place of a task in its Flyte execution: names and URLs, those that outlive an attempt and
those that do not.
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
    """Return the execution that the current task belongs to.

    Also give the user's own libraries (boto3, pandas) in this process and the ranks the task's
    storage configuration. The package itself does not need it: `flyte_ddp.storage` reads Flyte's
    variables.

    Flyte's own checkpoint path is not used: it belongs to one attempt, and the next attempt knows
    the one before only, which may have died before it wrote anything (flyteorg/flyte#2894).
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
    # .../SHARD/EXECUTION-NODE-ATTEMPT: the part above is the same for all attempts.
    root = store_of_outputs()
    return Execution(
        checkpoints="/".join(
            [root, "checkpoints", execution.project, execution.domain, execution.name, node]
        ),
        run_id=f"{execution.name}-{node}",
        is_local=False,
        champions=champions_of(root, execution.project, execution.domain),
        attempt_id=f"{execution.name}-{node}-{attempt}",
        url=os.environ.get("FLYTE_EXECUTION_URL", ""),
        attempt=attempt,
        previous_pod=f"{execution.name}-{node}-{attempt - 1}" if attempt else "",
    )


def list_own_places() -> list[str]:
    """Return the URLs and directories of the current task of Flyte, which it may open whatever its
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
    """Return where Flyte keeps the outputs of all tasks, which are inputs of others."""
    return str(flytekit.current_context().raw_output_prefix).rstrip("/").rsplit("/", 2)[0]


def is_flyte_task() -> bool:
    """Return True in a task that Flyte has started, where the launcher's inputs meet the task's own
    rights.
    """
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.mode is not None and not state.is_local_execution()


def node_and_attempt(
    execution: str, raw_output_prefix: str, output_metadata_prefix: str
) -> tuple[str, int]:
    """Return the id of a task's node, unique in its execution at any depth, and the number of the
    attempt.

    The raw output prefix ends in EXECUTION-NODE-ATTEMPT, which is also the pod's name. Flyte
    replaces that by a hash where it would grow too long. The path of the metadata prefix below
    .../PROJECT-DOMAIN-EXECUTION/ has the same parts then, such as n2/data/0/n2-n1/0/n0/1 for the
    second attempt of a node two levels down.
    """
    name = raw_output_prefix.rstrip("/").rpartition("/")[2]
    if match := re.fullmatch(rf"{re.escape(execution)}-(.+)-(\d+)", name):
        return match[1], int(match[2])
    *_, path = re.split(
        rf"/[^/]*-{re.escape(execution)}/", output_metadata_prefix.rstrip("/"), maxsplit=1
    )
    node, _, attempt = path.rpartition("/")
    return (node.replace("/", "-"), int(attempt)) if node and attempt.isdigit() else (name, 0)
