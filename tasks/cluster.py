"""The Dask cluster of a task: compared with the policy of the registered version, then opened."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flyte_ddp.cluster.admission import check_allowed
from flyte_ddp.cluster.config import ClusterConfig
from tasks.resources import SETTINGS


def check_cluster(config: ClusterConfig | None) -> None:
    """Compare `config` with the table `allowed` of settings.toml.

    Raises:
        ConfigError: it names what is not allowed.
    """
    from flyte_ddp.cluster.kubernetes import api

    if config is not None:
        check_allowed(config, SETTINGS.allowed, api.target_namespace(ClusterConfig()) if api.is_in_pod() else "")


def open_task_cluster(config: ClusterConfig, run_name: str) -> AbstractContextManager[Any]:
    """Check the cluster, then open it as `flyte_ddp.cluster.connect.open_cluster` does."""
    from flyte_ddp.cluster import connect

    check_cluster(config)
    return connect.open_cluster(config, run_name)
