"""The loop of attempts above a kind of node of the test's own: no process, no network, and still it
trains.
"""

from __future__ import annotations

import json
import pickle
import queue
import re
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from flyte_ddp import events
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.training import Needs
from flyte_ddp.errors import (
    GangLost,
    OutOfMemory,
    RankFailure,
    StorageUnavailable,
    TrainingStopped,
)
from flyte_ddp.events import AttemptEnded
from flyte_ddp.events.kinds import Figures, Timed
from flyte_ddp.launch.agent.link import Link
from flyte_ddp.launch.control import driver, states
from flyte_ddp.launch.control.gang_failures import find_cause
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.control.stalls import stall_failure
from flyte_ddp.launch.protocol.messages import (
    Beat,
    Emitted,
    End,
    Failed,
    InspectedRank,
    Kill,
    Leaving,
    Outcome,
    Stop,
)
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import function_program, script_program
from flyte_ddp.project.admission import IMAGE_VARIABLE
from flyte_ddp.storage import Storage
from flyte_ddp.storage.recorded_config import RecordedConfig
from tests.launch.test_policy import (
    AWAY,
    DENIED,
    ECHO,
    KILLED,
    LOST,
    OOM_POD,
    SHAPES,
    STALLED,
    THEIRS,
)
from tests.support.errors import raises_one_line

NUM_STEPS = 20
LEAVES = "leaves"  # the name that a node of `OwnPlace` announces in place of a fault


class OwnPlace(Nodes):
    """One node, without a process, that finds the minimum of (weight - 3) ** 2. `faults` end an
    attempt at a step.
    """

    max_restarts, larger_memory, is_cluster, notice_seconds = (
        3,
        "memory: expected more",
        False,
        20.0,
    )
    world_size = 1

    def __init__(self, *faults):
        self.faults, self.weights, self.nodes, self.commands = list(faults), [], [Node()], []

    def check(self, job):
        pass

    def close(self, run=None):
        pass

    def gather(self, run, previous):
        self.nodes, self.storage, self.command = [Node()], run.storage, None
        return self

    def start(self, job, num_restarts):
        self.step, self.weight = self._load()
        self.resumed_step = self.step

    def send(self, command):
        self.command = command
        self.commands.append(command)

    can_do_without_leaving = True

    def _load(self):
        names = [name for name in self.storage.names() if name.startswith("step-")]
        return json.loads(self.storage.read(max(names))) if names else (0, 0.0)

    def messages(self):
        (node,) = self.nodes
        if isinstance(self.command, (Stop, Kill)):
            return (yield node, End(Outcome.STOPPED))
        if self.step == self.resumed_step:
            yield node, Emitted(events.CheckpointLoaded(self.step, ""))
        if self.faults and self.faults[0][0] == self.step:
            _, failure = self.faults.pop(0)
            if failure is LEAVES:
                return (yield node, Leaving(30.0))
            return (yield node, Failed(pickle.loads(pickle.dumps(failure))))
        self.step, self.weight = self.step + 1, self.weight - 0.2 * 2 * (self.weight - 3)
        self.storage.write(
            f"step-{self.step:010d}.json", json.dumps([self.step, self.weight]).encode()
        )
        yield node, Emitted(events.CheckpointWritten(self.step, "address", best=False))
        yield node, Beat(self.step, is_stoppable=True)
        if self.step == NUM_STEPS:
            self.weights.append(self.weight)
            yield node, End(Outcome.DONE)


def train(place, directory, program=None, **options):
    job = Job(program or Program("minimum", b""), str(directory), 0.0)
    return driver.run(job, place, **options)


def test_a_kind_of_node_of_ones_own_trains_and_resumes_to_the_same_weight(tmp_path):
    undisturbed = OwnPlace()
    train(undisturbed, tmp_path / "undisturbed")
    disturbed = OwnPlace((3, KILLED), (9, LOST), (9, AWAY), (12, STALLED))
    train(disturbed, tmp_path / "disturbed")
    assert disturbed.weights == undisturbed.weights
    assert disturbed.faults == []
    assert undisturbed.weights[0] == pytest.approx(3, abs=1e-3)


