"""Admission policy: the limits of what the inputs of a launch may name, part of the registered version. Opens nothing.

These inputs name machines, images, service accounts, secrets, parts of pods and URLs. Whoever creates a DaskCluster
creates any pod; ranks in a driver's pod find what only the driver may have; a Dask scheduler's answers are unpickled.
So the inputs are compared with a list before anything is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config.source_code import read_settings
from flyte_ddp.errors import ConfigError
from flyte_ddp.storage import redact_url

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
    # Names of the variables, labels and annotations of pods. A variable can make a worker load code, and an annotation
    # can have a secret injected.
    env: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    # In a pod alone:
    kinds: tuple[str, ...] = ("kubernetes",)  # of clusters
    addresses: tuple[str, ...] = ()  # of existing Dask schedulers
    urls: tuple[str, ...] = ("s3://*", "gs://*", "gcs://*", "abfs://*", "abfss://*", "az://*")  # of inputs


def load_allowed() -> Allowed:
    """Return the table of the settings.toml beside this package; the defaults where there is none.

    Its fields are checked when it is registered.
    """
    return Allowed(**{name: tuple(patterns) for name, patterns in read_settings().get("allowed", {}).items()})


def check_allowed(config: ClusterConfig, allowed: Allowed, own_namespace: str = "") -> None:
    """Compare the Kubernetes side of `config` with `allowed`. Another kind of cluster passes: see `check_kind`.

    Args:
        own_namespace: of this process's pod; "" outside Kubernetes.

    Raises:
        ConfigError: a value is not allowed; names all of them, and where they are allowed.
    """
    if config.resolved_kind == "kubernetes":
        _refuse(_findings(config, allowed, own_namespace))


def check_kind(config: ClusterConfig, allowed: Allowed) -> None:
    """Compare the kind of a cluster, and the address of an existing one, with `allowed`. For a process in a pod.

    Raises:
        ConfigError: it is not allowed.
    """
    kind, address = config.resolved_kind, config.resolved_address
    if kind == "local" and config.kind == "auto":
        return  # there is no Kubernetes here
    if not _matches(kind, allowed.kinds):
        _refuse([f"cluster.kind: expected {_shown(allowed.kinds, 'allowed.kinds')} in a pod, got {kind!r}"])
    if kind == "existing" and not _matches(address, allowed.addresses):
        expected = _shown(allowed.addresses, "allowed.addresses")
        _refuse([f"cluster.scheduler_address: expected {expected}, got {address!r}"])


def check_urls(urls: Mapping[str, str], allowed: Allowed) -> None:
    """Compare URLs, by the names of their inputs, with `allowed`. For a pod: its files are not the launcher's.

    Raises:
        ConfigError: one of them is not allowed; names all of them, and where they are allowed.
    """
    _refuse(
        f"{name}: expected {_shown(allowed.urls, 'allowed.urls')}, got {redact_url(url)!r}"
        for name, url in urls.items()
        # A chain such as filecache::dask://host opens more than the URL that it begins with.
        if url and ("::" in url or not _matches(url, allowed.urls))
    )


def _refuse(findings: Iterable[str]) -> None:
    if text := "; ".join(findings):
        raise ConfigError(f"{text} (settings.toml, table allowed, is part of the registered version)")


def _findings(config: ClusterConfig, allowed: Allowed, own_namespace: str) -> Iterator[str]:
    pods = config.kubernetes
    named = [
        ("image", pods.image, allowed.images, {"", os.environ.get(IMAGE_VARIABLE, "")}, "allowed.images"),
        ("namespace", pods.namespace, allowed.namespaces, {"", own_namespace}, "allowed.namespaces"),
        ("service_account", pods.service_account, allowed.service_accounts, {""}, "allowed.service_accounts"),
        *(("image_pull_secrets", name, allowed.secrets, set(), "allowed.secrets") for name in pods.image_pull_secrets),
        *(("env_from_secrets", name, allowed.secrets, set(), "allowed.secrets") for name in pods.env_from_secrets),
        *(("env", name, allowed.env, set(), "allowed.env") for name in pods.env),
        *(("labels", name, allowed.labels, set(), "allowed.labels") for name in pods.labels),
        *(("annotations", name, allowed.annotations, set(), "allowed.annotations") for name in pods.annotations),
    ]
    for field, value, patterns, defaults, table in named:
        if value not in defaults and not _matches(value, patterns):
            yield f"cluster.kubernetes.{field}: expected {_shown(patterns, table)}, got {value!r}"
    rules = [tuple(pattern.split(".")) for pattern in allowed.pod_template]
    for field in ("pod_template", "scheduler_pod_template"):
        for path in _paths(getattr(pods, field)):
            if not any(_covers(rule, path) for rule in rules):
                expected = _shown(allowed.pod_template, "allowed.pod_template")
                yield f"cluster.kubernetes.{field}: expected {expected}, got {'.'.join(path)}"


def _matches(value: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in patterns)


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
