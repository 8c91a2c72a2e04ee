"""The inputs of a launch, compared with the policy of the registered version; and the Dask cluster of a task."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flyte_ddp.cluster import admission
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.flytekit_plugin.flyte_context import is_flyte_task
from tasks.resources import SETTINGS


def check_cluster(config: ClusterConfig | None) -> None:
    """Compare `config` with the table `allowed` of settings.toml.

    Raises:
        ConfigError: it names what is not allowed.
    """
    from flyte_ddp.cluster.kubernetes import api

    if config is not None:
        admission.check_allowed(config, SETTINGS.allowed, api.own_namespace())


def check_urls(**urls: str) -> None:
    """Compare a launch's URLs with the table `allowed`. A local run may name any file of its machine.

    Raises:
        ConfigError: it names what is not allowed.
    """
    if is_flyte_task():
        admission.check_urls(urls, SETTINGS.allowed)


def open_task_cluster(config: ClusterConfig, run_name: str) -> AbstractContextManager[Any]:
    """Check the cluster, then open it as `flyte_ddp.cluster.connect.open_cluster` does."""
    from flyte_ddp.cluster import connect

    check_cluster(config)
    return connect.open_cluster(config, run_name)