class Mute(OwnPlace):
    """A node that never says that its ranks are gone."""

    def messages(self):
        if isinstance(self.command, Kill):
            return
        yield from super().messages()


def test_a_node_whose_state_in_memory_is_given_up_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(states, "KILL_TIMEOUT", 0.05)
    place = Mute((3, KILLED))
    train(place, tmp_path)
    assert place.faults == []
    assert "this machine did not confirm the end of its ranks" in caplog.text


@pytest.mark.parametrize(("is_kept", "expected"), [(True, {"address"}), (False, {""})])
def test_a_checkpoint_that_goes_with_its_run_has_no_address(is_kept, expected, tmp_path):
    seen = []
    driver.run(
        Job(Program("minimum", b""), str(tmp_path), 0.0, is_kept=is_kept),
        OwnPlace(),
        listeners=[SimpleNamespace(handle=seen.append, close=lambda error: None)],
    )
    assert {each.url for each in seen if isinstance(each, events.CheckpointWritten)} == expected


@pytest.mark.parametrize(
    "steps",
    [(0,), (0, 0), (7,), (7, 7), (7, 8, 9), (NUM_STEPS - 1,)],
    ids=lambda steps: "-".join(map(str, steps)),
)
def test_a_node_that_announces_that_it_leaves_costs_no_step_and_no_restart(tmp_path, steps, caplog):
    """Before the first step, on its way, again without progress, at each step, before the last
    one.
    """
    undisturbed = OwnPlace()
    train(undisturbed, tmp_path / "undisturbed")
    place, seen = OwnPlace(*((step, LEAVES) for step in steps)), []
    place.max_restarts = 0
    train(
        place,
        tmp_path / "left",
        listeners=[SimpleNamespace(handle=seen.append, close=lambda error: None)],
    )
    assert place.weights == undisturbed.weights
    ends = [
        (event.step, event.num_leaving, event.reason)
        for event in seen
        if isinstance(event, AttemptEnded)
    ]
    assert ends == [(step, 1, "this machine leaves") for step in steps]
    starts = [f"step {step}" if step else "its first step" for step in steps]
    assert all(each in caplog.text for each in starts)
    assert "was lost" not in caplog.text


@dataclass(frozen=True)
class Cooled(Timed):
    """An event of a kind of its own."""

    step: int
    degrees: float

    def figures(self):
        return Figures(values={"degrees": self.degrees}, axis="step", step=self.step)


@dataclass(frozen=True)
class Fan:
    """A message of a kind of its own."""

    speed: int


def test_an_event_and_a_message_of_ones_own_are_classes_in_one_place(tmp_path):
    class Cooling(OwnPlace):
        def messages(self):
            yield from super().messages()
            yield self.nodes[0], Fan(self.step)  # an event that this driver does not know
            yield self.nodes[0], Emitted(Cooled(self.step, 20.5))

    seen, shown = [], []
    bar = SimpleNamespace(
        handle=lambda event: shown.append(event.figures().values.get("degrees")),
        close=lambda error: None,
    )
    listener = SimpleNamespace(handle=seen.append, close=lambda error: None)
    train(Cooling((3, KILLED)), tmp_path, listeners=[listener, bar])
    assert 20.5 in shown
    assert max(event.step for event in seen if isinstance(event, Cooled)) == NUM_STEPS
    # The code that carries messages knows none of them.
    arrived = queue.SimpleQueue()
    Link(arrived.put).send(Fan(3))
    assert pickle.loads(pickle.dumps(arrived.get())) == Fan(3)


