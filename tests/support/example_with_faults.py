"""The example with all of a recipe's own methods, and with the faults of `recipes`."""

from __future__ import annotations

from examples.recipes import pulses
from tests.support.recipes import Faulty


class Pulses(Faulty, pulses.Pulses):
    def losses(self, outputs, targets):
        losses = super().losses(outputs, targets)
        return self.meet_fault(losses) if outputs.requires_grad else losses
