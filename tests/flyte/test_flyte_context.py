"""The place of a task in its Flyte execution, from the prefixes that Flyte 1.16 gives it."""

from __future__ import annotations

import pytest
from flytekit import FlyteContext, FlyteContextManager
from flytekit.core.context_manager import ExecutionParameters, ExecutionState
from flytekit.models.core.identifier import WorkflowExecutionIdentifier

from flyte_ddp.cluster.kubernetes.manifest import cluster_name
from flyte_ddp.flyte.flyte_context import current_execution
from flyte_ddp.task_run.execution import Execution

EXECUTION = "f33b0c1d2e3f4a5b6c7d"
# Every place that a task can have in a workflow, as (end of the raw output prefix, end of the
# metadata prefix) of its attempts: read off Flyte 1.16.
PLACES = {
    "top-level": [(f"x8/{EXECUTION}-n1-0", "n1/data/0"), (f"q1/{EXECUTION}-n1-1", "n1/data/1")],
    "sub-workflow": [
        (f"x8/{EXECUTION}-n2-0-n2-n1-0-n0-0", "n2/data/0/n2-n1/0/n0/0"),
        (f"pj/{EXECUTION}-n2-0-n2-n1-0-n0-1", "n2/data/0/n2-n1/0/n0/1"),
    ],
    "its other branch": [(f"x8/{EXECUTION}-n2-0-n2-n2-0-n0-0", "n2/data/0/n2-n2/0/n0/0")],
    "map, first": [
        (f"x8/{EXECUTION}-n3-0-n0-0", "n3/data/0/n0/0"),
        (f"k2/{EXECUTION}-n3-0-n0-1", "n3/data/0/n0/1"),
    ],
    "map, second": [(f"x8/{EXECUTION}-n3-0-n1-0", "n3/data/0/n1/0")],
    # A name of more than 50 characters, which Flyte replaces by a hash of it.
    "deep": [
        ("x8/fj4nq2ya", "n4/data/0/n4-n2/0/n4-n2-n1/0/n0/0"),
        ("m3/fk9wz7bc", "n4/data/0/n4-n2/0/n4-n2-n1/0/n0/1"),
    ],
}


def execution_at(raw: str, metadata: str) -> Execution:
    parameters = ExecutionParameters(
        execution_date=None,
        tmp_dir="/tmp",
        stats=None,
        execution_id=WorkflowExecutionIdentifier("flytesnacks", "development", EXECUTION),
        logging=None,
        raw_output_prefix=f"s3://bucket/data/{raw}",
        output_metadata_prefix=f"s3://bucket/metadata/propeller/flytesnacks-development-{EXECUTION}/{metadata}",
        checkpoint=None,
    )
    state = ExecutionState.Mode.TASK_EXECUTION
    context: FlyteContext = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(
        context.with_execution_state(
            context.new_execution_state().with_params(mode=state, user_space_params=parameters)
        )
    ):
        return current_execution()


def test_only_attempts_of_one_node_share_checkpoints() -> None:
    places, ids = [], []
    for attempts in PLACES.values():
        found = [execution_at(*each) for each in attempts]
        places.append({(each.checkpoints, each.run_id) for each in found})
        ids += [each.attempt_id for each in found]
    assert [len(each) for each in places] == [1] * len(PLACES)
    assert len(set.union(*places)) == len(PLACES)
    assert len({cluster_name(each) for each in ids}) == len(ids) == sum(map(len, PLACES.values()))


@pytest.mark.parametrize(
    ("place", "node"),
    [("top-level", "n1"), ("sub-workflow", "n2-0-n2-n1-0-n0"), ("map, first", "n3-0-n0")],
)
def test_attempts_have_the_names_of_flytes_pods(place: str, node: str) -> None:
    second = execution_at(*PLACES[place][1])
    assert (
        second.checkpoints
        == f"s3://bucket/data/checkpoints/flytesnacks/development/{EXECUTION}/{node}"
    )
    assert second.run_id == f"{EXECUTION}-{node}"
    assert second.attempt_id == f"{EXECUTION}-{node}-1"
