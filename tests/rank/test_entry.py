"""The environment of a rank's process, which torch reads when it is imported, and its link to the
agent.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading

import pytest

from flyte_ddp.config import TrainingConfig
from flyte_ddp.launch.protocol.messages import RankBeat
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.protocol.ranks import NodeRanks, choose_threads
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.rank.entry import environment, flush_files
from flyte_ddp.rank.link import AgentLink

NAMES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG")


def environment_of(monkeypatch, given=(), has_set_threads=False, **config):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given:
        monkeypatch.setenv(name, value)
    job = Job(recipe_program("digits", TrainingConfig(**config)), "checkpoints", 0.0)
    node = NodeRanks(
        *(6, 2, 8),
        use_gpus=False,
        num_threads=3,
        host="10.0.0.1",
        port=1234,
        interface="eth0",
        node_rank=3,
        num_nodes=4,
        run_id="run-1",
        num_restarts=1,
        max_restarts=5,
        has_set_threads=has_set_threads,
    )
    return environment(job, node, 1)


def test_an_interface_or_a_number_of_threads_that_the_user_has_set_is_kept(monkeypatch):
    given = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "bond0", "OMP_NUM_THREADS": "1"}
    found = environment_of(monkeypatch, given.items(), deterministic=True)

    assert found == found | given
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(("has_set_threads", "expected"), [(True, "3"), (False, "1")])
def test_threads_of_a_config_count_before_the_users(has_set_threads, expected, monkeypatch):
    given = [("OMP_NUM_THREADS", "1")]
    found = environment_of(monkeypatch, given, has_set_threads=has_set_threads)
    assert found["OMP_NUM_THREADS"] == expected


def test_messages_of_two_threads_arrive_whole(monkeypatch):
    """The training sends messages, and so does the thread that writes checkpoints. A large message
    is sent in two pieces.
    """
    # no agent is there to be missed
    monkeypatch.setattr(AgentLink, "_listen", lambda link: None)
    receiver, up = multiprocessing.Pipe(duplex=False)
    link = AgentLink(up, [RankBeat()], 0, sys.stderr)
    texts = [name * 100_000 for name in "ab"]

    def send(text):
        for _ in range(100):
            link.send(text)

    for text in texts:
        # A message that cannot be read leaves the thread waiting, so it is a daemon.
        threading.Thread(target=send, args=(text,), daemon=True).start()
    received = [receiver.recv() for _ in range(200)]
    assert sorted(received) == [text for text in texts for _ in range(100)]


@pytest.mark.parametrize(
    ("given", "expected"), [("2", 2), ("4,2", 4), ("", 3), ("0", 3), (None, 3)]
)
def test_a_recipes_rank_keeps_the_users_own_number_of_threads(given, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert choose_threads(3) == expected


def test_open_files_are_flushed_and_what_the_server_imported_stays_untouched(tmp_path, monkeypatch):
    with open(tmp_path / "stdout", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        gc.freeze()  # A forked rank does this, too.
        with open(tmp_path / "later", "w") as later:
            for each in (stdout, later):
                each.write("written")
            flush_files()
            assert (tmp_path / "stdout").read_text() == "written"
            assert (tmp_path / "later").read_text() == "written"
    assert gc.get_freeze_count()
