"""The life of a Dask cluster on Kubernetes as a `with` block. The Dask operator makes the cluster.

Knows neither recipes nor ranks. dask_kubernetes.operator.KubeCluster is not used: its start has no
deadline, it cannot report what pods wait for, it may wait an hour for a deletion, and SIGTERM skips
its cleanup at exit. Without it there is one object to create and one to delete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.api import (
    API_PATIENCE,
    POLL_INTERVAL,
    ApiRefused,
    call,
    driver_pod,
    explain,
    is_in_pod,
    is_ready,
    pods_of,
    read_cluster,
    target_namespace,
)
from flyte_ddp.cluster.kubernetes.checks import BAD, NODES, STARTING, Setup, run_checks
from flyte_ddp.cluster.kubernetes.manifest import (
    COMPONENT,
    DASHBOARD_PORT,
    GROUP,
    PLURAL,
    SCHEDULER_PORT,
    VERSION,
    WORKER_GROUPS,
    Driver,
    certificate_secret,
    cluster_name,
    cluster_spec,
    further_workers,
    network_policy,
    scheduler_name,
)
from flyte_ddp.config.waits import ANSWER_TIMEOUT, LINE_INTERVAL
from flyte_ddp.errors import ClusterError, PreflightError
from flyte_ddp.process.invocation import find_flyte_ddp_command
from flyte_ddp.process.threads import start_thread
from flyte_ddp.project.admission import with_filler_class

if TYPE_CHECKING:
    from distributed import Client, Security

# annotation that distinguishes this process's cluster from another cluster with the same name
TOKEN_ANNOTATION = "flyte-ddp/token"
ATTEMPT_VARIABLE = "FLYTE_ATTEMPT_NUMBER"  # number of the attempt, from 0
# port of a scheduler's pod that its policy does not open to the driver
CLOSED_PORT = DASHBOARD_PORT + 2

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def kube_cluster(
    config: ClusterConfig,
    run_name: str,
    deadline: float,
    report_wait: Callable[[str], None] = logger.info,
) -> Iterator[tuple[str, Security | None]]:
    """Yield the address of a new cluster's ready scheduler, and the certificate to connect with;
    None without TLS.

    The cluster is deleted after the block, also after an error or SIGTERM, which raises SystemExit
    in the block. After a SIGKILL of this process the cluster stays until the process's pod is
    deleted, or until `idle_timeout` seconds after the last heartbeat.

    Args:
        run_name: a name from which `cluster_name` makes the cluster's name.
        deadline: end of the whole start, on time.monotonic's clock.
        report_wait: gets what the start waits for, about every ten seconds.

    Raises:
        ConfigError: the user has to correct something. Nothing was created. A PreflightError lists
            everything that the Kubernetes cluster lacks.
        ClusterError: the cluster did not start in time, the API server does not answer, or a
            cluster with this name exists already.
    """
    from distributed import Security

    name = cluster_name(run_name)
    security = None
    if config.kubernetes.tls:
        security = Security.temporary()
    with terminate_on_sigterm():
        try:
            driver = driver_pod()
            namespace = target_namespace(config)
            if not config.kubernetes.image and driver is not None:
                config = config.with_pods(image=driver.image)
            owner = None
            if driver is not None and driver.namespace == namespace:
                owner = driver
            config = with_filler_class(config)
            spec = cluster_spec(config, name, owner)
            preflight(config, spec, namespace, owner)
        except ApiRefused as error:
            raise ClusterError(f"the Kubernetes API server refused a request: {error}") from error
        token = spec["metadata"]["annotations"][TOKEN_ANNOTATION] = uuid.uuid4().hex
        try:
            made = _create(spec, namespace, driver, config.kubernetes.operator_namespace, security)
            logger.info("Dask cluster %s is starting in namespace %s", name, namespace)
            scheduler = _wait_for_scheduler(config, name, namespace, deadline, report_wait)
            _create_further(config, made, namespace)
            if is_in_pod():
                # The start does not wait for this check.
                start_thread("policy", warn_if_unenforced, scheduler.status.pod_ip)
            with _scheduler_address(name, namespace, config.kubernetes.tls) as address:
                logger.info(
                    "dashboard: http://localhost:8787/status after kubectl --namespace %s "
                    "port-forward service/%s 8787",
                    namespace,
                    scheduler_name(name),
                )
                yield address, security
        finally:
            _delete_own(name, namespace, token)


def preflight(
    config: ClusterConfig, spec: Mapping[str, Any], namespace: str, owner: Driver | None
) -> None:
    """Check that `spec`, a DaskCluster, can start in `namespace`. Checks without RBAC permission
    are skipped.

    Args:
        owner: the pod of this process if it is in `namespace`. The quotas there count it too.

    Raises:
        PreflightError: the cluster cannot start. The message has each finding.
        ClusterError: the API server does not answer; or, at a retry, the nodes have no room. The
            nodes had room for an earlier attempt, so they may recover.
    """
    setup = Setup(config, spec["spec"], namespace)
    if owner:
        setup = replace(setup, driver=owner.requests)
    findings, _ = run_checks(setup)
    # An operator that is restarting has a minute to react to the new cluster.
    obstacles = [each for each in findings if each.level == BAD and each.passes != STARTING]
    is_retry = os.environ.get(ATTEMPT_VARIABLE, "0") not in ("", "0")
    if obstacles and is_retry and all(each.passes == NODES for each in obstacles):
        raise ClusterError("; ".join(each.text for each in obstacles))
    if obstacles:
        raise PreflightError([each.text for each in obstacles])


def warn_if_unenforced(address: str, port: int = CLOSED_PORT) -> None:
    """Probe a closed port of the scheduler's pod, and log a warning if the network policy does not
    block the probe.

    Without a policy the pod refuses the connection at once. A policy drops the connection without
    an answer.

    Args:
        address: the scheduler pod's IP address. The policy has existed for some seconds.
    """
    try:
        with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
            socket.create_connection((address, port), timeout=ANSWER_TIMEOUT).close()
    except OSError:  # a timeout, or a refusal by the network: the policy is enforced
        return
    logger.warning(
        "this Kubernetes seems not to enforce NetworkPolicies: the run's own does not keep other "
        "pods away from its ranks and dashboard. Use a network plugin that does, such as Calico or "
        "Cilium"
    )


@contextlib.contextmanager
def keep_alive(client: Client, idle_timeout: float) -> Iterator[None]:
    """Keep the operator from deleting the cluster as idle while the block runs.

    The operator regards a cluster as idle while it waits for nodes or its driver saves a
    checkpoint. Each call here restarts the scheduler's idle time, so that the time counts from the
    driver's end.
    """
    done = threading.Event()

    def beat() -> None:
        while not done.wait(idle_timeout / 4):
            # Any error is possible while the scheduler is away. The next call may succeed.
            with contextlib.suppress(Exception):
                client.run_on_scheduler(
                    lambda dask_scheduler: setattr(dask_scheduler, "idle_since", None)
                )

    start_thread("keep-alive", beat)
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def terminate_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in the block, so that `finally` runs. By default SIGTERM ends
    Python at once.

    Signal handlers belong to the main thread. In another thread this function changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _create(
    spec: Mapping[str, Any],
    namespace: str,
    driver: Driver | None,
    operator_namespace: str,
    security: Security | None,
) -> Mapping[str, Any]:
    """Create the DaskCluster, its network policy and its certificate. Return the DaskCluster.

    The policy keeps other pods away from the cluster's pods, so it must exist before the operator
    makes pods. The pods wait for the certificate.
    """
    name = spec["metadata"]["name"]
    create = ("create_namespaced_custom_object", GROUP, VERSION, namespace, PLURAL, spec)
    try:
        made = call("CustomObjectsApi", *create, ignored=(409,))
        if made is None:
            made = read_cluster(name, namespace) or {"metadata": {}}
            # With an equal token the cluster is ours: the answer to an earlier try was lost.
            if _read_token(made) != _read_token(spec):
                raise ClusterError(
                    f"a Dask cluster named {name} exists already in namespace {namespace}, and "
                    "belongs to another run; if none is running, remove it with: kubectl "
                    f"--namespace {namespace} delete daskcluster {name}"
                )
        uid = made["metadata"]["uid"]
        policy = network_policy(name, uid, operator_namespace, driver)
        # A policy that exists already is ours too.
        call(
            "NetworkingV1Api", "create_namespaced_network_policy", namespace, policy, ignored=(409,)
        )
        if security is not None:
            secret = certificate_secret(
                name, uid, security.tls_scheduler_cert, security.tls_scheduler_key
            )
            call("CoreV1Api", "create_namespaced_secret", namespace, secret, ignored=(409,))
        return dict(made)
    except ApiRefused as error:
        if error.status in (400, 422):
            raise PreflightError(
                [
                    f"the API server refuses the pods as they are described: {error}; correct "
                    "it in `cluster.kubernetes`: `image`, `pod_template`, `service_account`"
                ]
            ) from error
        raise ClusterError(f"Dask cluster {name} was not created: {error}") from error


def _create_further(config: ClusterConfig, cluster: Mapping[str, Any], namespace: str) -> None:
    """Create the workers beyond `min_nodes` of a run in a queue. The gang has been admitted."""
    further = further_workers(config, cluster)
    if further is not None:
        create = ("create_namespaced_custom_object", GROUP, VERSION, namespace, WORKER_GROUPS)
        call("CustomObjectsApi", *create, further, ignored=(409,))


def _read_token(cluster: Mapping[str, Any]) -> str:
    return str(cluster["metadata"].get("annotations", {}).get(TOKEN_ANNOTATION, ""))


def _wait_for_scheduler(
    config: ClusterConfig,
    name: str,
    namespace: str,
    deadline: float,
    report_wait: Callable[[str], None],
) -> Any:
    """Return the scheduler's pod when it is ready."""
    started = time.monotonic()
    report_at = min(started + LINE_INTERVAL, deadline)
    while True:
        pods = []
        try:
            pods = pods_of(name, namespace)
        except ClusterError as error:  # the API server may restart meanwhile
            logger.debug("the state of Dask cluster %s is not known at the moment: %s", name, error)
        schedulers = [pod for pod in pods if pod.metadata.labels.get(COMPONENT) == "scheduler"]
        if schedulers and is_ready(schedulers[0]):
            return schedulers[0]
        now = time.monotonic()
        if now > report_at:
            report_at = min(now + LINE_INTERVAL, deadline)
            why = explain(config, name)
            # If the operator ends after it has seen the cluster, no pods are made and nothing shows
            # the reason.
            if not pods and not why and now > min(started + API_PATIENCE, deadline):
                raise ClusterError(
                    f"the Dask operator did not react to cluster {name} within "
                    f"{now - started:.0f} s: it is not running, or does not watch namespace "
                    f"{namespace}; see: {find_flyte_ddp_command()} doctor --namespace {namespace}"
                )
            if now > deadline:
                raise ClusterError(
                    f"Dask cluster {name} did not start within {config.start_timeout:g} s. {why}"
                )
            reason = why or "It has no pod yet."
            report_wait(f"Dask cluster {name}: waiting for its scheduler. {reason}")
        time.sleep(POLL_INTERVAL)


