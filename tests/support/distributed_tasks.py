"""Tasks of a user's own, as their module has them: the cases of flytekit-kf-pytorch's
tests/test_elastic_task.py.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import flytekit
import pandas as pd
import torch
import torch.distributed as dist
from flytekit import Deck, dynamic, map_task, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp import session
from flyte_ddp.flytekit_plugin import Distributed


@dataclass
class Config:
    lr: float = 1e-5
    bs: int = 64
    name: str = "foo"


def all_reduced() -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor([5], dtype=torch.int64) + 2 * rank + world_size
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return int(tensor.item())


def wait_for_file(file: str) -> None:
    while not os.path.exists(file):
        time.sleep(0.05)


EXPECTED_SUM = sum(5 + 2 * rank + 2 for rank in range(2))


@task(
    task_config=Distributed(nnodes=1, nproc_per_node=2, max_restarts=1, start_method="fork"),
    environment={"OWN_VARIABLE": "own"},
    enable_deck=True,
)
def train(
    config: Config, text: FlyteFile
) -> tuple[str, Config, int, FlyteFile, FlyteDirectory, pd.DataFrame]:
    dist.init_process_group()
    rank = os.environ["RANK"]
    state = session.load()
    if state is None:
        session.save({"seen": rank}, step=3)
        if rank == "0":
            session.report(step=3, loss=0.5)
    result = all_reduced()
    if state is None:
        if rank == "1":
            wait_for_file(f"{session.checkpoints}/step-0000000003.json")
            os.kill(os.getpid(), 9)
        dist.barrier()  # never passed
    assert state is not None
    Deck("mine", f"<b>the Deck of rank {rank}</b>")
    names = ("OWN_VARIABLE", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    with open(text) as file:
        lines = [
            file.read(),
            f"seen {state['seen']}",
            *(f"{name}={os.environ[name]}" for name in names),
        ]
    directory = os.path.join(flytekit.current_context().working_directory, f"out-{rank}")
    os.makedirs(directory)
    for name in ("a", "b"):
        with open(os.path.join(directory, name), "w") as file:
            file.write(f"{name} of rank {rank}")
    config.name = "distributed"
    frame = pd.DataFrame({"rank": [int(rank)], "lr": [config.lr]})
    file = FlyteFile(os.path.join(directory, "a"))
    return "\n".join(lines), config, result, file, FlyteDirectory(directory), frame


@task
def read(file: FlyteFile, directory: FlyteDirectory, frame: pd.DataFrame) -> str:
    names = sorted(os.listdir(str(directory.download())))
    with open(file) as text:
        return f"{text.read()}; {names}; rank {frame['rank'][0]}"


@workflow
def train_and_read(config: Config, text: FlyteFile) -> tuple[str, Config, int, str]:
    message, config_out, total, file, directory, frame = train(config=config, text=text)
    return message, config_out, total, read(file=file, directory=directory, frame=frame)


class NotReady(FlyteRecoverableException):
    pass


@task(task_config=Distributed(nproc_per_node=2))
def fail(kind: str) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(60)  # The supervisor ends this rank.
    if kind == "bug":
        raise ValueError("expected something else")
    raise NotReady("the data is not there yet")


@task(task_config=Distributed())
def square(number: int) -> int:
    return number * number


@dynamic
def square_in_dynamic(number: int) -> int:
    return square(number=number)


@workflow
def nested(numbers: list[int]) -> tuple[list[int], int]:
    return map_task(square)(number=numbers), square_in_dynamic(number=2)
