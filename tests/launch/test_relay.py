"""The messages between the driver and a thousand nodes, without processes."""

from __future__ import annotations

import asyncio
import pickle
import queue
from types import SimpleNamespace

import pytest
from distributed.comm import CommClosedError

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.launch.control.states import Departure
from flyte_ddp.launch.nodes.dask import calls, discovery, heartbeats, nodes, relay
from flyte_ddp.launch.nodes.dask.assignment import DaskNode
from flyte_ddp.launch.protocol.messages import Beat, End, Failed, Go, Outcome, Stop
from flyte_ddp.launch.protocol.ranks import NodeRanks

LOSS = {"action": "remove-worker", "worker": "b"}


class Stream(list):
    """The scheduler's stream to a worker."""

    is_closed = False

    def send(self, message):
        if self.is_closed:
            raise CommClosedError
        self.append(message)


@pytest.fixture
def scheduler():
    """A scheduler with the events that it has logged."""
    logged, plugins = [], {}
    return SimpleNamespace(
        stream_comms={"a": Stream(), "b": Stream()},
        handlers={},
        plugins=plugins,
        add_plugin=lambda plugin, name: plugins.update({name: plugin}),
        log_event=lambda topic, message: logged.append((topic, message)),
        logged=logged,
    )


def beat(worker="a"):
    return {"message": b"beat", "worker": worker}


