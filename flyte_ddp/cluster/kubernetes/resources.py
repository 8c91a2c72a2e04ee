"""Numbers for the quantities of CPU, memory and devices in pods and quotas. Sends no requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from flyte_ddp.errors import PreflightError


def sum_requests(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the pod's requests by resource, with `pods` as 1. A limit without a request counts as
    a request.
    """
    given = [each.get("resources", {}) for each in pod["containers"]]
    return add(
        [
            {"pods": Decimal(1)},
            *(quantities({**each.get("limits", {}), **each.get("requests", {})}) for each in given),
        ]
    )


def quantity(amount: object) -> Decimal:
    """Return a Kubernetes quantity, such as 500m, 2 or 8Gi, as a number of cores, bytes or devices.

    Raises:
        PreflightError: `amount` is not a quantity. Only `pod_template` can contain such a value.
    """
    # This import takes a second, but the requests need the client anyway.
    from kubernetes.utils import parse_quantity

    try:
        return Decimal(parse_quantity(str(amount)))
    except ValueError as error:
        raise PreflightError([f"{error}; correct the resources in `pod_template`"]) from error


def quantities(requests: Mapping[str, str]) -> dict[str, Decimal]:
    """Return the requests of a container, for example, as numbers."""
    return {resource: quantity(amount) for resource, amount in requests.items()}


def add(amounts: Iterable[Mapping[str, Decimal]]) -> dict[str, Decimal]:
    """Return the sums by resource."""
    total: dict[str, Decimal] = defaultdict(Decimal)
    for each in amounts:
        for resource, amount in each.items():
            total[resource] += amount
    return dict(total)


def short(amount: Decimal) -> str:
    """Format a number for people: bytes in Gi, everything else as it is."""
    if amount >= 1 << 20:
        return f"{float(amount / (1 << 30)):.4g}Gi"
    return f"{float(amount):g}"


def describe(requests: Mapping[str, Decimal]) -> str:
    return ", ".join(f"{short(requests[each])} {each}" for each in requests if each != "pods")
