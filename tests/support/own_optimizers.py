"""Recipes with optimizers of other forms than torch's."""

from __future__ import annotations

import torch
from torch.optim import Adam, Optimizer

from tests.support.recipes import Tiny


class Slow(Optimizer):
    """An Adam that goes back half of the way to slow weights after each second step. Its state has
    a form of its own.
    """

    def __init__(self, parameters, lr, **options):
        self.inner = Adam(parameters, lr, **options)
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.state, self.count = self.inner.state, 0
        self.slow = [each.detach().clone() for each in self.parameters()]

    def parameters(self):
        return [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, each in zip(self.slow, self.parameters(), strict=True):
                each.copy_(slow.lerp_(each.detach(), 0.5))

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.slow = [each.clone() for each in state["slow"]]
        self.count = state["count"]


class LookAhead(Tiny):
    def optimizer(self, model, config):
        return Slow(model.parameters(), 0.01)


class FreeSgd(Optimizer):
    """The optimizer of "The Road Less Scheduled" (Defazio et al., 2024), which evaluates an average
    of the weights that it trains at.
    """

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "trains": False})

    @torch.no_grad()
    def _switch(self, trains, weight_of):
        for group in self.param_groups:
            for each in group["params"] if group["trains"] is not trains else ():
                if "z" in self.state[each]:
                    each.lerp_(self.state[each]["z"], weight_of(group["beta"]))
            group["trains"] = trains

    def train(self):
        self._switch(True, lambda beta: 1 - beta)

    def eval(self):
        self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("the optimizer was not in train mode")
            group["k"] += 1
            share, beta, rate = 1 / group["k"], group["beta"], group["lr"]
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.detach().clone())
                each.lerp_(z, share)
                each.add_(each.grad, alpha=rate * (beta * (1 - share) - 1))
                z.sub_(each.grad, alpha=rate)


class ScheduleFree(Tiny):
    def optimizer(self, model, config):
        return FreeSgd(model.parameters(), config.learning_rate)


class Spectral(torch.nn.Module):
    """A filter with complex weights."""

    def __init__(self):
        super().__init__()
        self.filter = torch.nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.last = torch.nn.Linear(8, 3)

    def forward(self, inputs):
        return self.last(torch.fft.irfft(torch.fft.rfft(inputs) * self.filter, 8))


class Complex(Tiny):
    def model(self):
        return Spectral()
