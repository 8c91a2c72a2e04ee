"""What an earlier version writes for tests of upgrades.

`python -m tests.support.upgrade DIRECTORY` runs with the earlier version on the path: it promotes a
champion, and writes all hyperparameters and fields of a cluster with their defaults.
`flyte-ddp run tests/support/upgrade.py DIRECTORY` trains on shards. Only names that the earlier
version has may be imported here.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import time
from pathlib import Path

NUM_EPOCHS, BATCH_SIZE, SAVE_INTERVAL = 2, 10, 3


def to_number(fields):
    import torch

    return torch.tensor(int(fields["number"]))


def train_on_shards(directory):
    """Train, and write a line for each batch of a rank: the package, when its attempt began, the
    step, the epoch and the samples.
    """
    import torch
    import torch.distributed as dist

    import flyte_ddp
    from flyte_ddp import session
    from flyte_ddp.data import Shards

    dist.init_process_group("gloo")
    shards = Shards(f"{directory}/shards", transform=to_number)
    state = session.load() or {"step": 0, "sum": torch.zeros(())}
    rank, package = os.environ["RANK"], os.path.dirname(flyte_ddp.__file__)
    attempt = state["step"]
    with open(f"{directory}/samples-{rank}.txt", "a", buffering=1) as file:
        for epoch in session.epochs(NUM_EPOCHS):
            for numbers, weight in session.batches(shards, BATCH_SIZE, epoch):
                time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
                state["step"] += 1
                used = numbers.tolist() if weight else []
                added = torch.tensor(float(sum(used)))
                dist.all_reduce(added)
                state["sum"] += added
                print(json.dumps([package, attempt, state["step"], epoch, used]), file=file)
                session.report(state["step"])
                if state["step"] % SAVE_INTERVAL == 0:
                    session.save(state, state["step"])
    (Path(directory) / "sum.txt").write_text(str(state["sum"].item()))


def write_values(directory):
    """Write what other processes than a run leave behind."""
    import torch

    from flyte_ddp.cluster.config import ClusterConfig
    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.data import Shards
    from flyte_ddp.promotion.champion import ChampionStore, Manifest

    fields = {
        "config": dataclasses.asdict(TrainingConfig()),
        "cluster": dataclasses.asdict(ClusterConfig()),
    }
    (directory / "fields.json").write_text(json.dumps(fields))
    buffer = io.BytesIO()
    torch.save({"weight": torch.arange(4.0)}, buffer)
    texts = {
        each.name: each.name
        for each in dataclasses.fields(Manifest)
        if each.default is dataclasses.MISSING and each.type in ("str", str)
    }
    values = {
        **texts,
        "config": {"epochs": 3},
        "num_train_samples": 100,
        "num_test_samples": 10,
        "metrics": {"test_loss": 0.5},
        "parent_metrics": {},
    }
    ChampionStore(str(directory / "champion")).promote(buffer.getvalue(), Manifest(**values), b"")
    Shards(str(directory / "shards")).prepare()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_on_shards(sys.argv[1])
    else:
        write_values(Path(sys.argv[1]))
