"""A recipe for sweeps. Different faults happen to its models."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.support.recipes import FAULTS, NUM_FEATURES, Tiny


@dataclass
class Swept(Tiny):
    """Its inputs contain the class of a sample, so that a model that learns has a lower held-out
    loss.

    Below RECORD there is a file for each worker with the labels of the models that it trained,
    which a rank locks for as long as it lives. It fails where another model's rank has it.
    """

    label: str = ""
    fault: str = "none"  # fault in the third step
    slow_until: str = ""  # a file: until it exists, every step takes a tenth of a second

    num_test = 60

    def prepare(self, source, directory):
        random_state = np.random.RandomState(int(source or 0))
        for name, size in (("train", self.num_train), ("test", self.num_test)):
            inputs = random_state.standard_normal((size, NUM_FEATURES)).astype(np.float32)
            labels = np.stack([inputs[:, :3].argmax(1), np.arange(size)], axis=1)
            np.savez(directory / f"{name}.npz", images=inputs, labels=labels)
        return "samples of the class of their largest feature"

    def datasets(self, directory):
        # The parents are the server of ranks and its supervisor.
        worker = psutil.Process().parent().parent().parent()
        self.record = open(Path(os.environ["RECORD"], str(worker.pid)), "a")  # noqa: SIM115 - for life
        fcntl.flock(self.record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print(self.label, file=self.record, flush=True)
        return super().datasets(directory)

    def losses(self, outputs, targets):
        losses = self.plain_losses(outputs, targets)
        if outputs.requires_grad:
            self._num_steps += 1
            if self.slow_until and not os.path.exists(self.slow_until):
                time.sleep(0.1)
            if self._num_steps == 3:
                losses = FAULTS[self.fault](losses)
        return losses
