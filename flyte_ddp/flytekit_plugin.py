"""The import path of `Distributed` that users' tasks have. `flyte_ddp.flyte` has the class."""

from flyte_ddp.flyte.distributed import Distributed

__all__ = ["Distributed"]
