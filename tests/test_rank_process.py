"""What a rank's process sets before torch is imported, and what it reports of its end."""

from __future__ import annotations

import os

import pytest

from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank.job import Job, NodeRanks
from flyte_ddp.rank.process import set_environment

NAMES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture
def environment(monkeypatch):
    """An environment without the names that a rank sets, restored afterwards."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        del os.environ[name]
    return monkeypatch


def set_for(**config):
    job = Job("digits", TrainingConfig(**config), "checkpoints", 0.0)
    set_environment(job, NodeRanks(0, 2, 2, "10.0.0.1", 1234, "eth0", use_gpus=False, num_threads=3))
    return tuple(os.environ.get(name) for name in NAMES)


def test_collectives_use_the_interface_of_the_rendezvous(environment):
    assert set_for() == ("3", "eth0", "eth0", None)


def test_an_interface_that_the_user_has_set_is_kept(environment):
    environment.setenv("NCCL_SOCKET_IFNAME", "ib0")
    environment.setenv("GLOO_SOCKET_IFNAME", "bond0")

    assert set_for(deterministic=True) == ("3", "bond0", "ib0", ":4096:8")
