"""A run with its checks and its looks at the model ends in the state of a plain loop, whatever the
model keeps.
"""

from __future__ import annotations

import copy
import os
import random
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from flyte_ddp.rank.data import SeededDataset
from flyte_ddp.rank.nested import collate
from flyte_ddp.rank.plan import epoch_order
from flyte_ddp.rank.snapshot import unchanged
from flyte_ddp.recipes import config_of
from flyte_ddp.training.contract import check_contract
from flyte_ddp.training.inspection import make_predictions
from flyte_ddp.training.main import describe_run
from flyte_ddp.training.passes import seed_forward
from flyte_ddp.world import ALONE
from tests.support.mistakes import Line
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

CONFIG = {
    "epochs": 2,
    "global_batch_size": 20,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "schedule": "constant",
}
NUM_STEPS = 4  # steps of 40 samples


class Slots:
    __slots__ = ("value",)


class Plain(nn.Module):
    """A line that does nothing besides."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.dropout = nn.Dropout(0.5)
        self.lock = threading.Lock()
        self.count = 0
        self.start()

    def start(self):
        pass

    def keep(self, outputs):
        return outputs

    def values(self):
        return [self.count]

    def forward(self, inputs):
        outputs = self.line(inputs).flatten()
        if self.training:
            self.count += 1
            outputs = self.keep(outputs)
        return outputs


def moved(value):
    return value * 0.9 + 0.1


class Keeping(Plain):
    """Keeps something of each pass of the training in every kind of attribute."""

    def start(self):
        self.register_buffer("target", torch.zeros(()))
        self.parameter = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.tensor, self.array, self.history = torch.zeros(()), numpy.zeros(1), [torch.zeros(1)]
        self.slots, self.space = Slots(), SimpleNamespace(count=0)
        self.slots.value = 0

    def keep(self, outputs):
        self.target.mul_(0.9).add_(0.1)
        self.parameter.data = moved(self.parameter.data)
        self.tensor.copy_(moved(self.tensor))
        self.array[:] = moved(self.array)
        self.history.append(outputs.detach().mean())
        self.slots.value += 1
        self.space.count += 1
        return outputs + self.target

    def values(self):
        targets = [self.target, self.parameter, self.tensor, self.array[0]]
        counts = [self.slots.value, self.space.count, self.count, len(self.history) - 1]
        return [*(round(float(each), 4) for each in targets), *counts]


class Hidden(Plain):
    """A state of each sample of the batch, which other batches do not fit."""

    kept = None

    def keep(self, outputs):
        outputs = outputs if self.kept is None else outputs + 0.1 * self.kept
        self.kept = outputs.detach()
        return outputs

    def values(self):
        return [len(self.kept)]


class Noise(Plain):
    """Draws from every generator there is."""

    def start(self):
        self.own = [random.Random(0), numpy.random.default_rng(0), numpy.random.RandomState(0)]
        self.torch_own = torch.Generator().manual_seed(0)

    def keep(self, outputs):
        noise = random.random() + numpy.random.rand() + sum(each.random() for each in self.own)
        return self.dropout(outputs) + noise + torch.rand((), generator=self.torch_own)


def halve(parameter):
    parameter.grad.mul_(0.5)


class Hooks(Plain):
    """Each pass adds hooks, by which outputs and gradients shrink from pass to pass. One refers to
    the module, which a copy would leave out.
    """

    def start(self):
        self.kept = {}
        self.line.register_forward_hook(
            lambda module, inputs, outputs: self.kept.update(features=outputs)
        )

    def keep(self, outputs):
        self.line.weight.register_hook(lambda gradient: gradient * 0.5)
        self.line.bias.register_post_accumulate_grad_hook(halve)
        self.line.register_forward_hook(lambda module, inputs, outputs: outputs * 0.9)
        return outputs + 0 * self.kept.pop("features").sum()

    def values(self):
        return [
            self.count,
            len(self.line.weight._backward_hooks),
            len(self.line._forward_hooks) - 1,
        ]


class Freezes(Plain):
    """Trains its bias in the first two passes alone, and puts its dropout out after the third."""

    def keep(self, outputs):
        self.line.bias.requires_grad_(self.count < 2)
        self.dropout.train(self.count < 3)
        return self.dropout(outputs)


VALUES = {Hidden: [20], Keeping: [0.3439] * 4 + [NUM_STEPS] * 4, Hooks: [NUM_STEPS] * 3}
OF_A_NODE = SimpleNamespace(node=SimpleNamespace(num_threads=1))


class KeptLine(Line):
    """Counts its calls too, and so do its samples."""

    kind = Plain
    count = num_inputs = 0

    def datasets(self, directory):
        train, test = super().datasets(directory)
        return Counting(train), Counting(test)

    def model(self):
        return self.kind()

    def inputs(self, batch):
        self.num_inputs += 1
        return batch

    def losses(self, outputs, targets):
        self.count += outputs.requires_grad
        return super().losses(outputs, targets)


class Counting(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples, self.count = samples, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.count += 1
        return self.samples[index]


def plain_loop(recipe, config):
    """Train as a loop without checks, reports and predictions does, and return the model and the
    training samples.
    """
    train, test = recipe.datasets(None)
    torch.manual_seed(config.seed)
    model = recipe.model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.learning_rate, momentum=config.momentum, fused=True
    )
    seeded, step = SeededDataset(train, config.seed), 0
    for epoch in (1, 2):
        model.train()
        for order in epoch_order(len(train), config.seed, epoch).split(config.global_batch_size):
            places = [(epoch, index) for index in order.tolist()]
            (inputs, targets), _ = seeded.__getitems__(places)
            optimizer.zero_grad()
            seed_forward(config, ALONE, step, 0)
            (
                recipe.losses(model(recipe.inputs(inputs)), targets).sum() * (1 / len(order))
            ).backward()
            optimizer.step()
            step += 1
        model.eval()
        with torch.no_grad():
            inputs, targets = collate([test[index] for index in range(len(test))])
            recipe.losses(model(recipe.inputs(inputs)), targets)
    return model, train


@pytest.mark.parametrize(
    "kind", [Keeping, Hidden, Noise, Hooks, Freezes], ids=lambda kind: kind.__name__
)
def test_a_run_ends_as_a_plain_loop_does(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(KeptLine, "kind", kind)
    plain_recipe = KeptLine()
    config = config_of("tests.training.test_snapshot.KeptLine", CONFIG)
    plain, plain_samples = plain_loop(plain_recipe, config)
    plain_values = plain.values()

    trainer = new_trainer(new_run(tmp_path, "tests.training.test_snapshot.KeptLine"), **CONFIG)
    recipe, model = trainer.parallelism.recipe, trainer.state.model
    check_contract(model, trainer.train, trainer.parallelism)
    data = dict.fromkeys(("description", "fingerprint", "recipe_version", "license"), "")
    assert next(layer.name for layer in describe_run(trainer, data, OF_A_NODE)["layers"]) == "line"
    recipe.generate_sample = lambda model: str(model.train()(torch.ones(1, 1)))
    trainer.fit()
    make_predictions(model, trainer.test, trainer.parallelism)

    assert plain_values == VALUES.get(kind, [NUM_STEPS])
    assert model.values() == plain_values
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert (recipe.count, recipe.num_inputs) == (plain_recipe.count, plain_recipe.num_inputs)
    assert trainer.train.dataset.count == plain_samples.count == 80


class Anything(nn.Module):
    """Keeps, and changes in each pass, what has no copy, no bytes or no plain contents."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4)
        self.file = open(os.devnull)  # noqa: SIM115 - it stays open
        self.hidden, self.reference, self.iterator = (
            None,
            weakref.ref(self),
            (letter for letter in "ab"),
        )
        self.last, self.bytes, self.set, self.many = (
            deque(maxlen=3),
            bytearray(b"a"),
            {1},
            list(range(20_000)),
        )
        self.defaults, self.counter, self.ordered = (
            defaultdict(int),
            Counter(),
            OrderedDict(a=1, b=2),
        )
        self.optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1, momentum=0.9)
        self.sparse, self.conjugate = (
            torch.eye(3).to_sparse(),
            torch.zeros(3, dtype=torch.complex64).conj(),
        )
        self.nested, self.view, self.weights = (
            ([torch.zeros(2)], [1]),
            self.rnn.weight_ih_l0.data[0],
            nn.ParameterList([]),
        )
        self.register_buffer("missing", torch.tensor(torch.nan))
        self.register_buffer("expanded", torch.zeros(1).expand(3))

    def forward(self, inputs):
        outputs, hidden = self.rnn(inputs, self.hidden)
        self.hidden = [each.detach() for each in hidden]
        for container in (self.last, self.bytes, self.many, self.nested[1]):
            container.append(2)
        self.set.add(2)
        self.defaults["new"] += 1
        self.counter["new"] += 1
        self.ordered.move_to_end("a")
        self.nested[0][0].add_(1)
        self.view.add_(1)
        self.optimizer.param_groups[0]["lr"] /= 2
        self.optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        self.optimizer.step()
        self.sparse = self.sparse * 2
        self.new = self.extra = nn.Linear(2, 2)
        self.weights.append(nn.Parameter(torch.zeros(1)))
        del self.iterator
        return outputs

    def contents(self):
        plain = [
            self.hidden,
            self.last,
            self.bytes,
            self.set,
            self.many,
            self.defaults,
            self.counter,
            [*self.ordered],
        ]
        group = self.optimizer.param_groups[0]
        numbers = [
            *self.rnn.parameters(),
            self.nested[0][0],
            self.sparse.to_dense(),
            *group["params"],
        ]
        names = [
            *vars(self),
            *vars(self)["_modules"],
            len(self.weights),
            len(self.optimizer.state),
            group["lr"],
        ]
        return copy.deepcopy([*plain, self.nested[1], [each.tolist() for each in numbers], names])


def test_what_has_no_copy_is_put_back_too():
    model = Anything()
    before = model.contents()
    for _ in range(2):
        with unchanged(model):
            model(torch.ones(2, 1, 3))
            assert model.contents() != before
        assert model.contents() == before
    model.file.close()
