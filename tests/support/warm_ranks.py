"""Ranks that are forked from a process which has imported torch: 2 s of processor time less for each.

For tests of what ranks compute. How ranks start and end is tested with processes of the real start method, `spawn`.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import SimpleNamespace

import pytest

from flyte_ddp.launch import supervisor

PRELOADED = ["torch", "torch.distributed.fsdp"]


class _WarmProcess(ForkServerProcess):
    """A process with the environment of the moment at which it is started, as any other start method gives it."""

    def start(self):
        self._environment = dict(os.environ)
        super().start()

    def run(self):
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _WarmContext(ForkServerContext):
    Process = _WarmProcess


def use_warm_ranks(patch):
    """Start the ranks of runs on this machine warm, for as long as `patch`, a MonkeyPatch, lasts."""
    context = _WarmContext()
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("STARTED_BY_TEST", raising=False)  # it outlives the test, see the fixture `survivors`
        forkserver.ensure_running()
    patch.setattr(supervisor, "multiprocessing", SimpleNamespace(get_context=lambda method: context))
