"""Each private name of torch and glibc still helps, and a torch without it is only slower."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

import flyte_ddp
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
from flyte_ddp.rank.optim import build_optimizer
{before}
for name in ("sgd", "adamw"):
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, TrainingConfig(optimizer=name))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("torch._dynamo" in sys.modules)
"""


def test_a_step_does_not_import_the_compiler_and_a_torch_without_these_names_still_steps():
    assert run(TRAIN.format(before="fast_start.avoid_importing_dynamo()")) == ["False"]
    # As a torch without the names. When this prints False, torch no longer needs the trick: remove
    # it.
    renamed = """
from torch.optim import SGD, Adam
for optimizer in (SGD, Adam):
    optimizer.step.__code__ = optimizer.step.__code__.replace(co_name="renamed")
fast_start.avoid_importing_dynamo()
"""
    assert run(TRAIN.format(before=renamed)) == ["True"]


def test_a_rank_that_gets_a_state_from_another_does_not_import_the_compiler(tmp_path):
    def function():
        from torch import distributed

        from flyte_ddp.checkpoints.resharding import assemble
        from flyte_ddp.rank.split_state import function_world

        distributed.init_process_group("gloo")
        world = function_world()
        fast_start.avoid_importing_dynamo()
        weights = torch.arange(6.0).view(2, 3)
        state = assemble(
            [{"file": "memory"}], lambda _: {"weights": weights.t()}, world, readers=[0]
        )
        assert torch.equal(state["weights"], weights.t())
        assert state["weights"].stride() == weights.t().stride()
        found = [name for name in ("torch._dynamo.convert_frame", "sympy") if name in sys.modules]
        (tmp_path / str(world.rank)).write_text(str(found))

    flyte_ddp.run(function, nproc_per_node=2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[]", "[]"]


CHECK = """
import sys
from tests.test_contract import check
check("tests.support.mistakes.Line")
print("sympy" in sys.modules)
"""


def test_the_checks_before_the_first_step_import_no_library_for_symbols():
    assert run(CHECK) == ["False"]


FAULTS = """
import ctypes, resource
from flyte_ddp.launch.process import entry
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
def test_freed_memory_is_kept_unless_the_c_library_has_no_mallopt():
    (kept,) = run(FAULTS.format(before="entry.keep_freed_memory()"))
    (returned,) = run(FAULTS.format(before=""))
    missing = "entry.ctypes = type('', (), {'CDLL': staticmethod(lambda name: object())}); "
    (without,) = run(FAULTS.format(before=missing + "entry.keep_freed_memory()"))

    (returned_again,) = run(
        FAULTS.format(before="entry.keep_freed_memory(); entry.return_freed_memory()")
    )

    assert int(kept) < 1000 < int(returned)  # page faults
    assert int(returned_again) > 1000
    assert int(without) > 1000


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
