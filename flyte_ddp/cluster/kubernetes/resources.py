"""Quantities of CPU, memory and devices, as pods and quotas have them, in numbers. Asks nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from flyte_ddp.errors import PreflightError


def sum_requests(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the sum of the containers' requests, by resource; a limit without a request counts as
    one.
    """
    total: dict[str, Decimal] = {}
    for container in pod["containers"]:
        resources = container.get("resources", {})
        for resource, amount in {
            **resources.get("limits", {}),
            **resources.get("requests", {}),
        }.items():
            total[resource] = total.get(resource, Decimal(0)) + quantity(amount)
    return total


def quantity(amount: object) -> Decimal:
    """Return a Kubernetes quantity, such as 500m, 2 or 8Gi, as a number of cores, bytes or devices.

    Raises:
        PreflightError: `amount` is not a quantity; only `pod_template` can hold such a thing.
    """
    # imports a second of client, which the requests need anyway
    from kubernetes.utils import parse_quantity

    try:
        return Decimal(parse_quantity(str(amount)))
    except ValueError as error:
        raise PreflightError([f"{error}; correct the resources in `pod_template`"]) from error


def sum_needs(pods: Iterable[tuple[int, Mapping[str, Decimal]]]) -> dict[str, Decimal]:
    """Return the resources of all pods, given as (count, requests), by the names that quotas
    use.
    """
    needs: dict[str, Decimal] = {"pods": Decimal(0)}
    for count, requests in pods:
        needs["pods"] += count
        for resource, amount in requests.items():
            names = [f"requests.{resource}", f"limits.{resource}"]
            if resource in ("cpu", "memory"):
                names.append(resource)
            for name in names:
                needs[name] = needs.get(name, Decimal(0)) + count * amount
    return needs


def short(amount: Decimal) -> str:
    """Format a number for people: bytes in Gi, everything else as it is."""
    if amount >= 1 << 20:
        return f"{float(amount / (1 << 30)):.4g}Gi"
    return f"{float(amount):g}"


def quantities(requests: Mapping[str, str]) -> dict[str, Decimal]:
    """Return requests, such as of a pod's container, as numbers."""
    return {resource: quantity(amount) for resource, amount in requests.items()}


def describe(requests: Mapping[str, Decimal]) -> str:
    return ", ".join(f"{short(amount)} {resource}" for resource, amount in requests.items())
