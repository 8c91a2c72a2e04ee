"""Admission policy: the limits of a run's requests to Kubernetes, part of the registered version. Opens nothing.

Inputs given at a launch name images, service accounts, secrets, namespaces and parts of pods. Whoever creates a
DaskCluster creates any pod, so these are compared with a list before anything is created.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import ConfigError

IMAGE_VARIABLE = "FLYTE_INTERNAL_IMAGE"  # the image of this task, as registered


@dataclass(frozen=True)
class Allowed:
    """Patterns of what a run may name. `*` matches any text. Defaults are always allowed."""

    images: tuple[str, ...] = ()  # besides the task's own
    service_accounts: tuple[str, ...] = ()  # besides the namespace's default
    secrets: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()  # besides the task's own
    # Paths in both templates, such as tolerations or containers.worker.resources, each with all below it.
    pod_template: tuple[str, ...] = ()


def check_allowed(config: ClusterConfig, allowed: Allowed, own_namespace: str = "") -> None:
    """Compare the Kubernetes side of `config` with `allowed`. Another kind of cluster passes.

    Args:
        own_namespace: of this process's pod; "" outside Kubernetes.

    Raises:
        ConfigError: a value is not allowed; names all of them, and where they are allowed.
    """
    if config.resolved_kind != "kubernetes":
        return
    findings = list(_findings(config, allowed, own_namespace))
    if findings:
        raise ConfigError("; ".join(findings) + " (settings.toml, table allowed, is part of the registered version)")


def _findings(config: ClusterConfig, allowed: Allowed, own_namespace: str) -> Iterator[str]:
    pods = config.kubernetes
    named = [
        ("image", pods.image, allowed.images, {"", os.environ.get(IMAGE_VARIABLE, "")}, "allowed.images"),
        ("namespace", pods.namespace, allowed.namespaces, {"", own_namespace}, "allowed.namespaces"),
        ("service_account", pods.service_account, allowed.service_accounts, {""}, "allowed.service_accounts"),
        *(("image_pull_secrets", name, allowed.secrets, set(), "allowed.secrets") for name in pods.image_pull_secrets),
        *(("env_from_secrets", name, allowed.secrets, set(), "allowed.secrets") for name in pods.env_from_secrets),
    ]
    for field, value, patterns, defaults, table in named:
        if value not in defaults and not any(fnmatchcase(value, pattern) for pattern in patterns):
            yield f"cluster.kubernetes.{field}: expected {_shown(patterns, table)}, got {value!r}"
    rules = [tuple(pattern.split(".")) for pattern in allowed.pod_template]
    for field in ("pod_template", "scheduler_pod_template"):
        for path in _paths(getattr(pods, field)):
            if not any(_covers(rule, path) for rule in rules):
                expected = _shown(allowed.pod_template, "allowed.pod_template")
                yield f"cluster.kubernetes.{field}: expected {expected}, got {'.'.join(path)}"


def _shown(patterns: tuple[str, ...], table: str) -> str:
    return f"one of {table} ({', '.join(patterns)})" if patterns else f"none, because {table} is empty"


def _covers(rule: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Compare part by part: a container may have a dot in its name."""
    return len(rule) <= len(path) and all(fnmatchcase(name, part) for name, part in zip(path, rule, strict=False))


def _paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value that a pod template sets, with the names of named things in a list."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _paths(each, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) and "name" in each for each in value):
        for each in value:
            rest = {key: inner for key, inner in each.items() if key != "name"}
            yield from _paths(rest, (*path, str(each["name"])))
    elif path:
        yield path
