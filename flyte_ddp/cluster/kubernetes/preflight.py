"""The checks of a run, before anything is created and a GPU is asked for. Those without RBAC permission are skipped."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.checks import BAD, NODES, STARTING, Setup, run_checks
from flyte_ddp.cluster.kubernetes.manifest import Driver
from flyte_ddp.cluster.kubernetes.resources import quantities
from flyte_ddp.errors import ClusterError, PreflightError

ATTEMPT_VARIABLE = "FLYTE_ATTEMPT_NUMBER"  # from 0

logger = logging.getLogger(__name__)


def preflight(config: ClusterConfig, spec: Mapping[str, Any], namespace: str, driver: Driver | None = None) -> None:
    """Check that `spec`, a DaskCluster, can start in `namespace`.

    Args:
        driver: the pod of this process, which a quota of its namespace counts, too.

    Raises:
        PreflightError: it cannot, with each finding.
        ClusterError: the API server does not answer; or, at a retry, the nodes are in a state in which it cannot start.
            Another attempt ran on them, so they may be mended.
    """
    requests = quantities(driver.requests) if driver is not None and driver.namespace == namespace else None
    findings, unseen = run_checks(Setup(config, spec["spec"], namespace, driver=requests))
    if unseen:
        logger.debug("preflight: no permission to see %s", ", ".join(unseen))
    # An operator that restarts has a minute to react to the new cluster.
    obstacles = [each for each in findings if each.level == BAD and each.passes != STARTING]
    is_retry = os.environ.get(ATTEMPT_VARIABLE, "0") not in ("", "0")
    if obstacles and is_retry and all(each.passes == NODES for each in obstacles):
        raise ClusterError("; ".join(each.text for each in obstacles))
    if obstacles:
        raise PreflightError([each.text for each in obstacles])
