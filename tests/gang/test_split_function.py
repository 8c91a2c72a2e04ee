"""A function's split state: each rank writes its part, and any number of ranks reads it, over any
mesh.
"""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flyte_ddp
from flyte_ddp import session
from flyte_ddp.errors import ConfigError
from tests.support.runs import fork_functions


@pytest.fixture(scope="module", autouse=True)
def forked():
    with pytest.MonkeyPatch.context() as patch:
        fork_functions(patch)
        yield


class Model(nn.Module):
    """With rows that 2 and 3 ranks do not share evenly, and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 8), nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, batch):
        return self.scale * self.outer(self.inner(batch).relu())


def build(mesh_shape):
    """A model that is split over a mesh of one dimension by FSDP2, of two also by tensor
    parallelism.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Model()
    names = ("data", "tensor")[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    if len(mesh_shape) == 2:
        parallelize_module(
            model, mesh["tensor"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
        )
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def whole(state):
    """{name: values} of the nested tensors, gathered."""
    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in whole(value).items()}
        elif isinstance(value, torch.Tensor):
            found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
    return found


def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def train_and_save(mesh_shape):
    model, optimizer = build(mesh_shape)
    for step in range(3):
        model(
            torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.save(state_of(model, optimizer) | {"note": "kept"}, step + 1)
    return whole(state_of(model, optimizer))


def load_into(mesh_shape):
    model, optimizer = build(mesh_shape)
    state = state_of(model, optimizer) | {"note": ""}
    loaded = session.load(into=state)
    assert loaded["note"] == "kept"
    assert loaded["model"]["inner.weight"] is state["model"]["inner.weight"]
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    return whole(state_of(model, optimizer))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{mesh: (place, whole state)} of checkpoints that several meshes have written."""

    @functools.cache
    def save(mesh_shape):
        place = str(tmp_path_factory.mktemp("split"))
        return place, flyte_ddp.run(
            train_and_save, mesh_shape, nproc_per_node=num_ranks(mesh_shape), checkpoints=place
        )

    return save


def num_ranks(mesh_shape):
    return functools.reduce(int.__mul__, mesh_shape)


@pytest.mark.long
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ((2,), (3,)),
        pytest.param((2, 2), (1,), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_number_of_ranks_reads_what_any_other_has_written(written, read, saved):
    place, expected = saved(written)
    found = flyte_ddp.run(load_into, read, nproc_per_node=num_ranks(read), checkpoints=place)
    assert found == expected
    assert any("exp_avg" in name for name in found)


def save_both(place):
    """A whole state of rank 0, then split ones."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    if dist.get_rank() == 0:
        session.save({"rows": torch.arange(8.0).view(4, 2)}, 0)
    part = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    session.load(into={"rows": part})
    assert part.to_local().flatten().tolist() == [4 * dist.get_rank() + n for n in range(4)]
    for step in (20, 30):
        session.save(
            {"rows": distribute_tensor(torch.full((4, 2), float(step)), mesh, [Shard(0)])}, step
        )
    session.current().saver.wait()


def test_a_whole_state_is_loaded_in_parts_and_split_ones_after_it_are_of_one_step(tmp_path):
    flyte_ddp.run(save_both, "", nproc_per_node=2, checkpoints=str(tmp_path))
    # the whole one, if it stayed
    manifests = {*tmp_path.glob("step-*.json")} - {tmp_path / "step-0000000000.json"}
    for manifest in manifests:
        files = [tmp_path / each["file"] for each in json.loads(manifest.read_text())["files"]]
        values = {
            float(part.mean())
            for file in files
            for _, _, part in torch.load(file, weights_only=True)["pieces"]
        }
        assert values <= {float(manifest.stem.removeprefix("step-"))}, manifest.name
    assert (tmp_path / "step-0000000030.json").exists()


def load_whole():
    state = session.load()
    assert all(type(each) is torch.Tensor for each in state["model"].values())
    return whole(state)


def test_without_into_the_tensors_are_whole(saved):
    place, expected = saved((2,))
    assert flyte_ddp.run(load_whole, nproc_per_node=1, checkpoints=place) == expected


def misuse():
    """Return the messages of wrong calls. The other rank does not make the last call."""
    dist.init_process_group("gloo")
    mesh, rank, messages = init_device_mesh("cpu", (2,)), dist.get_rank(), []

    def state(size=4, **others):
        return {
            "weights": {"a": distribute_tensor(torch.ones(size, 2), mesh, [Shard(0)])},
            **others,
        }

    calls = [
        lambda: session.save(state(), 1 + rank),
        lambda: session.save(state(), 1, in_memory=rank == 0),
        lambda: session.save(state(**({"extra": torch.ones(1)} if rank else {})), 1),
        lambda: session.save({"weights": torch.ones(1)}, 2),
        lambda: session.load(into=state(6, note="")),
        lambda: session.load(into=state()),
        lambda: session.save(first, 3) if rank == 0 else None,
    ]
    first = state(note="x")
    session.save(first, 1)
    session.current().saver.wait()
    for call in calls:
        try:
            call()
        except ConfigError as error:
            messages.append(str(error))
    return messages


@pytest.mark.long
def test_a_wrong_call_is_one_line_and_no_hang(tmp_path):
    messages = flyte_ddp.run(
        misuse, nproc_per_node=2, checkpoints=str(tmp_path), stall_timeout=24.0
    )
    expected = [
        "session.save: step: expected 1 on all ranks, as on rank 0, got 2 on rank 1",
        "session.save: in_memory: expected True on all ranks, as on rank 0, got False on rank 1",
        (
            r"session.save: state: \('extra',\): expected no tensor on all ranks, .*, got a tensor "
            r"\(1,\) of .* on rank 1"
        ),
        "session.save: state: expected split tensors, as in the saves before, got none",
        (
            r"session.load: into\['weights'\]\['a'\]: expected a tensor of shape \(4, 2\), .*, got "
            r"\(6, 2\)"
        ),
        "session.load: into: expected the same keys, only the checkpoint has 'note'",
        "session.save: expected a call on every rank, .*, got none on rank 1 for 12 s, at step 3",
    ]
    assert len(messages) == len(expected), messages
    for message, pattern in zip(messages, expected, strict=True):
        assert re.fullmatch(pattern, message), message


def outcome_of(state, step):
    """Return what `session.save` says of a state; of one that is saved, whether each rank loads its
    own values.
    """
    try:
        session.save(state, step)
    except ConfigError as error:
        return str(error)
    session.current().saver.wait()
    dist.barrier()
    own = {key: each.to_local().clone() for key, each in state.items()}
    for each in state.values():
        each.to_local().fill_(-1)
    session.load(into=state)
    return all(torch.equal(state[key].to_local(), each) for key, each in own.items())


def save_on_parts_of_the_ranks():
    """Return each rank's {case: outcome} of tensors that are split over a part of the ranks."""
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage, data = rank // 2, mesh["data"]
    rows, one_of_many = torch.arange(12.0).view(4, 3), torch.ones(400)
    one_of_many[7] += stage
    torch.manual_seed(stage)
    model = fully_shard(nn.Linear(6, 4), mesh=data)
    lower, everyone = DeviceMesh("cpu", [0, 1]), init_device_mesh("cpu", (4,))
    part, placements = (torch.ones(1, 4), [Shard(0)]) if stage else (torch.ones(4, 1), [Shard(1)])
    crossed = DTensor.from_local(
        part, everyone, placements, run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
    )
    cases = {
        "stages": model.state_dict(),
        "stages, of one rank each": {
            "w": distribute_tensor(rows + rank, mesh["stage"], [Replicate()])
        },
        "a copy for each group": {"w": distribute_tensor(rows + stage, data, [Replicate()])},
        "a number for each group": {
            "w": distribute_tensor(torch.tensor(1.0 + stage), data, [Replicate()])
        },
        "one value of many": {"w": distribute_tensor(one_of_many, data, [Shard(0)])},
        "equal groups": {"w": distribute_tensor(rows, data, [Shard(0)])},
        "equal groups in bf16": {"w": distribute_tensor(rows.bfloat16().t(), data, [Shard(0)])},
        "hybrid shards": {"w": distribute_tensor(rows, mesh, [Replicate(), Shard(0)])},
        "some of the ranks": {"w": distribute_tensor(rows, lower, [Shard(0)])},
        "rows here, columns there": {"w": crossed},
    }
    for case in cases.values():
        for each in case.values():
            each.requires_grad_(False)
    found = [None] * 4
    dist.all_gather_object(
        found, {name: outcome_of(case, step) for step, (name, case) in enumerate(cases.items(), 1)}
    )
    return found


OTHER_VALUES = (
    "state: {}: expected one tensor, got other values on rank {} than on rank 0 for "
    "the same part of it; .*"
)
OUTCOMES = {
    "stages": OTHER_VALUES.format(r"\('weight',\)", 2),
    "stages, of one rank each": OTHER_VALUES.format(r"\('w',\)", 1),
    "a copy for each group": OTHER_VALUES.format(r"\('w',\)", 2),
    "a number for each group": OTHER_VALUES.format(r"\('w',\)", 2),
    "one value of many": OTHER_VALUES.format(r"\('w',\)", 2),
    "equal groups": True,
    "equal groups in bf16": True,
    "hybrid shards": True,
    "some of the ranks": True,
    "rows here, columns there": (
        r"state: \('w',\): expected .*Shard\(dim=1\).*, got "
        r".*Shard\(dim=0\).* on rank 2"
    ),
}


@pytest.mark.long
def test_a_tensor_split_over_a_part_of_the_ranks_comes_back_to_each_or_is_refused(tmp_path):
    ranks = flyte_ddp.run(save_on_parts_of_the_ranks, nproc_per_node=4, checkpoints=str(tmp_path))
    for found in ranks:
        assert found.keys() == OUTCOMES.keys()
        for case, expected in OUTCOMES.items():
            is_refused = isinstance(found[case], str)
            assert (
                re.fullmatch(f"session.save: {expected}", found[case])
                if is_refused
                else found[case] is expected
            ), case
