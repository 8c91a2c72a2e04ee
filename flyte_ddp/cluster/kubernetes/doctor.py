"""`flyte-ddp doctor`: check whether a run could start on a Kubernetes cluster. Changes nothing.

The command is for a person with wide rights in the cluster.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from decimal import Decimal

from flyte_ddp.cluster.config import ClusterConfig, cluster_config
from flyte_ddp.cluster.kubernetes.api import context_namespace
from flyte_ddp.cluster.kubernetes.checks import (
    BAD,
    DOCTOR_NAME,
    GOOD,
    UNKNOWN,
    UNKNOWN_IMAGE,
    WARNING,
    Finding,
    Setup,
    run_checks,
)
from flyte_ddp.cluster.kubernetes.manifest import cluster_spec
from flyte_ddp.code.source_code import read_settings
from flyte_ddp.config.fields import read_object
from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ClusterError, ConfigError
from flyte_ddp.project.admission import load_allowed, with_filler_class


def diagnose(
    config: ClusterConfig,
    service_account: str,
) -> tuple[list[str], int]:
    """Check the kubeconfig's cluster for runs with this config and with `service_account` for their
    tasks.

    Returns:
        A line for each finding, and an exit status: 0 if a run could start, 1 if not, 2 if this
            user's rights are too small to say.

    Raises:
        ClusterError: the API server does not answer.
    """
    namespace = config.kubernetes.namespace or context_namespace() or "default"
    # The image in the tasks' settings. An image that is only given at the registration is unknown
    # here.
    image = os.environ.get("IMAGE") or read_settings().get("image", "")
    allowed = load_allowed()
    # A task's own image is always allowed.
    allowed = dataclasses.replace(allowed, images=(*allowed.images, image or "*"))
    image = config.kubernetes.image or image or UNKNOWN_IMAGE
    config = dataclasses.replace(config, kind="kubernetes")
    config = config.with_pods(image=image, namespace=namespace)
    spec = cluster_spec(with_filler_class(config), DOCTOR_NAME)["spec"]
    findings, unseen = run_checks(
        Setup(config, spec, namespace, service_account, {"pods": Decimal(1)}, allowed)
    )
    checked = Finding(f"namespace {namespace} is checked (--namespace)", GOOD)
    if unseen:
        findings.append(
            Finding(
                f"the kubeconfig's user may not see {', '.join(unseen)}, so nothing says whether "
                "a run could start; ask with an administrator's kubeconfig",
                UNKNOWN,
            )
        )
    is_bad = any(each.level == BAD for each in findings)
    if not is_bad and not unseen:
        findings.append(
            Finding(
                f"a run of {config.num_nodes} nodes could start in namespace {namespace} if its "
                "image is admitted and can be pulled",
                GOOD,
            )
        )
    order = (BAD, WARNING, UNKNOWN, GOOD)
    findings.sort(key=lambda each: order.index(each.level))
    status = 0
    if is_bad:
        status = 1
    elif unseen:
        status = 2
    return [f"{each}\n" for each in (checked, *findings)], status


def main(arguments: Sequence[str]) -> int:
    """Print the findings, and return the exit status."""
    parser = make_parser(
        "doctor",
        "tell whether a run could start on the Kubernetes cluster of the kubeconfig, and what "
        "keeps it from that",
        (
            (
                "--cluster",
                "of the runs, as for --cluster of a workflow: JSON, or a YAML or JSON file",
                "{}",
            ),
            ("--namespace", "of the tasks (default: that of --cluster, or the kubeconfig's)", ""),
            ("--service-account", "of the tasks (default flyte-ddp)", "flyte-ddp"),
        ),
        epilog="Exit status: 0 if a run could start, 1 if not, 2 if that cannot be told.",
    )
    options = parser.parse_args(arguments)
    config = cluster_config(read_object("--cluster", options.cluster))
    if options.namespace:
        config = config.with_pods(namespace=options.namespace)
    try:
        found, status = diagnose(config, options.service_account)
    except ClusterError as error:
        raise ConfigError(str(error)) from error
    sys.stdout.write("".join(found))
    return status
