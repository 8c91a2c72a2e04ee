"""Measure how much of a node is in use. Imports no torch."""

from __future__ import annotations

from flyte_ddp.events import NodeMeasured
from flyte_ddp.launch.agent.devices import measure_gpus
from flyte_ddp.storage.cgroups import memory_use

# seconds between two measurements; of the attempt so far, if that is more: days of a run have a
# thousand points, not a hundred thousand
MIN_INTERVAL, INTERVAL_SHARE = 15.0, 0.01
SAMPLE_SECONDS = 1.0  # over which the use of the cores is measured, as the driver does for GPUs


def measure_node(node: int, num_gpus: int) -> NodeMeasured:
    """Return how much of this machine is in use, and of the first `num_gpus` GPUs of this process.
    It takes `SAMPLE_SECONDS`.
    """
    import psutil  # type: ignore[import-untyped]

    cpu = psutil.cpu_percent(SAMPLE_SECONDS) / 100
    used, limit = memory_use()
    return NodeMeasured(node, cpu, used / limit, limit, *measure_gpus(num_gpus))