def test_a_save_that_the_store_does_not_take_in_time_leaves_the_checkpoint_before(
    tmp_path, scripted, caplog
):
    script = scripted([(None, 9, 7), ENOUGH])
    script.departures, script.reason = ["node 1"], "node 1 leaves"
    with pytest.raises(TrainingStopped):
        train(own_place(0), tmp_path)
    assert (
        "node 1 leaves: the gang ended at step 9 and restarts from step 7, because no later one "
        "was saved in time"
    ) in caplog.text


def test_a_node_that_is_gone_before_the_gang_has_ended_for_it_is_named(tmp_path, scripted, caplog):
    script = scripted([(LOST, 9, 7), ENOUGH])
    script.departures, script.reason = ["node 1"], ""
    with pytest.raises(TrainingStopped):
        train(own_place(0), tmp_path)
    assert f"{LOST}: the gang ended at step 9 and restarts from step 7" in caplog.text


class Scripted:
    """An attempt that ends as the test says: (error, step, step of the newest checkpoint that it
    leaves; None where it ends before it looks for one).

    If `memory` is given, these are the steps of the states that the attempts leave in memory.
    """

    departures = ()
    reason = ""

    def __init__(self, endings):
        self.endings, self.num_attempts, self.memory, self.jobs = list(endings), 0, [], []
        self.newest = 0

    def __call__(self, nodes, emit, *others):
        self.nodes, self.emit = nodes, emit
        return self

    def train(self, job, num_restarts):
        self.num_attempts += 1
        self.jobs.append(job)
        error, self.step, kept = self.endings.pop(0)
        if kept is not None:
            self.emit(events.CheckpointLoaded(self.newest, ""))
        if kept and job.checkpoints:
            self.newest = kept
            self.emit(events.CheckpointWritten(kept, "", best=False))
        if error:
            raise error
        return False

    def ended(self, reason):
        return AttemptEnded(self.step, reason, 0.0)

    def in_memory(self):
        return (self.memory.pop(0), "node 1's memory") if self.memory else (0, "")


@pytest.fixture
def scripted(monkeypatch):
    """The attempts of a run end as the test says."""

    def script(endings):
        made = Scripted(endings)
        monkeypatch.setattr(driver, "Attempt", made)
        return made

    return script


def own_place(max_restarts):
    place = OwnPlace()
    place.max_restarts = max_restarts
    return place


ENOUGH = (TrainingStopped("enough"), 99, 9)


@pytest.mark.parametrize(
    ("max_restarts", "endings", "error", "num_attempts"),
    [
        # nothing new was saved in between
        (16, [(OOM_POD, 7, 0), (OOM_POD, 8, 0)], OutOfMemory, 2),
        # The run made progress in between, once.
        (16, [(OOM_POD, 7, 5), (OOM_POD, 8, 0), (OOM_POD, 8, 0)], OutOfMemory, 3),
        (16, [(OOM_POD, 7, 6), (OOM_POD, 12, 9), ENOUGH], TrainingStopped, 3),
        # A run without reports counts its checkpoints.
        (16, [(OOM_POD, 0, 4), (OOM_POD, 0, 8), ENOUGH], TrainingStopped, 3),
        (0, [(AWAY, 5, 3), (AWAY, 9, 5), ENOUGH], TrainingStopped, 3),  # counts as no restart
        (0, [(AWAY, 5, 0), (AWAY, 5, 0)], StorageUnavailable, 2),
        (16, [(DENIED, 5, 0)], RankFailure, 1),
        (0, [(SHAPES, 0, 0)], RankFailure, 1),
        (1, [(OOM_POD, 7, 6), (THEIRS, 9, 0)], RankFailure, 2),
        (0, [(ECHO, 5, 0)], GangLost, 1),
        (0, [(KILLED, 5, 0)], RankFailure, 1),
        (1, [(KILLED, 5, 0), (KILLED, 7, 0)], RankFailure, 2),
        (1, [(KILLED, 5, 3), (KILLED, 7, 5), (KILLED, 9, 8), (KILLED, 9, 0)], RankFailure, 4),
        (0, [(KILLED, 5, 3)], RankFailure, 1),
        (0, [(OOM_POD, 5, 0)], GangLost, 1),
    ],
)
def test_failures_that_end_a_run_and_failures_that_restart_it(
    tmp_path, scripted, max_restarts, endings, error, num_attempts
):
    script = scripted(pickle.loads(pickle.dumps(endings)))
    with raises_one_line(error) as caught:
        train(own_place(max_restarts), tmp_path, recipe_program("digits", TrainingConfig()))
    assert script.num_attempts == num_attempts
    if error is OutOfMemory:
        assert str(caught.value).startswith(
            "memory: expected more, or a smaller evaluation_batch_size"
        )
    used_up = f"has used up its restarts (max_restarts: {max_restarts})"
    has_used_up = error is GangLost or (
        error is RankFailure and caught.value.kind == "signal" and max_restarts > 0
    )
    assert (used_up in str(caught.value)) == has_used_up