@contextlib.contextmanager
def _scheduler_address(name: str, namespace: str, is_tls: bool) -> Iterator[str]:
    """Yield the scheduler's address: its Service's name inside the Kubernetes cluster, a port that
    the API server forwards outside.
    """
    protocol = "tcp"
    if is_tls:
        protocol = "tls"
    if is_in_pod():
        yield f"{protocol}://{scheduler_name(name)}.{namespace}:{SCHEDULER_PORT}"
        return
    import kr8s.objects

    service = kr8s.objects.Service.get(scheduler_name(name), namespace=namespace)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free_port = probe.getsockname()[1]  # kr8s would guess a port, sometimes a taken one
    forward = service.portforward(SCHEDULER_PORT, local_port=free_port)
    forward.__enter__()
    try:
        yield f"{protocol}://127.0.0.1:{free_port}"
    finally:
        # From Python 3.12 on this call waits for connections that are still open. The deletion of
        # the cluster must not wait.
        start_thread("closing", forward.__exit__, None, None, None).join(timeout=1.0)


def _delete_own(name: str, namespace: str, token: str) -> None:
    """Ask Kubernetes to delete the cluster if it has this token. Log a refusal.

    In a foreground deletion Kubernetes itself ends the pods at once. A background deletion would
    wait for the operator's finalizer, and the operator may be away, or busy with a check for a
    minute.
    """
    try:
        cluster = read_cluster(name, namespace, patience=ANSWER_TIMEOUT)
        if cluster is not None and _read_token(cluster) == token:
            uid = cluster["metadata"]["uid"]
            request = ("delete_namespaced_custom_object", GROUP, VERSION, namespace, PLURAL, name)
            call(
                "CustomObjectsApi",
                *request,
                body={"propagationPolicy": "Foreground", "preconditions": {"uid": uid}},
                patience=ANSWER_TIMEOUT,
                ignored=(404, 409),  # the cluster is gone, or another run's by now
            )
            logger.info("Dask cluster %s is being deleted", name)
    except ClusterError as error:
        logger.error(
            "Dask cluster %s may still be there (%s); remove it with: kubectl --namespace %s "
            "delete daskcluster %s",
            name,
            error,
            namespace,
            name,
        )
