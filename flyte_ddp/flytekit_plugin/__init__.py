"""The Flyte side of the library, and the only package of it that imports flytekit.

from flyte_ddp.flytekit_plugin import Distributed

@task(task_config=Distributed(nnodes=2, nproc_per_node=4, max_restarts=3), retries=3)
def train(lr: float) -> float: ...
"""

from flyte_ddp.flytekit_plugin.distributed import Distributed

__all__ = ["Distributed"]
