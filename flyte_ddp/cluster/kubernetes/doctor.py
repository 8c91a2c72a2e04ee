"""`python -m flyte_ddp doctor`: tell whether a run could start on a Kubernetes cluster. Changes
nothing.

For a person with a kubeconfig of wide rights.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping

from flyte_ddp.cluster.admission import load_allowed
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.api import context_namespace
from flyte_ddp.cluster.kubernetes.checks import (
    BAD,
    GOOD,
    UNKNOWN,
    UNKNOWN_IMAGE,
    WARNING,
    Finding,
    Setup,
    run_checks,
)
from flyte_ddp.cluster.kubernetes.manifest import cluster_spec
from flyte_ddp.cluster.kubernetes.resources import quantities
from flyte_ddp.config.source_code import read_settings

DRIVER = "driver"  # the class of tasks that drive a cluster


def diagnose(
    config: ClusterConfig,
    service_account: str,
    tasks: Mapping[str, Mapping[str, str]],
    pod_template: str,
) -> tuple[list[Finding], int]:
    """Check the cluster that the kubeconfig names, for runs with this config whose tasks have
    `service_account`.

    Args:
        tasks: what the pods of tasks request, as {class: {resource: quantity}}.
        pod_template: the name of Flyte's default pod template; "": as a ConfigMap of Flyte's has
            it.

    Returns:
        The findings, and an exit status: 0 if a run could start, 1 if not, 2 where this user may
            not see enough.

    Raises:
        ClusterError: the API server does not answer.
    """
    namespace, origin = config.kubernetes.namespace, "which is named"
    if not namespace:
        namespace = context_namespace() or "default"
        origin = "that of the kubeconfig's context, as kubectl has it; name another by --namespace"
    findings, unseen = _check(config, service_account, tasks, pod_template, namespace)
    findings.insert(0, Finding(f"namespace {namespace} is checked, {origin}", GOOD))
    if not tasks:
        text = (
            "the tasks' own pods were not checked; pass --tasks \"$(python -m tasks requests "
            '--json)"'
        )
        findings.append(Finding(text, UNKNOWN))
    if unseen:
        findings.append(
            Finding(
                f"the kubeconfig's user may not see {', '.join(unseen)}, so nothing says whether "
                "a run could start; "
                "ask with an administrator's kubeconfig",
                UNKNOWN,
            )
        )
    if any(each.level == BAD for each in findings):
        return findings, 1
    if unseen:
        return findings, 2
    text = (
        f"a run of {config.num_nodes} nodes could start in namespace {namespace} if its image "
        "can be pulled"
    )
    findings.append(Finding(text, GOOD))
    return findings, 0


def _check(
    config: ClusterConfig,
    account: str,
    tasks: Mapping[str, Mapping[str, str]],
    pod_template: str,
    namespace: str,
) -> tuple[list[Finding], list[str]]:
    # As the tasks' own settings have it; an image that is given at the registration is not known
    # here.
    image = os.environ.get("IMAGE") or read_settings().get("image", "")
    allowed = load_allowed()
    # a task's own is always allowed
    allowed = dataclasses.replace(allowed, images=(*allowed.images, image or "*"))
    pods = dataclasses.replace(
        config.kubernetes,
        image=config.kubernetes.image or image or UNKNOWN_IMAGE,
        namespace=namespace,
    )
    config = dataclasses.replace(config, kind="kubernetes", kubernetes=pods)
    spec = cluster_spec(config, "ddp-doctor-00000000")["spec"]
    driver = quantities(tasks.get(DRIVER, {}))  # without its requests it is one pod more, at least
    return run_checks(Setup(config, spec, namespace, account, driver, tasks, allowed, pod_template))


def lines(findings: list[Finding]) -> Iterator[str]:
    """Yield a line for each finding: the first, which says what was checked, then the obstacles,
    then the rest.
    """
    order = (BAD, WARNING, UNKNOWN, GOOD)
    ordered = sorted(findings[1:], key=lambda each: order.index(each.level))
    return (f"{finding}\n" for finding in [*findings[:1], *ordered])
