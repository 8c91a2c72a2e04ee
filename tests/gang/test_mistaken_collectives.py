"""Ranks that do not enter the same collectives: the bug is named in one line, without restarts, as
torchrun ends it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from types import SimpleNamespace

import cloudpickle
import pytest

from flyte_ddp.config.training import Needs
from flyte_ddp.errors import FailureKind, GangLost, NodeLost, ProgramError, RankFailure
from flyte_ddp.launch.control import inspection, stalls
from flyte_ddp.launch.control.gang_failures import Failures
from flyte_ddp.launch.control.inspection import Inspection
from flyte_ddp.launch.control.nodes import Node
from flyte_ddp.launch.control.policy import AttemptEnd, Before, Next, Rules, decide
from flyte_ddp.launch.control.stalls import Suspicion, suspect
from flyte_ddp.launch.protocol.messages import Beat, Collective, Group, Inspected, InspectedRank
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.run import FunctionCall, Gang, returned_value, run_job
from tests.support.errors import raises_one_line


def run(function, nproc_per_node=2, client=None, left_timeout=1.0, **options):
    call = cloudpickle.dumps(FunctionCall(function, ()))
    program = Program(
        function.__name__, call, ("tests",), needs=Needs(120), left_timeout=left_timeout
    )
    gang = Gang(2 if client else 1, nproc_per_node, 3, stall_timeout=120, client=client)
    return cloudpickle.loads(returned_value(run_job(Job(program), gang, **options)))


def begin():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank(), dist


def leave_on(number, reports=False):
    def train():
        import torch

        from flyte_ddp import session

        rank, dist = begin()
        for step in range(1, 6):
            if (rank, step) == (number, 3):
                return
            dist.all_reduce(torch.ones(4))
            if reports:
                session.report(step=step)

    return train


def send_other_sizes():
    import torch

    rank, dist = begin()
    for step in range(5):
        dist.all_reduce(torch.ones(4 if step < 3 or rank else 4000))


def drop_a_layer():
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, inputs, drops):
            return self.first(inputs) if drops else self.second(self.first(inputs))

    rank, _ = begin()
    model = DistributedDataParallel(Model())
    for step in range(4):
        model(torch.ones(2, 4), drops=(rank, step) == (1, 1)).sum().backward()


def differ(kind, number=1):
    """Three ranks, of which one enters another collective than the others in one step."""

    def train():
        import torch

        rank, dist = begin()
        for step in range(5):
            dist.all_reduce(torch.ones(300))
            is_odd = (rank, step) == (number, 3)
            if is_odd and kind == "larger":
                dist.all_reduce(torch.ones(8000))
            elif is_odd and kind == "smaller":
                dist.all_reduce(torch.ones(4))
            elif not is_odd:
                dist.all_reduce(torch.ones(8))

    return train


SAME = rf"{stalls.SAME_COLLECTIVES}$"
PLACE = r"at test_mistaken_collectives\.py:\d+ in"


@pytest.mark.parametrize(
    ("function", "rank", "expected"),
    [
        pytest.param(
            leave_on(0),
            0,
            r"rank 0 left early: it has ended, and rank 1 waits in all_reduce of float \[4\] "
            rf"\(collective 3 of the default group\), {PLACE} train\. {SAME}",
            id="rank 0, whose process stays",
        ),
        pytest.param(
            leave_on(1, reports=True),
            1,
            (
                r"rank 1 left early: it has ended, and rank 0 waits for that in a collective, "
                rf"{PLACE} train\. {SAME}"
            ),
            id="rank 1, whose process ends",
        ),
        pytest.param(
            send_other_sizes,
            None,
            rf"rank \d was ended by gloo {PLACE} send_other_sizes: what a peer sent does not fit "
            r"\(op\.preamble\.length <= op\.nbytes\. \d+ vs \d+\)\. Its peers: rank \d in "
            rf"all_reduce of float \[4000\] \(collective 4 of the default group\)\. {SAME}",
            id="other sizes",
        ),
        pytest.param(
            drop_a_layer,
            1,
            rf"rank 1 failed {PLACE} drop_a_layer: Expected to have finished reduction in the "
            r"prior iteration before "
            r"starting a new one\. A layer or an output was not used in a step: use all in each, "
            r"or give "
            r"DistributedDataParallel find_unused_parameters=True$",
            id="a layer that is dropped",
        ),
    ],
)
def test_it_is_named_in_one_line_and_nothing_starts_again(
    function, rank, expected, caplog, forked_functions
):
    with raises_one_line(RankFailure, match=f"^{expected}") as caught:
        run(function, left_timeout=60.0 if rank == 1 else 1.0)
    assert rank in (None, caught.value.rank)
    assert caught.value.is_user_error
    assert not [line for line in caplog.messages if "restarts" in line]


@pytest.mark.parametrize(("kind", "odd"), [("larger", "[8000]"), ("left out", "[300]")])
def test_the_rank_that_differs_from_the_others_is_named_although_another_is_ended(
    kind, odd, forked_functions
):
    with raises_one_line(RankFailure, match="All ranks have to enter") as caught:
        run(differ(kind), 3)
    assert caught.value.rank == 1
    text = str(caught.value)
    assert re.match(rf"rank 1 entered another collective than the others, {PLACE} train: ", text)
    assert f"rank 1 in all_reduce of float {odd}" in text
    assert re.search(r"rank [02] in all_reduce of float \[8\]", text)
    assert re.search(
        r" \(collective 8 of the default group\)\. gloo ended rank [02]: what it got does not fit "
        rf"\(.* \d+ vs \d+\)\. {SAME}",
        text,
    )


def test_a_rank_that_is_ended_because_of_its_own_collective_is_named(forked_functions):
    with raises_one_line(RankFailure, match="All ranks have to enter") as caught:
        run(differ("smaller"), 3)
    assert caught.value.rank == 1
    assert re.match(
        rf"rank 1 was ended by gloo {PLACE} train: what a peer sent does not fit \(.*\)\. Its "
        r"peers: ranks 0 and 2 in all_reduce of float \[8\] \(collective 8 of the default group\)"
        rf"\. {SAME}",
        str(caught.value),
    )


@pytest.mark.long
def test_a_rank_that_leaves_on_another_node_is_named_too(client):
    expected = (
        r"^rank 0 left early: it has ended, and rank 1 waits in all_reduce of "
        r"float \[4\]"
    )
    with pytest.raises(RankFailure, match=expected) as caught:
        run(leave_on(0), nproc_per_node=1, client=client)
    assert (caught.value.rank, caught.value.is_user_error) == (0, True)


def test_a_rank_that_works_on_alone_while_the_others_have_ended_or_wait_is_left_alone(
    forked_functions,
):

    def train():
        import torch

        rank, dist = begin()
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1))
        if rank == 2:
            return "not needed"
        if rank == 0:
            begun = time.monotonic()  # Rank 0 is busy, as if it wrote a model; rank 1 waits for it.
            while time.monotonic() < begun + 2:
                sum(range(10_000))
        dist.all_reduce(total := torch.ones(1), group=pair)
        return total.item()

    assert run(train, 3, left_timeout=0.3) == 2.0


# In one process


def waiting(number, group=(0, 1, 2), entered=4, since=1.0, stack=(), **values):
    pending = [Collective(entered, "barrier", "barrier", since)]
    state = Group("the default group", group, entered, pending)
    state = dataclasses.replace(state, **values)
    return InspectedRank(number, 0, None, list(stack), groups=[state])


IN_TORCH = '  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 9 in recv'


@pytest.mark.parametrize(
    ("ranks", "left", "expected"),
    [
        ([waiting(0), waiting(2)], [1], "rank 1 left early: it has ended, and ranks 0 and 2 wait"),
        ([waiting(2)], [0, 1], "ranks 0 and 1 left early: they have ended, and rank 2 waits"),
        # Rank 2 is in no group in which they wait: it is slow, not stuck.
        ([waiting(0, (0, 1)), waiting(1, (0, 1))], [2], None),
        # The waiting ranks have gone on.
        ([waiting(0, pending=[]), waiting(2, pending=[])], [1], None),
        (
            [InspectedRank(0, 0, None, [IN_TORCH], groups=[])],
            [1],
            "rank 1 left early: it has ended, and rank 0 waits",
        ),
        ([InspectedRank(0, 0, None, ['  File "a.py", line 2 in f'], groups=[])], [1], None),
        ([], [0], None),
    ],
)
def test_only_ranks_that_wait_for_one_that_has_ended_are(ranks, left, expected):
    failure = stalls.left_failure(ranks, left)
    assert (failure and str(failure).partition(" in ")[0]) == expected


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([([], [0]), ([31.0], [])], Suspicion(31.0, (0,))),
        ([([], [0]), ([29.0], [])], None),
        ([([], [0]), ([], [])], None),  # The other rank is working.
        ([([], [0]), ([90.0], []), ([], [])], None),  # A third rank is working.
        ([([], [0]), ([90.0], []), ([40.0], []), ([], [3])], Suspicion(40.0, (0, 3))),
        ([([90.0], []), ([90.0], [])], None),  # nobody has ended: a stall, once it lasts
        ([([1900.0], []), ([1801.0], [])], Suspicion(1801.0)),
        ([([1900.0], []), ([], []), ([], [])], None),  # Two ranks wait for a node that prepares.
        ([([], [0]), ([], [1])], None),  # All ranks have ended.
    ],
)
def test_ranks_that_have_waited_for_all_others_are_suspected(beats, expected):
    nodes = [Beat(waits=waits, ended=ended) for waits, ended in beats]
    assert suspect(nodes, len(nodes), stall_timeout=1800.0, left_timeout=30.0) == expected


def crashed(place="a.py:3 in f", cause="SIGABRT"):
    return RankFailure(
        f"rank 1 was killed by {cause}", 1, "signal", cause, details={"place": place}
    )


BUG, RESTART = ProgramError, Next.RESTART


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (AttemptEnd(crashed(), 7, 5), AttemptEnd(crashed(), 7, 5), BUG),
        (
            AttemptEnd(crashed(cause="SIGSEGV"), 7, 5),
            AttemptEnd(crashed(cause="SIGSEGV"), 7, 5),
            BUG,
        ),
        (
            AttemptEnd(crashed(), 0, -1),
            AttemptEnd(crashed(), 0, -1),
            BUG,
        ),  # a function that reports no steps
        # The run made progress in between.
        (AttemptEnd(crashed(), 7, 5), AttemptEnd(crashed(), 9, 5), RESTART),
        # a newer checkpoint, and the same step
        (AttemptEnd(crashed(), 7, 0), AttemptEnd(crashed(), 7, 6), BUG),
        (AttemptEnd(crashed(), 7, 5), AttemptEnd(crashed("a.py:9 in g"), 7, 5), RESTART),
        (
            AttemptEnd(crashed(""), 7, 5),
            AttemptEnd(crashed(""), 7, 5),
            RESTART,
        ),  # nobody knows where
        (AttemptEnd(crashed(cause="SIGSEGV"), 7, 5), AttemptEnd(crashed(), 7, 5), RESTART),
        (
            AttemptEnd(crashed(cause="SIGKILL"), 7, 5),
            AttemptEnd(crashed(cause="SIGKILL"), 7, 5),
            RESTART,
        ),
        (AttemptEnd(NodeLost("lost", "w"), 7, 5), AttemptEnd(crashed(), 7, 5), RESTART),
    ],
)
def test_a_crash_in_the_same_line_without_progress_is_a_bug(first, second, expected):
    assert (
        decide(second, Before(first, num_restarts=1), Rules(max_restarts=3, repeats_bugs=True))
        == expected
    )


def test_a_program_that_crashes_twice_in_the_same_line_is_named(caplog, forked_functions):

    def crash():
        os.abort()

    with pytest.raises(RankFailure) as caught:
        run(crash, 1)
    assert str(caught.value).startswith(
        "rank 0 was killed by SIGABRT twice, at test_mistaken_collectives.py:"
    )
    assert str(caught.value).endswith(
        "in crash, without progress in between: the program, or a library that it calls there, "
        "has a bug"
    )
    assert sum("restart 1 of at most 3" in line for line in caplog.messages) == 1
    assert not isinstance(caught.value, GangLost)


def stalled(number, what, silent_for=31.0, node="node-1"):
    """A rank that waits in collective 7, called in the user's own code."""
    state = Group(
        "the default group", (0, 1, 2), 7, [Collective(7, what, what.partition(" ")[0], 1.0)]
    )
    stack = [IN_TORCH, '  File "/home/me/job.py", line 8 in step']
    return InspectedRank(number, 5, silent_for, stack, groups=[state], node=node)


