"""Train in tasks of Flyte 2, by its SDK `flyte`: a recipe, and a function of one's own in every
rank.

python examples/flyte2.py

Neither needs flytekit. A retry goes on from the checkpoints of the attempts before it, because all
of them have the same place.
"""

import sys
import time

import flyte
import flyte.io
import flyte.report

import flyte_ddp
from flyte_ddp.events import EpochFinished, Event, Listener
from flyte_ddp.observers.reports.run import Report

env = flyte.TaskEnvironment("training", resources=flyte.Resources(cpu=4, memory="8Gi"))


def checkpoints() -> str:
    """Return a place that all attempts of this action have, and no other action."""
    context = flyte.ctx()
    return f"{context.run_base_dir.rstrip('/')}/{context.action.name}/flyte-ddp"


def run_id() -> str:
    """Return the name that all attempts of this action share: a retry takes a killed pod's place
    over at once.
    """
    action = flyte.ctx().action
    return f"{action.run_name}-{action.name}"


class Page(Listener):
    """The run's report, as the report of the task; in a tenth of the time at most: an upload may
    take seconds.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.next_at = 0.0  # seconds, by time.monotonic

    def handle(self, event: Event) -> None:
        self.report.handle(event)
        begun = time.monotonic()
        if isinstance(event, EpochFinished) and begun >= self.next_at:
            self.publish()
            self.next_at = begun + 10 * (time.monotonic() - begun)

    def close(self, error: BaseException | None) -> None:
        self.report.close(error)
        self.publish()

    def publish(self) -> None:
        flyte.report.replace(self.report.render())
        flyte.report.flush()


@env.task(retries=2, report=True)
def train_recipe(
    recipe: str, config: dict[str, int], nnodes: int = 1
) -> tuple[flyte.io.File, dict[str, float]]:
    """Train a recipe with two ranks; on several nodes on a local Dask cluster, or one that
    `cluster` names.
    """
    cluster = {"kind": "local"} if nnodes > 1 else None
    ranks = 1 if nnodes > 1 else 2
    trained = flyte_ddp.train(
        recipe,
        config,
        nnodes=nnodes,
        nproc_per_node=ranks,
        cluster=cluster,
        checkpoints=checkpoints(),
        run_id=run_id(),
        listeners=[Page()],
    )
    file = flyte.io.File.from_existing_remote(trained.model_state_url)
    return file, {"test_loss": trained.best.test_loss, **trained.best.metrics}


def sum_of_ranks(scale: float) -> float:
    """Run in every rank."""
    import torch
    import torch.distributed as dist

    from flyte_ddp import session

    dist.init_process_group("gloo")
    state = session.load() or {"step": 0, "total": 0.0}
    for step in range(state["step"] + 1, 11):
        value = torch.tensor(scale * (dist.get_rank() + 1))
        dist.all_reduce(value)
        state = {"step": step, "total": state["total"] + value.item()}
        session.report(step=step, total=state["total"])
        session.save(state, step)
    dist.destroy_process_group()
    return state["total"]


@env.task(retries=2, report=True)
def train_function(scale: float) -> float:
    """Call a function in two ranks."""
    return flyte_ddp.run(
        sum_of_ranks,
        scale,
        nproc_per_node=2,
        max_restarts=1,
        checkpoints=checkpoints(),
        run_id=run_id(),
        listeners=[Page()],
    )


if __name__ == "__main__":
    flyte.init()
    for run in (
        flyte.run(train_function, scale=0.5),
        flyte.run(train_recipe, recipe="digits", config={"epochs": 2}),
        flyte.run(train_recipe, recipe="digits", config={"epochs": 2}, nnodes=2),
    ):
        sys.stdout.write(f"{run.outputs()}\n")