def test_a_second_kill_for_lack_of_memory_ends_the_run_also_in_another_process(tmp_path, scripted):
    scripted([(OOM_POD, 7, 0), (OOM_POD, 9, 0), (OOM_POD, 9, 0)])
    # the third is of a run in which something was changed
    for error in (GangLost, OutOfMemory, GangLost):
        with pytest.raises(error):
            train(own_place(0), tmp_path)


@pytest.mark.parametrize(
    ("checkpoints", "losses", "expected"),
    [
        ("kept", [(LOST, 0, 0)], " before its first step and restarts from the beginning"),
        ("kept", [(LOST, 7, 0)], " at step 7 and restarts from the beginning"),
        ("", [(LOST, 0, 0)], " and restarts from the beginning"),  # a script that reports no step
        ("kept", [(LOST, 7, 5)], " at step 7 and restarts from its last checkpoint"),
        (
            "kept",
            [(LOST, 0, None)],
            " before its first step and restarts from its last checkpoint, if there is one",
        ),
        ("", [(LOST, 0, None)], " and restarts from the beginning"),
    ],
)
def test_a_log_line_says_where_a_lost_gang_was_and_goes_on(
    tmp_path, scripted, caplog, checkpoints, losses, expected
):
    script = scripted([*losses, ENOUGH])
    with pytest.raises(TrainingStopped):
        driver.run(
            Job(Program("minimum", b""), checkpoints and str(tmp_path / checkpoints), 0.0),
            own_place(16),
        )
    assert f"the gang was lost{expected} (restart 1 of at most 16): " in caplog.text
    assert not script.jobs[-1].is_in_memory


def test_a_store_that_stays_away_ends_the_run_recoverably(tmp_path, scripted, monkeypatch):
    def names(storage):
        raise StorageUnavailable(
            f"checkpoints: {storage.url} could not be reached for {storage.timeout:g} s"
        )

    scripted([(KILLED, 5, 0)])
    monkeypatch.setattr(driver.Storage, "names", names)
    with pytest.raises(StorageUnavailable, match="could not be reached for 7 s"):
        train(own_place(16), tmp_path, Program("minimum", b"", needs=Needs(store_timeout=7)))


def test_what_is_left_in_memory_is_gone_on_from_while_the_store_is_away(
    tmp_path, scripted, monkeypatch, caplog
):
    script = scripted([(KILLED, 5, 3), (KILLED, 6, 0), (KILLED, 6, 0)])
    script.memory = [5, 6]
    is_away, names = [], Storage.names

    def names_if_there(storage):
        if script.num_attempts > 1:
            is_away.append(storage)
            raise StorageUnavailable("the store is away")
        return names(storage)

    monkeypatch.setattr(Storage, "names", names_if_there)
    # The third attempt leaves nothing there.
    with pytest.raises(StorageUnavailable, match="the store is away"):
        train(own_place(16), tmp_path)
    said = re.findall(r"was lost (.*) and restarts from (.*) \(restart", caplog.text)
    assert said[:2] == [
        ("at step 5", "step 5, from node 1's memory"),
        ("at step 6", "step 6, from node 1's memory"),
    ]
    assert [(job.stored, job.is_in_memory) for job in script.jobs] == [
        ((), False),
        ((3,), True),
        ((3,), True),
    ]


