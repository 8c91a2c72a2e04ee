"""Shards of samples, of any size, and the order in which an epoch visits their samples."""

from flyte_ddp.data.mixture import Mixture
from flyte_ddp.data.shards import Shards

__all__ = ["Mixture", "Shards"]
