"""Check from a run's driver that the cluster enforces the run's NetworkPolicy."""

from __future__ import annotations

import logging
import socket
import threading

from flyte_ddp.cluster.kubernetes.manifest import DASHBOARD_PORT

CLOSED_PORT = DASHBOARD_PORT + 2  # of a scheduler's pod, and not one of those that its policy opens to the driver
PROBE_TIMEOUT = 2.0  # seconds; a policy that is enforced lets the probe wait until then

logger = logging.getLogger(__name__)


def warn_if_unenforced(address: str, port: int = CLOSED_PORT) -> threading.Thread:
    """Probe a closed port of the scheduler's pod, and log a warning if the network policy does not block the probe.

    A pod that is reached refuses the connection at once; a policy drops it without an answer. Returns the thread that
    does so, because a start must not wait for it.

    Args:
        address: the scheduler pod's IP address. The policy has been there for some seconds.
    """
    thread = threading.Thread(target=_probe, args=(address, port), name="policy-probe", daemon=True)
    thread.start()
    return thread


def _probe(address: str, port: int) -> None:
    try:
        with socket.create_connection((address, port), timeout=PROBE_TIMEOUT):
            pass
    except (ConnectionRefusedError, ConnectionResetError):
        pass
    except OSError as error:  # a timeout, or a network that says so
        logger.debug("the run's NetworkPolicy is enforced: %s", error)
        return
    logger.warning(
        "this Kubernetes seems not to enforce NetworkPolicies: the run's own does not keep other pods away from "
        "its ranks and dashboard. Use a network plugin that does, such as Calico or Cilium"
    )
