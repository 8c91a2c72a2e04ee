"""A Dask cluster on Kubernetes, made by the Dask operator: its life as a `with` block.

    python -m flyte_ddp.cluster.kubernetes.lifecycle sweep [--namespace N] [--older-than 24h] [--delete]

lists, and with --delete removes, clusters that outlived their driver. Knows neither recipes nor ranks.

dask_kubernetes.operator.KubeCluster is not used: its start has no deadline, it cannot say what pods wait for, it may
wait an hour for a deletion, and it tidies up at exit only, which SIGTERM skips. What is left of it is one object to
create and one to delete.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import logging
import re
import signal
import socket
import sys
import threading
import time
import types
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.api import (
    api_message,
    call,
    driver_pod,
    explain,
    is_in_pod,
    is_ready,
    pods_of,
    read_cluster,
    target_namespace,
)
from flyte_ddp.cluster.kubernetes.manifest import (
    GROUP,
    MANAGED_BY,
    PLURAL,
    SCHEDULER_PORT,
    VERSION,
    Driver,
    as_cluster_name,
    cluster_spec,
    network_policy,
    scheduler_name,
)
from flyte_ddp.cluster.kubernetes.preflight import preflight
from flyte_ddp.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

TOKEN_ANNOTATION = "flyte-ddp/token"  # tells the cluster that this process made from another of the same name
POLL_INTERVAL = 0.25  # seconds
REPORT_INTERVAL = 15.0  # seconds between two log lines about what a start waits for
OPERATOR_TIMEOUT = 60.0  # seconds until the operator must have taken up what was created

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def kube_cluster(config: ClusterConfig, run_name: str, deadline: float) -> Iterator[str]:
    """The address of a new cluster's ready scheduler. The cluster is deleted however the block is left.

    Also on SIGTERM, which leaves the block with SystemExit. What a SIGKILL of this process leaves behind goes when its
    pod does, or `idle_timeout` seconds after its last sign of life.

    Args:
        run_name: the cluster's name is `cluster_name` of it, or it is such a name already.
        deadline: on time.monotonic's clock, for the whole start.

    Raises:
        PreflightError: what the cluster lacks for this run.
        ClusterError: it did not come up in time; says what its pods wait for. Or one of its name is there already.
    """
    name = as_cluster_name(run_name)
    namespace = target_namespace(config)
    driver = driver_pod()
    if not config.kubernetes.image and driver is not None:
        pods = dataclasses.replace(config.kubernetes, image=driver.image)
        config = dataclasses.replace(config, kubernetes=pods)
    owner = driver if driver is not None and driver.namespace == namespace else None
    spec = cluster_spec(config, name, owner)
    preflight(config, spec, namespace)
    token = uuid.uuid4().hex
    spec["metadata"]["annotations"][TOKEN_ANNOTATION] = token
    with terminate_on_sigterm():
        try:
            _create(spec, namespace, driver)
            logger.info("Dask cluster %s is starting in namespace %s", name, namespace)
            _wait_for_scheduler(config, name, namespace, deadline)
            with _scheduler_address(name, namespace) as address:
                logger.info(
                    "dashboard: http://localhost:8787/status after kubectl --namespace %s port-forward service/%s 8787",
                    namespace,
                    scheduler_name(name),
                )
                yield address
        finally:
            _delete_own(name, namespace, token)


@contextlib.contextmanager
def keep_alive(client: Client, idle_timeout: float) -> Iterator[None]:
    """Tell the scheduler, for the length of the block, that its driver lives.

    The operator deletes a cluster that idles too long, and one that waits for nodes, or whose driver saves a
    checkpoint, idles. With this the idle time starts with the driver's end instead.
    """
    done = threading.Event()

    def beat() -> None:
        while not done.wait(idle_timeout / 4):
            try:
                client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "idle_since", None))
            except Exception as error:  # of any kind, while the scheduler is away; the next beat finds it back
                logger.debug("the scheduler did not hear from its driver: %s", error)

    thread = threading.Thread(target=beat, name="keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=1.0)


@contextlib.contextmanager
def terminate_on_sigterm() -> Iterator[None]:
    """SIGTERM, which ends Python at once, raises SystemExit in the block instead, so that `finally` runs.

    Signal handlers belong to the main thread; in another one this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _create(spec: Mapping[str, Any], namespace: str, driver: Driver | None) -> None:
    """Create the DaskCluster, and what keeps strangers away from its pods before the operator makes any."""
    from kubernetes.client import ApiException

    name = spec["metadata"]["name"]
    try:
        made = call("CustomObjectsApi", "create_namespaced_custom_object", GROUP, VERSION, namespace, PLURAL, spec)
        policy = network_policy(name, made["metadata"]["uid"], driver)
        call("NetworkingV1Api", "create_namespaced_network_policy", namespace, policy)
    except ApiException as error:
        if error.status == 409:
            raise ClusterError(
                f"a Dask cluster named {name} exists already in namespace {namespace}, and belongs to another run; "
                f"if none is running, remove it with: kubectl --namespace {namespace} delete daskcluster {name}"
            ) from error
        raise ClusterError(f"Dask cluster {name} was not created: {api_message(error)}") from error