def test_messages_within_an_interval_are_one_batch_and_a_message_after_a_pause_does_not_wait(
    scheduler, monkeypatch
):
    clock = SimpleNamespace(now=100.0, delays=[])

    def call_later(delay, function):
        clock.delays.append(delay)
        clock.due = function
        return SimpleNamespace(cancel=lambda: None)

    loop = SimpleNamespace(call_later=call_later)
    # A scheduler in this process has unpickled the class, whose functions have other globals then.
    names = relay.Relay.log_event.__globals__
    monkeypatch.setitem(names, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    monkeypatch.setitem(names, "time", SimpleNamespace(monotonic=lambda: clock.now))
    passed = relay.Relay(scheduler, "run", "run-0", ["a", "b"])
    passed.log_event("run-0", beat("a"))
    assert clock.delays == [0.0]
    clock.due()
    clock.now += 0.01
    passed.log_event("run-0", beat("a"))
    passed.log_event("another run", beat("a"))
    passed.log_event("run-0", beat("b"))
    assert clock.delays[1:] == [pytest.approx(relay.BATCH_INTERVAL - 0.01)]
    clock.due()
    assert [batch for _, batch in scheduler.logged] == [[beat("a")], [beat("a"), beat("b")]]
    assert {topic for topic, _ in scheduler.logged} == {relay.batches_of("run-0")}


def test_the_messages_of_a_node_arrive_before_its_loss(scheduler):
    async def pass_on():
        passed = relay.Relay(scheduler, "run", "run-0", ["a", "b"])
        passed._passed_at = float("inf")  # the batch would never be due
        passed.log_event("run-0", beat("b"))
        passed.log_event("all", LOSS)

    asyncio.run(pass_on())
    assert [batch for _, batch in scheduler.logged] == [[beat("b"), LOSS]]


def test_jobs_and_commands_reach_no_worker_that_came_back_at_the_address_of_a_node(scheduler):
    a, b = scheduler.stream_comms.values()
    relay.install("run", "run-0", ["a", "b", "gone"], scheduler)
    b.is_closed, scheduler.stream_comms["b"] = True, Stream()
    scheduler.handlers["run-begin"](jobs={"a": b"job a", "b": b"job b", "gone": b"job"})
    scheduler.handlers["run"](command=b"go")
    assert a == [
        {"op": "run", "attempt": "run-0", "content": {"job": b"job a"}},
        {"op": "run", "attempt": "run-0", "content": {"command": b"go"}},
    ]
    assert b == scheduler.stream_comms["b"] == []
    relay.install("run", "run-1", ["a"], scheduler)
    assert scheduler.plugins["run"].attempt == "run-1"
    relay.uninstall("run", scheduler)
    assert not scheduler.plugins
    assert not scheduler.handlers


def test_a_silent_worker_delays_no_other_workers_answer():
    async def run(function, *arguments, workers, **options):
        if "silent" in workers:
            await asyncio.sleep(60)
        return {address: function(*arguments) for address in workers}

    client = SimpleNamespace(run=run, sync=lambda call, *arguments: asyncio.run(call(*arguments)))
    addresses = ["silent", *map(str, range(2 * calls.CALLS_PER_REQUEST))]
    answers = calls.call_workers(client, addresses, int, "7", timeout=0.01)
    assert answers.keys() == set(addresses)
    assert isinstance(answers.pop("silent"), TimeoutError)
    assert set(answers.values()) == {7}


def test_a_thousand_workers_are_not_all_asked_at_once():
    asked, most = 0, 0

    async def run(function, *arguments, workers, **options):
        nonlocal asked, most
        asked += len(workers)
        most = max(most, asked)
        await asyncio.sleep(0.01)
        asked -= len(workers)
        return {address: function(*arguments) for address in workers}

    client = SimpleNamespace(run=run, sync=lambda call, *arguments: asyncio.run(call(*arguments)))
    answers = calls.call_workers(client, [str(each) for each in range(1024)], int, "7")
    assert set(answers.values()) == {7}
    assert most == calls.MAX_REQUESTS * calls.CALLS_PER_REQUEST < len(answers)


def test_a_worker_that_has_just_ended_an_attempt_is_not_asked_again(monkeypatch):
    listed = {"a": ["node-a", "1", False], "b": ["node-b", "2", False]}
    asked = []

    def introduce(client, addresses, *_):
        asked.append(sorted(addresses))
        return {
            each: {
                "host": each,
                "machine": "",
                "num_cores": 2,
                "gpus": (),
                "has_plugin": False,
                "has_agent": False,
                "is_busy": False,
                "is_leaving": False,
            }
            for each in addresses
        }

    monkeypatch.setattr(discovery, "listed_workers", lambda client, plugin: listed)
    monkeypatch.setattr(discovery, "call_workers", introduce)
    roll = discovery.WorkerDiscovery(None, "run", known={"a", "b"})
    roll.present_workers()
    present = roll.present_workers(present={"a"})
    assert asked == [["a", "b"], ["b"]]
    assert {each.address for each in present if each.has_plugin and each.has_agent} == {"a"}
    listed["a"][2] = True  # another run has taken it
    assert [each.is_busy for each in roll.present_workers(present={"a"})] == [True, False]
    listed["a"][1] = "3"  # another process at the same address
    assert not any(each.has_plugin for each in roll.present_workers(present={"a"}))
    assert asked[-1] == ["a", "b"]


@pytest.fixture
def gang(monkeypatch):
    """Two nodes whose attempt has begun."""
    ranks = NodeRanks(0, 1, 2, False, 1)
    made = [
        DaskNode(
            index=index,
            label=f"node {index}",
            worker=address,
            address=address,
            ranks=ranks,
            environment={},
            has_plugin=True,
        )
        for index, address in enumerate("ab")
    ]
    monkeypatch.setattr(nodes, "scheduler_id", lambda client: "1")
    clock = SimpleNamespace(now=100.0)
    for module in (nodes, heartbeats):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    client = SimpleNamespace(loop=SimpleNamespace(add_callback=lambda *_: None))
    holds = SimpleNamespace(are_lost=False)
    gang = nodes.DaskNodes("run", b"", client, ClusterConfig(kind="local"), made, None, None, holds)
    gang._is_begun = True
    gang._arrivals = queue.SimpleQueue()
    for node in made:
        node.last_message_at = clock.now

    def receive(seconds, *batch):
        clock.now += seconds
        gang._arrivals.put((clock.now, list(batch)))
        return [(node.index, message) for node, message in gang.messages()]

    gang.receive = receive
    return gang


def event(worker, message):
    return {"message": pickle.dumps(message), "worker": worker}


def test_a_node_that_does_not_take_its_job_is_lost_sooner_than_a_silent_one(gang):
    admitted = {"admitted": True, "worker": "a"}
    assert gang.receive(1.0, admitted) == []
    (index, failed), (_, end) = gang.receive(heartbeats.ANSWER_TIMEOUT + 0.1)
    assert index == 1
    assert isinstance(failed, Failed)
    assert "it does not answer" in str(failed.failure)
    assert end.outcome is Outcome.FAILED


def test_no_node_is_lost_while_others_take_their_jobs_in_line_before_it(gang):
    assert gang.receive(4.0, {"admitted": True, "worker": "a"}) == []
    assert gang.receive(4.0) == []
    received = gang.receive(2.0, event("a", Beat(1)))
    assert [index for index, _ in received] == [0, 1, 1]
    assert "did not take its job within 10 s" in str(received[1][1].failure)


def test_of_many_nodes_one_may_wait_longer_for_its_job(gang, monkeypatch):
    monkeypatch.setattr(gang._silence, "num_nodes", 1024)
    assert gang.receive(1.0, {"admitted": True, "worker": "a"}) == []
    assert gang.receive(heartbeats.ANSWER_TIMEOUT + 10.0) == []
    received = gang.receive(heartbeats.ANSWER_TIMEOUT + 10.0)
    assert [index for index, _ in received] == [1, 1]


def dead_node():
    return SimpleNamespace(outcome=Outcome.FAILED)


def test_a_command_is_repeated_every_second_until_all_have_it_and_rarely_while_they_train(
    gang, monkeypatch
):
    sent = []
    monkeypatch.setattr(
        gang.client.loop, "add_callback", lambda *arguments: sent.append(arguments[-1])
    )
    gang.send(Go())
    beats = [event("b", Beat(1)), event("a", Beat(1))]

    def count(seconds, *batch):
        sent.clear()
        for _ in range(seconds):
            gang.receive(1.0, *batch)
        return len(sent)

    assert count(5, beats[0]) == 5  # node 0 has not started yet
    gang.receive(1.0, *beats)
    limit = gang.config.node_timeout
    assert limit / 5 <= 20 / count(20, *beats) <= limit / 3
    gang.send(Stop("SIGTERM", 30.0))
    assert count(5, *beats) == 5


def test_a_command_to_a_thousand_nodes_is_repeated_every_four_seconds(gang, monkeypatch):
    sent = []
    monkeypatch.setattr(
        gang.client.loop, "add_callback", lambda *arguments: sent.append(arguments[-1])
    )
    monkeypatch.setattr(gang._command, "nodes", [*gang.nodes, *[dead_node()] * 998])
    gang.send(Stop("SIGTERM", 30.0))
    for _ in range(8):
        gang.receive(1.0)
    assert len(sent) == 1 + 2


def test_a_batch_has_messages_of_many_nodes_and_silence_is_noticed_as_before(gang):
    beats = [event("a", Beat(1)), event("b", Beat(2)), {"message": b"", "worker": "unknown"}]
    assert gang.receive(1.0, *beats) == [(0, Beat(1)), (1, Beat(2))]
    timeout = gang.config.node_timeout
    assert gang.receive(timeout - 1.0, event("a", Beat(1))) == [(0, Beat(1))]
    received = gang.receive(2.0)
    assert [index for index, _ in received] == [1, 1]
    assert f"silent for {timeout + 1:.0f} s" in str(received[0][1].failure)


def test_a_node_whose_agent_died_is_lost_at_once(gang):
    (index, failed), (_, end) = gang.receive(0.1, {"lost": "its agent was killed", "worker": "b"})
    assert index == 1
    assert str(failed.failure) == "its agent was killed"
    assert end.outcome is Outcome.FAILED


def test_all_nodes_are_lost_with_the_connection_to_the_scheduler(gang):
    assert gang.receive(1.0, event("a", Beat(1)), event("b", Beat(1))) != []
    gang.holds.are_lost = True
    received = gang.receive(1.0)
    assert [index for index, _ in received] == [0, 0, 1, 1]
    assert "connection to the Dask scheduler" in str(received[0][1].failure)


def test_nodes_that_were_never_started_end_with_the_first_command(gang):
    gang._is_begun = False
    gang.send(Stop("another node was lost", 1.0))
    assert [node.outcome for node in gang.nodes] == 2 * [Outcome.FAILED]
    assert gang.receive(100.0) == []


def test_tasks_that_hold_workers_for_a_run_do_not_count_as_tasks_of_others():
    def worker_with(*keys):
        tasks = [SimpleNamespace(key=key) for key in keys]
        return SimpleNamespace(name="w", server_id="1", processing=tasks)

    scheduler = SimpleNamespace(
        workers={
            "idle": worker_with(),
            "own": worker_with("run-0-hold-0"),
            "shared": worker_with("run-1-hold-0", "of-a-user"),
            "of another run": worker_with("run2-0-hold-0"),
        }
    )
    listed = relay.list_workers("run", dask_scheduler=scheduler)
    assert [address for address, (*_, is_busy) in listed.items() if is_busy] == [
        "shared",
        "of another run",
    ]
    others = relay.list_workers("", dask_scheduler=scheduler)
    assert [address for address, (*_, is_busy) in others.items() if not is_busy] == ["idle"]


def test_only_nodes_whose_agents_confirmed_the_end_count_as_present(gang):
    gang.receive(1.0, event("a", End(Outcome.KILLED)), event("b", Beat(2)))
    assert gang.present == {"a"}
    gang.nodes[0].departure = Departure.announce("node 0", 30.0, 100.0)
    assert gang.present == set()