def test_ranks_that_wait_in_different_collectives_are_a_mistake_of_the_program():
    ranks = [stalled(0, "barrier"), stalled(1, "broadcast of float [8]"), stalled(2, "barrier")]
    found = stalls.judge(Suspicion(31.0), ranks, stall_timeout=30.0)
    assert found.kind is FailureKind.EXCEPTION
    assert found.rank == 1
    assert str(found) == (
        "no rank made progress for 31 s (stall_timeout: 30): the ranks are in different "
        "collectives: ranks 0 and 2 in barrier, rank 1 in broadcast of float [8] (collective 7 of "
        f"the default group), at job.py:8 in step on node-1. {stalls.SAME_COLLECTIVES}"
    )
    same = [stalled(number, "barrier") for number in range(3)]
    assert stalls.judge(Suspicion(31.0), same, stall_timeout=30.0).kind is FailureKind.STALL


def bereaved(number, **sizes):
    """A rank that lost its peer, and what it entered last: elements by the number, from `c7` on."""
    collectives = [
        Collective(int(name[1:]), "all_reduce", f"all_reduce of float [{size}]", 1.0, size)
        for name, size in sizes.items()
    ]
    groups = [
        Group("group pair", (0, 1), 2, [Collective(2, "barrier", "barrier", 1.0)]),
        Group("the default group", (0, 1, 2, 3), 8, collectives),
    ]
    stack = [IN_TORCH, '  File "/home/me/job.py", line 8 in step']
    return InspectedRank(number, 5, None, stack, groups=groups, node=f"node-{number}")


