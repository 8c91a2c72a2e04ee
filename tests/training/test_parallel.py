"""A kind of parallelism is one class in a file of its own."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from flyte_ddp.config import PARALLELISMS
from flyte_ddp.recipes import config_of
from flyte_ddp.training.parallel import Parallelism
from tests.support.gang import run_gang, train_recipe
from tests.support.runs import new_run

TINY = "tests.support.recipes.Tiny"


class Averaging(Parallelism):
    """Averages the gradients one by one, after the backward pass."""

    @contextmanager
    def sync(self, replica, is_last):
        yield
        for parameter in replica.parameters() if is_last else ():
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad /= self.world.world_size


def train_both(world, store, directory, data):
    """Work of a gang: the URLs of the weights that both kinds train."""
    PARALLELISMS["averaging"] = f"{__name__}:Averaging"
    urls = []
    for kind in ("averaging", "ddp"):
        config = config_of(TINY, {"epochs": 2, "parallel": kind, "gradient_accumulation": 2})
        given = (TINY, config, data, f"{directory}/{kind}")
        events = train_recipe(world, PrefixStore(kind, store), *given)
        urls += [event["model_state_url"] for event in events if "model_state_url" in event]
    return urls


def test_a_kind_of_a_files_own_trains_the_weights_of_ddp(tmp_path):
    run = new_run(tmp_path)
    urls, _ = run_gang(2, train_both, str(tmp_path), str(run.data()))
    torch.testing.assert_close(*(torch.load(url, weights_only=True) for url in urls))
