"""Branches that only GPUs take, with stand-ins for what torch.cuda does: they show what is asked
for, and no speed.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.recipes import Recipe
from flyte_ddp.training import ddp, evaluation, fsdp, main, passes
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import World, process_group

GPU = torch.device("cuda", 1)
WORLD = World(1, 2, GPU)


@pytest.fixture
def calls(monkeypatch):
    """The calls of torch.cuda, as (name, argument); each answers with a value of its own."""
    found = []
    answers = {"device_count": 2, "max_memory_allocated": 7 << 20, "get_device_name": "NVIDIA H100"}

    def stand_in(name):
        def call(*arguments):
            found.append((name, *arguments))
            return answers.get(name)

        return call

    for name in ("set_device", "manual_seed", *answers):
        monkeypatch.setattr(torch.cuda, name, stand_in(name))
    return found


@pytest.mark.parametrize(("local_rank", "expected"), [(0, 0), (1, 1), (2, 0)])
def test_a_rank_takes_the_gpu_of_its_number_on_its_node(calls, monkeypatch, local_rank, expected):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    keep_memory = mock.Mock()
    monkeypatch.setattr(fsdp, "keep_freed_memory", keep_memory)
    node = SimpleNamespace(num_threads=1, use_gpus=True, world_size=4)
    process = SimpleNamespace(node=node, rank=local_rank, local_rank=local_rank)
    process.choose_device = functools.partial(RankProcess.choose_device, process)
    world = main.prepare_torch("digits", TrainingConfig(parallel="fsdp"), process).world
    keep_memory.assert_called_once_with(fsdp.RETURNED_BYTES)
    assert world.device == torch.device("cuda", expected)
    assert calls[-1] == ("set_device", world.device)
    assert torch.backends.cudnn.benchmark


def test_draws_on_a_gpu_are_seeded_by_the_step_like_those_on_the_host(calls):
    passes.seed_forward(TrainingConfig(), WORLD, step=3, micro_batch=1)
    assert calls == [("manual_seed", torch.default_generator.initial_seed())]


@pytest.mark.parametrize("backend", ["auto", "nccl", "gloo"])
def test_ranks_on_gpus_meet_over_nccl_each_bound_to_its_gpu(monkeypatch, backend):
    begin = mock.Mock()
    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with process_group(WORLD, backend, None, 60):
        pass
    found = begin.call_args.args[0], begin.call_args.kwargs["device_id"]
    assert found == (("gloo", None) if backend == "gloo" else ("nccl", GPU))


def test_a_replica_on_a_gpu_names_it_and_keeps_the_interval_of_ddps_timing(monkeypatch):
    made = mock.Mock()
    monkeypatch.setattr(ddp, "DistributedDataParallel", made)
    monkeypatch.setattr(ddp, "set_ddp_timing_interval", None)  # a call would be an error
    monkeypatch.setattr(ddp.dist, "broadcast", mock.Mock())  # each type of tensor is broadcast
    ddp.DdpParallelism(Recipe(), TrainingConfig(), WORLD).replicate(nn.Linear(2, 1))
    assert made.call_args.kwargs["device_ids"] == [1]


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", (989, 67)),
        ("NVIDIA H100 PCIe", (756, 51)),
        ("NVIDIA A100-SXM4-40GB", (312, 19.5)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (0, 0)),
        ("NVIDIA L40S", (362, 91.6)),
        ("NVIDIA L4", (121, 30.3)),
        ("Tesla T4", (0, 0)),
    ],
)
def test_the_peak_of_a_gpu_is_looked_up_by_its_name(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = [
        evaluation.peak_flops(TrainingConfig(precision=each), WORLD) / 1e12
        for each in ("bf16", "fp32")
    ]
    assert found == pytest.approx(teraflops)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_forward_pass_in_bf16_is_under_autocast_of_the_gpu(monkeypatch, precision):
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: (kind, dtype))
    found = Parallelism(Recipe(), TrainingConfig(precision=precision), WORLD).autocast()
    assert (
        isinstance(found, nullcontext) if precision == "fp32" else found == ("cuda", torch.bfloat16)
    )
