"""Measure what a function's own checkpoints cost: `python -m benchmarks.session_state split`; or whole, dcp.

Two ranks have a model of 300 million parameters, or of as many layers of 4 million as are given, and AdamW's two more
numbers for each: 3.6 GB. With `split` FSDP2 splits it over them, and `session.save` saves it; with `whole` each rank
has all of it. `dcp` is the state of `split`, saved and loaded by `torch.distributed.checkpoint`.

Reports of the slower or larger rank: the memory peak of a save and of a load, the time for which a save keeps the
training (`stall`), until it is written, and of a load; and of a plain copy of the rank's own part (`copy`).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_RANKS = 2
NUM_LAYERS, WIDTH = 72, 2048  # 302 million parameters
NUM_SAVES = 3  # that are measured, after one that gets its memory


def measure(kind: str, num_layers: int, directory: str) -> dict[str, float]:
    """Return the measurements, on rank 0. Called by every rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    if kind != "whole":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            own.normal_()
            state = optimizer.state[parameter]
            state["step"] = torch.tensor(1.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.ones_like(parameter), torch.ones_like(parameter)
    if kind == "whole":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    else:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
    save, wait, load = _session(state) if kind != "dcp" else _dcp(state, directory)
    found = _measure_saves(save, wait)
    expected = _sum(state)
    if dist.get_rank() == 0:
        read_files(Path(directory).parent)
    reset_peak()
    dist.barrier()
    started = time.perf_counter()
    load()
    found["load_seconds"] = time.perf_counter() - started
    found["load_memory_bytes"] = peak()
    assert _sum(state) == expected, "what was loaded is not what was saved"
    found["copy_seconds"] = _copy(state)
    dist.barrier()
    everywhere: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(everywhere, found)
    return {name: max(each[name] for each in everywhere) for name in found}


def _measure_saves(save: Callable[[int], None], wait: Callable[[], None]) -> dict[str, float]:
    import torch.distributed as dist

    stalls, seconds = [], []
    for step in range(1 + NUM_SAVES):
        reset_peak()
        dist.barrier()
        started = time.perf_counter()
        save(step + 1)
        stalls.append(time.perf_counter() - started)
        wait()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return {
        "stall_seconds": statistics.median(stalls[1:]),
        "save_seconds": statistics.median(seconds[1:]),
        "save_memory_bytes": peak(),
    }


def _session(state: dict[str, Any]) -> tuple[Callable[[int], None], Callable[[], None], Callable[[], Any]]:
    from flyte_ddp import session

    return lambda step: session.save(state, step), session.current().wait, lambda: session.load(into=state)


def _dcp(state: dict[str, Any], directory: str) -> tuple[Callable[[int], None], Callable[[], None], Callable[[], Any]]:
    import shutil

    import torch.distributed as dist
    from torch.distributed import checkpoint

    writing: list[Any] = []

    def save(step: int) -> None:
        writing.append(checkpoint.async_save(state, checkpoint_id=f"{directory}/{step}", no_dist=False))

    def wait() -> None:
        writing[-1].result()
        if dist.get_rank() == 0 and len(writing) > 2:  # as many stay as with a session
            shutil.rmtree(f"{directory}/{len(writing) - 2}")

    return save, wait, lambda: checkpoint.load(state, checkpoint_id=f"{directory}/{len(writing)}")


def _tensors(state: Any) -> list[Any]:
    import torch

    from flyte_ddp.checkpoints.resharding import find_tensors

    found = [each.to_local() if hasattr(each, "to_local") else each for _, each in find_tensors(state)]
    return [each for each in found if isinstance(each, torch.Tensor)]


def _copy(state: Any) -> float:
    """Return the median seconds of a copy of this rank's own part into memory that was written to before."""
    import torch
    import torch.distributed as dist

    tensors = _tensors(state)
    buffers = [torch.empty_like(each) for each in tensors]
    seconds = []
    for _ in range(1 + NUM_SAVES):
        dist.barrier()
        started = time.perf_counter()
        for buffer, each in zip(buffers, tensors, strict=True):
            buffer.copy_(each)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _sum(state: Any) -> float:
    """Return a sum of the state, and set its tensors to 0."""
    total = 0.0
    for each in _tensors(state):
        total += float(each.double().sum())
        each.detach().zero_()
    return total


def read_files(directory: Path) -> None:
    """Have the files below `directory` in the system's cache: what a disk adds is the same for whoever reads them."""
    for file in directory.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                while opened.read(1 << 24):
                    pass


def reset_peak() -> None:
    """Begin anew to note the memory peak of this process. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the largest memory of this process since `reset_peak`, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main(kind: str, num_layers: str = str(NUM_LAYERS)) -> None:
    import flyte_ddp

    with tempfile.TemporaryDirectory() as directory:
        started = time.time()
        found = flyte_ddp.run(
            measure,
            kind,
            int(num_layers),
            f"{directory}/dcp",
            nproc_per_node=NUM_RANKS,
            checkpoints=f"{directory}/checkpoints",
        )
    print(json.dumps({"first_step_at": started, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
