"""Train in tasks of Flyte 2, by its SDK `flyte`: a recipe, and a function of one's own in every
rank.

python examples/tasks/flyte2.py

Neither needs flytekit. A retry goes on from the checkpoints of the attempts before it.
"""

import sys

import flyte

from flyte_ddp import flyte2, session

SIZE = flyte2.SETTINGS.training
env = flyte2.environment("training", SIZE)
in_ranks = flyte2.environment("in-ranks", SIZE, flyte2.Distributed(nproc_per_node=2))


@env.task(retries=2, report=True)
def train_recipe(recipe: str, config: dict[str, int], nnodes: int = 1) -> flyte2.TrainingOutputs:
    """Train a recipe with two ranks; on several nodes on a local Dask cluster, or one that
    `cluster` names.
    """
    cluster = {"kind": "local", "num_nodes": nnodes} if nnodes > 1 else None
    return flyte2.train(recipe, config, num_processes=1 if cluster else 2, cluster=cluster)


@in_ranks.task(retries=2, report=True)
def train_function(scale: float) -> float:
    """Run in every rank; rank 0's value is returned."""
    import torch
    import torch.distributed as dist

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


if __name__ == "__main__":
    flyte.init()
    for run in (
        flyte.run(train_function, scale=0.5),
        flyte.run(train_recipe, recipe="digits", config={"epochs": 2}),
        flyte.run(train_recipe, recipe="digits", config={"epochs": 2}, nnodes=2),
    ):
        sys.stdout.write(f"{run.outputs()}\n")
