"""The checks that a run makes itself: before anything is created, and of its NetworkPolicy beside
its scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.checks import BAD, NODES, STARTING, Setup, run_checks
from flyte_ddp.cluster.kubernetes.manifest import DASHBOARD_PORT, Driver
from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import ClusterError, PreflightError

ATTEMPT_VARIABLE = "FLYTE_ATTEMPT_NUMBER"  # from 0
# of a scheduler's pod, and not one of those that its policy opens to the driver
CLOSED_PORT = DASHBOARD_PORT + 2

logger = logging.getLogger(__name__)


def preflight(
    config: ClusterConfig, spec: Mapping[str, Any], namespace: str, driver: Driver | None = None
) -> None:
    """Check that `spec`, a DaskCluster, can start in `namespace`. Checks without RBAC permission
    are skipped.

    Args:
        driver: the pod of this process, which a quota of its namespace counts, too.

    Raises:
        PreflightError: it cannot, with each finding.
        ClusterError: the API server does not answer; or, at a retry, the nodes are in a state in
            which it cannot start. Another attempt ran on them, so they may be mended.
    """
    requests = driver.requests if driver is not None and driver.namespace == namespace else {}
    findings, _ = run_checks(Setup(config, spec["spec"], namespace, driver=requests))
    # An operator that restarts has a minute to react to the new cluster.
    obstacles = [each for each in findings if each.level == BAD and each.passes != STARTING]
    is_retry = os.environ.get(ATTEMPT_VARIABLE, "0") not in ("", "0")
    if obstacles and is_retry and all(each.passes == NODES for each in obstacles):
        raise ClusterError("; ".join(each.text for each in obstacles))
    if obstacles:
        raise PreflightError([each.text for each in obstacles])


def warn_if_unenforced(address: str, port: int = CLOSED_PORT) -> None:
    """Probe a closed port of the scheduler's pod, and log a warning if the network policy does not
    block the probe.

    A pod that is reached refuses the connection at once; a policy drops it without an answer.

    Args:
        address: the scheduler pod's IP address. The policy has been there for some seconds.
    """
    try:
        with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
            socket.create_connection((address, port), timeout=ANSWER_TIMEOUT).close()
    except OSError:  # a timeout, or a network that says so: the policy is enforced
        return
    logger.warning(
        "this Kubernetes seems not to enforce NetworkPolicies: the run's own does not keep other "
        "pods away from its ranks and dashboard. Use a network plugin that does, such as Calico or "
        "Cilium"
    )