@pytest.mark.parametrize(
    ("others", "rank", "expected"),
    [
        pytest.param(
            [bereaved(0, c7=8), bereaved(1, c7=9), bereaved(2, c7=8)],
            1,
            "node-1: rank 1 entered another collective than the others, at job.py:8 in step: "
            "ranks 0 and 2 in all_reduce of float [8], rank 1 in all_reduce of float [9] "
            "(collective 7 of the default group). gloo ended rank 3",
            id="alone",
        ),
        pytest.param(
            [bereaved(0, c7=8), bereaved(2, c7=9)], 2, "node-2: rank 2 entered another", id="larger"
        ),
        pytest.param(
            [bereaved(0, c7=8, c8=5), bereaved(1, c7=9, c8=8), bereaved(2, c7=8, c8=5)],
            1,
            "node-1: rank 1 entered another collective than the others, at job.py:8 in step: "
            "ranks 0 and 2 in all_reduce of float [8], rank 1 in all_reduce of float [9] "
            "(collective 7",
            id="the first",
        ),
        pytest.param(
            [bereaved(0, c7=8, c8=5), bereaved(1, c7=8)],
            3,
            "node-3: rank 3 was ended by gloo at job.py:9 in f: what a peer sent does not fit "
            "(64 vs 8). Its peers: rank 0 in all_reduce of float [5] (collective 8 of",
            id="itself",
        ),
        pytest.param([InspectedRank(0, 5, None, groups=[])], 3, "node-3: rank 3 was", id="none"),
    ],
)
def test_the_rank_whose_collective_differs_is_found_from_what_the_others_entered(
    others, rank, expected
):
    failures = Failures([], world_size=4)
    details = {"sizes": "64 vs 8", "place": "job.py:9 in f"}
    ended = RankFailure("killed", 3, FailureKind.SIGNAL, "SIGABRT", details=details)
    failures.add_of(Node(3, "node-3"), ended, is_stopping=False)
    for each in others:
        echo = RankFailure(
            "\n".join(reversed(each.stack)), each.number, cause="RuntimeError: gloo",
            is_consequence=True, details={"groups": each.groups},
        )  # fmt: skip
        failures.add_of(Node(each.number, each.node), echo, is_stopping=False)
    found = failures.explain()
    assert (found.rank, found.is_user_error) == (rank, True)
    assert str(found).startswith(expected)
    assert str(found).endswith(stalls.SAME_COLLECTIVES)
    assert failures.is_cause_known() is (len(others) == 3)