def _wait_for_scheduler(config: ClusterConfig, name: str, namespace: str, deadline: float) -> None:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    started = time.monotonic()
    report_at = started + REPORT_INTERVAL
    is_taken_up = False
    while True:
        now = time.monotonic()
        try:
            is_taken_up = is_taken_up or "phase" in (read_cluster(name, namespace) or {}).get("status", {})
            if is_taken_up and any(is_ready(pod) for pod in pods_of(name, namespace, "scheduler")):
                return
        except (ApiException, HTTPError) as error:  # an API server that restarts is no reason to give up
            logger.debug("the state of Dask cluster %s is not known at the moment: %s", name, api_message(error))
        if not is_taken_up and now > min(started + OPERATOR_TIMEOUT, deadline):
            raise ClusterError(
                f"the Dask operator did nothing about cluster {name} for {now - started:.0f} s: it is not running, or "
                f"does not watch namespace {namespace}; deploy/README.md says how to install it"
            )
        if now > deadline:
            raise ClusterError(
                f"Dask cluster {name} did not start within {config.start_timeout:g} s. {explain(config, name)}".rstrip()
            )
        if now > report_at:
            report_at = now + REPORT_INTERVAL
            logger.info("Dask cluster %s: waiting for its scheduler. %s", name, explain(config, name))
        time.sleep(POLL_INTERVAL)


@contextlib.contextmanager
def _scheduler_address(name: str, namespace: str) -> Iterator[str]:
    """By the Service's name inside the Kubernetes cluster, through a port forwarded by its API server outside."""
    if is_in_pod():
        yield f"tcp://{scheduler_name(name)}.{namespace}:{SCHEDULER_PORT}"
        return
    import kr8s.objects

    service = kr8s.objects.Service.get(scheduler_name(name), namespace=namespace)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free_port = probe.getsockname()[1]  # kr8s would guess one, and now and then guess wrong
    forward = service.portforward(SCHEDULER_PORT, local_port=free_port)
    forward.__enter__()
    try:
        yield f"tcp://127.0.0.1:{free_port}"
    finally:
        # From Python 3.12 on this waits for connections that are still open; the deletion after it must not.
        closing = threading.Thread(target=forward.__exit__, args=(None, None, None), daemon=True)
        closing.start()
        closing.join(timeout=1.0)