def test_a_stall_of_many_nodes_names_the_silent_rank_in_its_first_line():
    def inspect(node):
        stack = [f"  File {node}" for _ in range(36)] if node != 11 else []
        groups = [] if stack else None
        return InspectedRank(node, 8, 31.0, stack, groups, node=f"node {node} (w at h)")

    ranks = list(map(inspect, range(16)))
    stall = stall_failure(ranks, "no rank made progress for 31 s (stall_timeout: 30)")
    head, *rest = str(stall).splitlines()
    assert head.endswith("stall_timeout: 30): rank 11 did not answer")
    assert stall.rank == 11
    assert len(rest) < 45
    assert rest[0] == "--- rank 11 on node 11 (w at h), at step 8, last progress 31 s ago"
    assert rest[-1] == "... (the log has the stacks of 6 more ranks)"
    assert find_cause([ECHO, stall]) is stall
    # A program may raise an exception of its own because a node was lost, which is noticed later.
    failures = [ECHO, THEIRS, LOST]
    assert [find_cause(failures[:count]) for count in (1, 2, 3)] == failures


def test_a_listener_that_hangs_keeps_no_event_from_the_state_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "CLOSE_TIMEOUT", 0.1)
    ends = threading.Event()
    hanging = SimpleNamespace(handle=lambda event: ends.wait(), close=lambda error: None)
    state = train(OwnPlace(), tmp_path, listeners=[hanging])
    ends.set()
    assert state.checkpoint
    assert state.checkpoint.step == NUM_STEPS


def test_a_start_has_the_facts_that_only_the_launcher_knows(tmp_path, monkeypatch):
    monkeypatch.setenv(IMAGE_VARIABLE, "registry/team:7")
    (tmp_path / "train.py").write_text("import helper\n")

    def start():
        program = script_program(str(tmp_path / "train.py"), ["--lr", "0.1", "--api-key", "abc123"])
        seen = []
        listener = SimpleNamespace(handle=seen.append, close=lambda error: None)
        with driver.Dispatcher([listener], program=program) as dispatcher:
            dispatcher.emit(events.RunStarted("train.py", 1))
        return seen[0]

    first = start()
    assert (first.image, first.arguments) == ("registry/team:7", "--lr 0.1 --api-key ...")
    assert len(first.recipe_version) == 64
    (tmp_path / "losses.csv").write_text("1,0.5\n")
    assert start().recipe_version == first.recipe_version
    (tmp_path / "helper.py").write_text("VALUE = 2\n")
    assert start().recipe_version != first.recipe_version


def test_a_start_of_a_function_has_its_arguments_without_secrets():
    def train(width, api_key, place):
        """Never called."""

    keywords = {"api_key": "abc123", "place": "s3://user:pass@host/data"}
    program = function_program(train, (3,), keywords)
    seen = []
    listener = SimpleNamespace(handle=seen.append, close=lambda error: None)
    with driver.Dispatcher([listener], program=program) as dispatcher:
        dispatcher.emit(events.RunStarted("train", 1))
    assert seen[0].named_arguments["width"] == 3
    assert {"abc123", "pass"} & set(re.findall(r"\w+", str(seen[0]))) == set()
    # A hidden argument is compared by its hash, as a hidden value of a config is.
    recorded = RecordedConfig(seen[0].named_arguments, seen[0].hidden)
    assert recorded.is_all({"width": 3, **keywords})
    assert not recorded.is_same("api_key", "abc124")
