"""Each private name of torch and glibc still helps, and a torch without it is only slower."""

from __future__ import annotations

import subprocess
import sys
import types
from datetime import timedelta

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from flyte_ddp.rank import fast_start


def run(program):
    """Return the output of `program`, run in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


TRAIN = """
import sys, torch
from torch import nn
from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank import fast_start
from flyte_ddp.training.optim import build_optimizer
{before}
for name in ("sgd", "adamw"):
    model = nn.Linear(2, 2)
    groups = [dict(params=list(model.parameters()))]
    optimizer = build_optimizer(model, TrainingConfig(optimizer=name), groups)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
# optimizers that a recipe makes itself
for kind in (torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Muon, torch.optim.RMSprop):
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([weight])
    weight.sum().backward()
    optimizer.step()
    assert not torch.equal(weight, torch.ones(2, 2))
print("torch._dynamo" in sys.modules)
"""
CHECK = """
from flyte_ddp.checkpoints.assembly import assemble
from flyte_ddp.checkpoints.state import collect
from flyte_ddp.world import ALONE
from tests.training.test_contract import check
part = collect({"weights": torch.ones(3, 2).t()})
assemble([{"file": "memory"}], lambda _: part, ALONE, is_mapped=True)
check()
print("sympy" in sys.modules)
"""


@pytest.mark.long
def test_a_step_does_not_import_the_compiler_and_a_torch_without_these_names_still_steps():
    before = "fast_start.avoid_importing_dynamo()"
    # A state in memory and the checks before the first step do not import a library for symbols
    # either.
    assert run(TRAIN.format(before=before) + CHECK) == ["False", "False"]
    # This stands for a torch without the names. When it prints False, torch no longer needs the
    # trick: remove it.
    renamed = """
from torch.optim import SGD, Adam
for optimizer in (SGD, Adam):
    optimizer.step.__code__ = optimizer.step.__code__.replace(co_name="renamed")
fast_start.avoid_importing_dynamo()
"""
    assert run(TRAIN.format(before=renamed)) == ["True"]


FAULTS = """
import ctypes, resource
from flyte_ddp.rank import entry
{before}
import numpy
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [numpy.ones(300_000) for _ in range(10)]  # 2.4 MB each: above glibc's first threshold
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""  # noqa: E501


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.long
def test_freed_memory_is_kept_unless_the_c_library_has_no_mallopt():
    missing = "entry.ctypes = type('', (), {'CDLL': staticmethod(lambda name: object())}); "
    programs = {
        "": False,
        "entry.keep_freed_memory()": True,
        missing + "entry.keep_freed_memory()": False,
        "entry.keep_freed_memory(); entry.keep_freed_memory(entry.RETURNED_BYTES)": False,
    }
    num_faults = {before: int(*run(FAULTS.format(before=before))) for before in programs}
    assert {before: number < 1000 for before, number in num_faults.items()} == programs


def test_compilations_are_announced_if_torch_has_the_hooks(monkeypatch):
    calls = []
    fast_start.call_around_compilations(lambda: calls.append("start"), lambda: calls.append("end"))
    torch.compile(lambda inputs: inputs * 3, backend="eager")(torch.zeros(2))
    assert calls == ["start", "end"]

    monkeypatch.setitem(
        sys.modules, "torch._dynamo.callback", types.ModuleType("torch._dynamo.callback")
    )
    fast_start.call_around_compilations(lambda: calls.append("start"), lambda: calls.append("end"))
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", None)
    fast_start.call_around_compilations(lambda: calls.append("start"), lambda: calls.append("end"))


def test_the_exchange_of_gradients_is_timed_by_names_that_ddp_still_has():
    from torch.nn.parallel import DistributedDataParallel

    assert callable(DistributedDataParallel._set_ddp_runtime_logging_sample_rate)
    assert callable(DistributedDataParallel._get_ddp_logging_data)
    timed = types.SimpleNamespace(
        _get_ddp_logging_data=lambda: {
            "avg_backward_comm_time": 3e9,
            "avg_backward_compute_comm_overlap_time": 1e9,
        }
    )
    assert fast_start.ddp_exchange_seconds(timed) == (3.0, 1.0)
    assert fast_start.ddp_exchange_seconds(types.SimpleNamespace(_orig_mod=timed)) == (3.0, 1.0)
    assert fast_start.ddp_exchange_seconds(object()) is None
    fast_start.set_ddp_timing_interval(object(), 10)
    assert callable(DistributedDataParallel._check_reducer_finalized)
    assert fast_start.has_all_gradients(object())


@pytest.fixture
def group():
    """The default group, of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    yield torch.distributed
    torch.distributed.destroy_process_group()


WAITS = """
import torch, torch.distributed as dist
from flyte_ddp.rank import fast_start
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
waits = []
{before}
fast_start.time_waits(waits.append)
fast_start.time_waits(waits.append)  # once in a process
dist.all_reduce(torch.ones(1))
print(len(waits))
"""


@pytest.mark.parametrize(("before", "num_waits"), [("", "1"), ("del dist.Work", "0")])
@pytest.mark.long
def test_waits_are_timed_if_torch_has_their_class(before, num_waits):
    assert run(WAITS.format(before=before)) == [num_waits]


def test_the_timeout_of_a_group_is_read_if_torch_shows_it(group, monkeypatch):
    assert fast_start.group_timeout(torch.device("cpu")) == timedelta(seconds=77)
    monkeypatch.delattr(type(group.group.WORLD), "_get_backend")
    assert fast_start.group_timeout(torch.device("cpu")) == timedelta.max


def test_the_whole_mesh_is_found_if_torch_shows_it(group, monkeypatch):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    part = mesh["tp"]
    assert fast_start.find_root_mesh(part) == mesh
    monkeypatch.delattr(type(mesh), "_get_root_mesh")
    assert fast_start.find_root_mesh(part) is None


WITHOUT_BATCH_NORM = """
import torch
from torch import nn
from torch.nn.modules import batchnorm
del batchnorm._BatchNorm
from flyte_ddp.training.batch_norm import keep_frozen_statistics
model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).requires_grad_(False)
keep_frozen_statistics(model)
print(*(each.training for each in model))
"""


@pytest.mark.long
def test_the_layers_of_batch_norm_are_known_without_the_name_of_their_class():
    assert run(WITHOUT_BATCH_NORM) == ["False", "True"]