def _delete_own(name: str, namespace: str, token: str) -> None:
    """Ask for the deletion of the cluster, if it has this token; Kubernetes sees to it. Logs what the API refuses."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        cluster = read_cluster(name, namespace)
        if cluster is not None and cluster["metadata"].get("annotations", {}).get(TOKEN_ANNOTATION) == token:
            delete_cluster(name, namespace, cluster["metadata"]["uid"])
            logger.info("Dask cluster %s is being deleted", name)
    except (ApiException, HTTPError) as error:
        logger.error(
            "Dask cluster %s may still be there (%s); remove it with: kubectl --namespace %s delete daskcluster %s",
            name,
            api_message(error),
            namespace,
            name,
        )


def delete_cluster(name: str, namespace: str, uid: str) -> None:
    """Ask for the deletion of the cluster of this name, if it still is the one of this uid.

    In the foreground: Kubernetes itself ends the pods, at once. In the background it would wait for the operator's
    finalizer, and so for an operator that is away, or for the minute that it takes when met in the middle of a check.
    """
    from kubernetes.client import ApiException

    try:
        call(
            "CustomObjectsApi",
            "delete_namespaced_custom_object",
            GROUP,
            VERSION,
            namespace,
            PLURAL,
            name,
            body={"propagationPolicy": "Foreground", "preconditions": {"uid": uid}},
        )
    except ApiException as error:
        if error.status not in (404, 409):  # gone, or replaced by another's
            raise


@dataclass(frozen=True)
class Found:
    """A cluster that this package made."""

    name: str
    namespace: str
    uid: str
    age: float  # seconds
    orphaned: str  # why nobody needs it any more; "" where somebody may


def sweep(namespace: str, older_than: float) -> list[Found]:
    """The clusters of this package in `namespace` ("": in all).

    An orphan is one whose driver's pod is gone or has ended, and one without such a pod (its driver ran outside
    Kubernetes) that is older than `older_than` seconds.
    """
    arguments = (GROUP, VERSION, PLURAL) if not namespace else (GROUP, VERSION, namespace, PLURAL)
    selector = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
    method = "list_namespaced_custom_object" if namespace else "list_cluster_custom_object"
    clusters = call("CustomObjectsApi", method, *arguments, label_selector=selector)["items"]
    found = []
    for cluster in clusters:
        metadata = cluster["metadata"]
        created = datetime.datetime.fromisoformat(metadata["creationTimestamp"].replace("Z", "+00:00"))
        age = (datetime.datetime.now(datetime.timezone.utc) - created).total_seconds()
        owners = metadata.get("ownerReferences", [])
        reason = ""
        if owners:
            reason = _why_ownerless(owners[0], metadata["namespace"])
        elif age > older_than:
            reason = f"it has no driver's pod and is older than {older_than:g} s"
        found.append(Found(metadata["name"], metadata["namespace"], metadata["uid"], age, reason))
    return found


def _why_ownerless(owner: Mapping[str, Any], namespace: str) -> str:
    from kubernetes.client import ApiException

    try:
        pod = call("CoreV1Api", "read_namespaced_pod", owner["name"], namespace)
    except ApiException as error:
        if error.status != 404:
            raise
        return f"its driver's pod {owner['name']} is gone"
    if pod.metadata.uid != owner["uid"]:
        return f"its driver's pod {owner['name']} is gone"
    return f"its driver's pod {owner['name']} has {pod.status.phase.lower()}" * (
        pod.status.phase in ("Succeeded", "Failed")
    )


def duration(text: str) -> float:
    """Seconds, from a number with s, m, h or d.

    Raises:
        ValueError: it is no such thing.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ValueError(f"{text!r} is no duration; accepted is a number with s, m, h or d, such as 90m")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException

    parser = argparse.ArgumentParser(
        prog="python -m flyte_ddp.cluster.kubernetes.lifecycle", description="Dask clusters of this package."
    )
    command = parser.add_subparsers(required=True).add_parser(
        "sweep", help="list, and with --delete remove, clusters that outlived their driver"
    )
    command.add_argument("--namespace", default="", help="the only one to look at; all of them otherwise")
    command.add_argument(
        "--older-than",
        type=duration,
        default="24h",
        help="age from which a cluster counts as orphaned whose driver ran outside Kubernetes (default 24h)",
    )
    command.add_argument("--delete", action="store_true", help="remove the orphans")
    options = parser.parse_args(arguments)

    try:
        found = sweep(options.namespace, options.older_than)
        lines = []
        for each in found:
            state = each.orphaned or "in use"
            if each.orphaned and options.delete:
                delete_cluster(each.name, each.namespace, each.uid)
                state = f"deleted: {each.orphaned}"
            lines.append(f"{each.namespace}/{each.name}  age {datetime.timedelta(seconds=round(each.age))}  {state}")
    except ApiException as error:
        parser.exit(1, f"error: {api_message(error)}\n")
    except ConfigException as error:
        parser.exit(1, f"error: {error}\n")
    num_orphans = sum(bool(each.orphaned) for each in found)
    lines.append(f"{len(found)} clusters, {num_orphans} orphaned")
    if num_orphans and not options.delete:
        lines[-1] += "; remove them with --delete"
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
