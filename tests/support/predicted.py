"""Recipes whose trained models predict, in processes that import them by their names."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.recipes.digits import Digits


@dataclass(frozen=True)
class Mortal(Digits):
    """Kills the process of its first prediction if there is a file `kills`."""

    kills: str = ""
    changeable_options = ("kills",)

    def prediction_columns(self, outputs):
        if self.kills and Path(self.kills).exists():
            Path(self.kills).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prediction_columns(outputs)


@dataclass(frozen=True)
class Sized(Digits):
    """Its model has an option."""

    width: int = 4

    def model(self):
        from torch import nn

        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.width))


class Slow(Digits):
    """A batch takes a second."""

    def prediction_columns(self, outputs):
        time.sleep(1)
        return super().prediction_columns(outputs)
