"""A recipe with BatchNorm and momentum. Its ranks are lost one after the other, where a test orders
it.

An order is a file in a directory that all ranks see, such as `2-backward-0-4`: of the orders that
are left the first by name counts. It comes to rank 0 in its fourth step since the start of its
process, or in a later one. At "read" it is about to read the state that the run goes on from; with
"node" at the end of that name, its node is lost there.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.recipes import Normed

PACE = 0.02  # seconds of a step while a loss is to come


@dataclass
class Bereaved(Normed):
    orders: str = ""  # directory

    _num_steps = 0

    def model(self):
        self.meet_in_hand_over()
        return super().model()

    def meet_in_hand_over(self):
        from flyte_ddp.rank import states

        read = states.assemble

        def assemble(*arguments):
            self.meet("read")
            return read(*arguments)

        states.assemble = assemble

    def generate_sample(self, model):
        return "a sample"

    def losses(self, outputs, targets):
        losses = self.plain_losses(outputs, targets)
        if not outputs.requires_grad:
            return losses
        self._num_steps += 1
        self.meet("hold")
        self.meet("forward")
        self.meet("worker")
        losses.register_hook(lambda gradient: self.meet("backward"))
        return losses

    def meet(self, place):
        import torch.distributed as dist

        orders = sorted(Path(self.orders).iterdir()) if self.orders else []
        if not orders:
            return
        time.sleep(PACE / 2)
        wait_for_copies()
        _, where, rank, num_steps = orders[0].name.split("-")
        if (
            where not in (place, f"{place}node")
            or int(rank) != dist.get_rank()
            or self._num_steps < int(num_steps)
        ):
            return
        if place == "hold":  # The rank waits here until the order changes.
            while orders[0].exists():
                time.sleep(PACE)
            return
        orders[0].unlink()
        is_node = place == "worker" or where != place
        os.kill(worker_above() if is_node else os.getpid(), signal.SIGKILL)
        # No step follows. The supervisor notices that its worker is gone and ends this rank.
        time.sleep(600)


def wait_for_copies(seconds=60):
    """Wait until this rank's newest part of a state in memory is where it has to be: that takes
    long on busy cores.
    """
    from flyte_ddp import session

    store = session.is_in_run() and session.current().saver._store
    slots = store and store.memory.slots
    deadline = time.monotonic() + seconds  # the other node may be gone
    while slots and slots._files and not slots.is_ready and time.monotonic() < deadline:
        time.sleep(0.005)


def worker_above():
    """The Dask worker that has started the supervisor of this rank."""
    import psutil

    above = psutil.Process().parents()
    agent = "flyte_ddp.launch.agent.main"
    return next(each.ppid() for each in above if agent in str(each.cmdline()))
