"""The driver of training runs, in a pod, as a Flyte task would be. Needs no pytest: the image has
none.

As a program, `python -m tests.kubernetes.driver JSON`, it opens one cluster and trains run after
run on it, up to the first that fails. Events and log lines of the runs and the launcher are printed
as lines of JSON, each with its time.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp import events
from flyte_ddp.cluster.config import cluster_config
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.config import resolve
from flyte_ddp.launch import driver
from flyte_ddp.launch.dask.place import DaskPlace
from flyte_ddp.launch.process.programs import Job, Program, recipe_program
from flyte_ddp.launch.run import _Call
from flyte_ddp.recipes import get_recipe
from tests.support.runs import new_run

FUNCTIONS = FUNCTION, SPLIT_FUNCTION = "count_steps", "train_split"
SPLIT_SAMPLES = 50  # of an epoch of the second one, in batches of 4 of which the last is smaller

# the launcher's log and the listeners' events come from different threads
_speaks = threading.Lock()


def say(**values: Any) -> None:
    with _speaks:
        # a value of a function is bytes
        print(json.dumps({"at": time.time(), **values}, default=repr), flush=True)


class Listener:
    def __init__(self, run: str) -> None:
        self.run = run

    def handle(self, event: events.Event) -> None:
        # bytes, and kilobytes of numbers
        if not isinstance(event, (events.PredictionsMade, events.HistogramsTaken)):
            say(run=self.run, **events.to_dict(event))

    def close(self, error: BaseException | None) -> None:
        say(
            run=self.run,
            ended="well" if error is None else type(error).__name__,
            message=str(error or ""),
        )


class LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(log=record.getMessage())


def prepared(directory: str, recipe: str) -> str:
    return str(new_run(directory, recipe).data())


def count_steps(num_steps: int) -> int:
    """A function that saves nothing until it is asked to stop."""
    import torch
    import torch.distributed as dist

    from flyte_ddp import session

    dist.init_process_group("gloo")
    done = (session.load() or {"done": 0})["done"]
    while done < num_steps and not session.stop_requested:
        time.sleep(float(os.environ["STEP_SECONDS"]))
        one = torch.ones(1) / dist.get_world_size()
        dist.all_reduce(one)
        done += round(one.item())
        session.report(step=done)
    if done < num_steps:
        session.save({"done": done}, done)
    return done


def train_split(epochs: int) -> dict[str, Any]:
    """A function whose model FSDP2 splits, and which saves each second step. Returns the weights,
    whole.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import TensorDataset

    from flyte_ddp import session

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    inputs = torch.randn(SPLIT_SAMPLES, 5)

    def state_of(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    state = session.load(into=state_of(0))
    if state:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    step = state["step"] if state else 0
    for epoch in range(epochs):
        for (batch,), weight in session.batches(TensorDataset(inputs), 4, epoch):
            time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
            optimizer.zero_grad()
            (weight * (model(batch) - batch.sum(1, keepdim=True)).square().mean()).backward()
            optimizer.step()
            step += 1
            session.report(step=step)
            if step % 2 == 0:
                session.save(state_of(step), step)
    return {name: each.full_tensor().detach() for name, each in model.state_dict().items()}


def program_of(run: dict[str, Any]) -> Program:
    for function in (count_steps, train_split):
        if run["recipe"] == function.__name__:
            call = cloudpickle.dumps(_Call(function, tuple(run["config"].values())))
            return Program(run["recipe"], call, ("tests",))
    return recipe_program(run["recipe"], resolve(get_recipe(run["recipe"]).defaults, run["config"]))


def main() -> None:
    """Train as the argument describes: `cluster` (fields of ClusterConfig), and `runs`, each with
    its `name`, `recipe`, `checkpoints` (URL) and `config` (fields of TrainingConfig). A recipe of
    `FUNCTIONS` is the function of this name, and the values of its `config` are the arguments.
    """
    logging.getLogger("flyte_ddp").addHandler(LogHandler())
    logging.getLogger("flyte_ddp").setLevel(logging.INFO)
    arguments = json.loads(sys.argv[1])
    cluster, run_name = cluster_config(arguments["cluster"]), socket.gethostname()
    with tempfile.TemporaryDirectory() as directory, open_cluster(cluster, run_name) as client:
        for each in arguments["runs"]:
            data = functools.partial(prepared, f"{directory}/{each['name']}", each["recipe"])
            driver.run(
                Job(program_of(each), each["checkpoints"], time.time()),
                DaskPlace(client, cluster, run_name),
                data=None if each["recipe"] in FUNCTIONS else data,
                listeners=[Listener(each["name"])],
                relay=lambda line: say(line=line),
            )
    say(cluster="gone")


if __name__ == "__main__":
    main()