@pytest.mark.parametrize(
    ("silences", "is_stall"),
    [
        ([31.0, 31.0, 31.0], True),
        ([0.4, 0.2, 0.3], False),
        ([0.4, 33.0, 0.3], True),  # a node of its own stands still
        ([0.4, None, 0.3], True),  # node 1 has never reported
    ],
)
def test_a_gang_that_goes_on_while_it_is_looked_into_is_left_alone(silences, is_stall, caplog):
    nodes = [Node(index, f"node {index}", beat=Beat(5, silent_for=30.5)) for index in range(3)]
    gang = SimpleNamespace(nodes=nodes, world_size=3, send=lambda question: None)
    looked = Inspection(gang, lambda line: None)
    program = Program("job", b"", (), needs=Needs(stall_timeout=30.0))
    for number in (1, 2):  # the second time they have stood still again
        assert looked.look(program) is None
        assert looked.is_asking
        for node, silent_for in zip(nodes, silences, strict=True):
            answer = [stalled(node.index, "barrier", silent_for)]
            looked.take(node, Inspected(number, answer))
        failure = looked.look(program)
        assert (failure is not None) is is_stall
        if is_stall:
            return
    assert "no rank made progress for 30 s; now they go on" in caplog.text


def test_a_node_that_does_not_answer_has_not_gone_on(monkeypatch):
    monkeypatch.setattr(inspection, "INSPECT_TIMEOUT", 0.0)
    nodes = [Node(index, f"node {index}", beat=Beat(5, silent_for=30.5)) for index in range(2)]
    gang = SimpleNamespace(nodes=nodes, world_size=2, send=lambda question: None)
    looked = Inspection(gang, lambda line: None)
    program = Program("job", b"", (), needs=Needs(stall_timeout=30.0))
    looked._ask(program)
    looked.take(nodes[0], Inspected(1, [stalled(0, "barrier", 0.3)]))
    assert looked.look(program) is not None
