"""The plugin of a run in a Dask worker, without Dask: jobs, agents, and whose worker it is."""

from __future__ import annotations

import functools
import threading
import time
from multiprocessing.connection import Pipe
from types import SimpleNamespace

import pytest

from flyte_ddp.launch.nodes.dask import worker
from tests.support.dask_runs import eventually


class FakeAgent(worker.Agent):
    """An agent without a process. Its side of the connection is `far`."""

    started: list[FakeAgent] = []

    @classmethod
    def start(cls, directories, outputs):
        near, far = Pipe()
        process = SimpleNamespace(pid=0, returncode=None, poll=lambda: process.returncode)
        process.wait = lambda timeout=None: process.returncode
        agent = cls(process, near)

        def kill():
            process.returncode = -9
            far.close()

        process.kill = kill
        agent.far = far
        cls.started.append(agent)
        return agent


@pytest.fixture
def node(monkeypatch):
    """A worker with the plugins of two runs, and the events that it has logged."""
    monkeypatch.setattr(FakeAgent, "started", [])
    monkeypatch.setattr(worker, "Agent", FakeAgent)
    monkeypatch.setattr(worker, "HOLD_SECONDS", 0.0)
    monkeypatch.setattr(worker, "HOLD_INTERVAL", 0.01)
    logged = []
    made = SimpleNamespace(
        address="tcp://127.0.0.1:1",
        local_directory="",
        plugins={},
        log_event=lambda topic, message: logged.append((topic, message)),
        logged=logged,
        state=SimpleNamespace(executing_count=0, nthreads=1),
        status=SimpleNamespace(name="running"),
    )
    for name in ("run", "other"):
        made.plugins[name] = worker.NodePlugin(name, b"")
        made.plugins[name].worker = made
    yield made
    for each in made.plugins.values():
        each._clear()


def take_job(plugin, attempt, num_started=1):
    plugin.take(attempt, {"job": attempt.encode()})
    assert eventually(lambda: attempt in plugin.agents)
    agent = FakeAgent.started[num_started - 1]
    assert agent.far.recv_bytes() == attempt.encode()
    return agent


def end(agent):
    agent.far.send_bytes(b"")
    agent.far.send_bytes(b"the last message")


def test_one_agent_runs_one_attempt_after_another(node):
    """The next job may follow the last message at once."""
    plugin = node.plugins["run"]
    for attempt in ("run-0", "run-1"):
        agent = take_job(plugin, attempt)
        plugin.take(attempt, {"command": b"go"})
        assert agent.far.recv_bytes() == b"go"
        end(agent)
        last = (attempt, {"message": b"the last message"})
        assert eventually(functools.partial(node.logged.__contains__, last))
    assert len(FakeAgent.started) == 1
    assert not [event for _, event in node.logged if "lost" in event]


def test_a_job_that_comes_while_the_attempt_before_it_ends_waits_for_its_agent(node):
    plugin = node.plugins["run"]
    agent = take_job(plugin, "run-0")
    with plugin.spare._lock:  # the agent has ended the attempt and is not free yet
        end(agent)
        assert eventually(lambda: not plugin.agents)
        plugin.take("run-1", {"job": b"second"})
        time.sleep(0.05)
    assert agent.far.recv_bytes() == b"second"
    assert len(FakeAgent.started) == 1


def test_an_agent_that_dies_is_reported_with_the_signal(node):
    plugin = node.plugins["run"]
    take_job(plugin, "run-0").process.kill()
    assert eventually(lambda: not plugin.use.attempts)
    assert node.logged[-1] == ("run-0", {"lost": "its agent was killed by SIGKILL"})


def test_an_agent_that_cannot_be_started_is_reported_with_the_reason(node, monkeypatch):
    def start(directories, outputs):
        raise OSError("no more processes")

    monkeypatch.setattr(FakeAgent, "start", start)
    plugin = node.plugins["run"]
    plugin.take("run-0", {"job": b"job"})
    assert eventually(lambda: not plugin.use.attempts)
    why = "its agent could not be started: OSError: no more processes"
    assert node.logged[-1] == ("run-0", {"lost": why})
    assert not plugin.is_at_work


def test_a_worker_without_room_for_a_thread_is_reported_with_the_reason(node, monkeypatch):
    """An error in a handler of Dask's stream would end the worker instead."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    plugin = node.plugins["run"]
    plugin.take("run-0", {"job": b"job"})
    why = "its agent could not be started: RuntimeError: can't start new thread"
    assert node.logged == [("run-0", {"lost": why})]
    assert not plugin.use.attempts
    assert not plugin.is_at_work  # A spare agent may prepare here.


def test_a_worker_that_another_run_uses_takes_no_job(node):
    plugin, other = node.plugins.values()
    agent = take_job(plugin, "run-0")
    other.take("other-0", {"job": b"job"})
    assert eventually(lambda: not other.use.attempts)
    why = "its agent was not started: another run uses the worker (run)"
    assert node.logged[-1] == ("other-0", {"lost": why})
    end(agent)
    assert eventually(lambda: not plugin.use.attempts)
    take_job(other, "other-1", num_started=2)


def test_an_attempt_that_another_one_follows_at_once_is_not_run(node):
    plugin = node.plugins["run"]
    plugin._turn.acquire()
    plugin.take("run-0", {"job": b"first"})
    plugin.take("run-1", {"job": b"second"})
    plugin._turn.release()
    assert eventually(lambda: "run-1" in plugin.agents)
    agent = FakeAgent.started[0]
    assert agent.far.recv_bytes() == b"second"
    end(agent)
    assert eventually(lambda: not plugin.use.attempts)  # either of them may have had the first turn
    assert FakeAgent.started == [agent]


@pytest.mark.parametrize("ends_by", ["the run ends", "no attempt follows"])
def test_a_worker_is_held_while_its_run_needs_it(node, monkeypatch, ends_by):
    plugin = node.plugins["run"]
    if ends_by == "the run ends":
        monkeypatch.setattr(worker, "HOLD_SECONDS", 1e9)
    agent = take_job(plugin, "run-0")
    thread = threading.Thread(target=plugin.use.hold, daemon=True)
    thread.start()
    node.state.executing_count = 1
    thread.join(0.1)
    assert thread.is_alive()
    assert worker.introduce("other", node)["is_busy"]
    assert worker.introduce("run", node)["is_busy"]  # the attempt before has not ended
    end(agent)
    assert eventually(lambda: not plugin.use.attempts)
    if ends_by == "the run ends":
        assert not worker.introduce("run", node)["is_busy"]
        assert worker.introduce("other", node)["is_busy"]
        plugin.use.close()
    thread.join()
    assert plugin.use.num_holds == 0
