"""The URLs and paths that this process may open, if a task's registration limits them.

The list travels with the storage configuration in the environment, from a task to its agents and
ranks. All code that opens a URL asks this module first, wherever the URL came from. The module
opens nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from flyte_ddp.code.source_code import find_project
from flyte_ddp.errors import ConfigError
from flyte_ddp.storage.redaction import redact_url

LIMITS_VARIABLE = "FLYTE_DDP_ALLOWED_URLS"
WHERE = "(table `allowed` of settings.toml, which is part of the registered version)"
SAME_STORES = {"s3a": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs"}
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_lock = threading.Lock()
_Limits = dict[str, dict[str, list[str]]]  # limits by the id of the task in this process
# The beginning of a URL or of a path, or a step upwards anywhere.
_PLACE = re.compile(
    r"\s*([a-z][\w+.-]*(://|::)|(file|local):|/|\.{1,2}/|~[^\s/]*(/|\s*$))"
    r"|(.*[/\\])?\s*\.\.\s*([/\\]|$)",
    re.I | re.S,
)


@contextlib.contextmanager
def limit_urls(allowed: Sequence[str], own: Sequence[str]) -> Iterator[None]:
    """Limit the URLs that this process opens in the block. The limits also apply to processes that
    get its storage configuration.

    If several tasks run in this process, each task may open the places of all.

    Args:
        allowed: patterns of URLs, as in the table `allowed`.
        own: URLs and directories that belong to the task itself.
    """
    task = os.urandom(8).hex()
    limits = {"allowed": list(allowed), "own": [each for each in own if each]}
    with _lock:
        _set({**_read(), task: limits})
    try:
        yield
    finally:
        with _lock:
            _set({key: value for key, value in _read().items() if key != task})


def permit(*places: str) -> None:
    """Let a process with limits also open places that its own code has made or chosen."""
    with _lock:
        limits = _read()
        for task in limits.values():
            task["own"] += places
        _set(limits)


def check_places(places: Iterable[tuple[str, str]], allowed: Sequence[str] | None = None) -> None:
    """Check URLs and paths that a user gave, before anything is opened. The task's own URLs are
    always allowed.

    Args:
        places: pairs of a field's name and a URL or path.
        allowed: patterns; by default this process's patterns, if it has limits.

    Raises:
        ConfigError: some places are not allowed. The message names all of them.
    """
    limits = _read()
    if allowed is None:
        if not limits:
            return
        allowed = _merge(limits, "allowed")
    own = _merge(limits, "own")
    findings = []
    for name, url in places:
        if url and not _is_listed(url, allowed) and not _is_own_url(url, own):
            findings.append(_describe(name, url, allowed))
    if findings:
        raise ConfigError(f"{'; '.join(findings)} {WHERE}")


def check_opening(url: str, field: str, path: str | None, own: Sequence[str]) -> None:
    """Refuse a place that this process may not open.

    Args:
        path: the path of `url` on this machine's disks; None for a URL of another file system.
        own: more places that belong to the task.

    Raises:
        ConfigError: the place is neither allowed nor the task's own. The message names `field`.
    """
    limits = _read()
    if not limits:
        return
    allowed = _merge(limits, "allowed")
    places = [*_merge(limits, "own"), *own]
    if path is not None:
        is_known = _is_own_path(path, places) or _is_listed_path(path, allowed)
    else:
        is_known = _is_own_url(url, places) or _is_listed(url, allowed)
    if not is_known:
        raise ConfigError(f"{_describe(field, url, allowed)} {WHERE}")


def looks_like_place(text: str) -> bool:
    """Return whether `text` may be a URL or a path that leads out of a directory."""
    return any(_PLACE.match(each) for each in _decodings(text))


def covers(rule: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether each part of a rule matches the part at the same position. Further parts are
    covered too.
    """
    return len(rule) <= len(parts) and all(
        fnmatchcase(part, pattern) for part, pattern in zip(parts, rule, strict=False)
    )


def _read() -> _Limits:
    limits: _Limits = json.loads(os.environ.get(LIMITS_VARIABLE) or "{}")
    return limits


def _set(limits: _Limits) -> None:
    if limits:
        os.environ[LIMITS_VARIABLE] = json.dumps(limits)  # at no moment is there none
    else:
        os.environ.pop(LIMITS_VARIABLE, None)


def _merge(limits: _Limits, name: str) -> list[str]:
    """Return the different places under `name` of all tasks."""
    return list(dict.fromkeys(each for task in limits.values() for each in task[name]))


def _describe(name: str, url: str, allowed: Sequence[str]) -> str:
    expected = "none, because allowed.urls is empty"
    if allowed:
        expected = f"one of allowed.urls ({', '.join(allowed)})"
    return f"{name}: expected {expected}, got {redact_url(url)!r}"


def _is_listed(url: str, allowed: Sequence[str]) -> bool:
    return not _is_ambiguous(url) and any(covers(rule, _split_url(url)) for rule in _rules(allowed))


def _is_listed_path(path: str, allowed: Sequence[str]) -> bool:
    """Return whether the path and the target of its links are both below an allowed directory."""
    parts = _split_url(os.path.abspath(path))
    for rule in _rules(allowed):
        if covers(rule, parts):
            base = os.path.realpath("/".join(parts[1 : max(1, len(rule))]) or "/")
            if _is_below(os.path.realpath(path), base):
                return True
    return False


def _is_own_url(url: str, own: Sequence[str]) -> bool:
    parts = _split_url(url)
    places = [_split_url(each) for each in own if "://" in each]
    return not _is_ambiguous(url) and any(parts[: len(each)] == each for each in places)


def _is_own_path(path: str, own: Sequence[str]) -> bool:
    project = find_project()
    places = [each.removeprefix("file://") for each in own]
    places = [each for each in places if "://" not in each]
    if project:
        places.append(str(project))
    places.append(tempfile.gettempdir())
    real = os.path.realpath(path)
    bases = [os.path.realpath(each) for each in places]
    return any(base != "/" and _is_below(real, base) for base in bases)


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _rules(allowed: Sequence[str]) -> list[tuple[str, ...]]:
    # Each pattern covers everything below it, so a * at its end adds nothing.
    rules = []
    for pattern in allowed:
        parts = _split_url(pattern)
        if parts[-1] == "*":
            parts = parts[:-1]
        rules.append(parts)
    return rules


def _decodings(text: str) -> Iterator[str]:
    """Yield a text, and the results of decoding its %-encoding until nothing is left to decode."""
    yield text
    decoded = urllib.parse.unquote(text)
    if decoded != text:
        yield from _decodings(decoded)


def _is_ambiguous(url: str) -> bool:
    """Return whether a URL may open another place than it seems to. Stores and servers normalize
    URLs in their own ways.

    A chain such as filecache::dask://host opens more than the URL that it begins with.
    """
    *_, plain = _decodings(url)
    steps = re.split(r"[/?#;]", plain.partition("://")[2] or plain)
    return (
        "::" in plain or "\\" in plain or not plain.isprintable() or "." in steps or ".." in steps
    )


def _split_url(url: str) -> tuple[str, ...]:
    """Return the scheme, the host and the path's names, alike for all URLs of the same place. A
    local path has no host.
    """
    scheme, separator, rest = url.partition("://")
    if not separator and url != "*":
        return "file", *url.split("/")
    scheme = SAME_STORES.get(scheme.lower(), scheme.lower())
    if scheme in DEFAULT_PORTS:
        host, slash, path = re.split("[?#]", rest)[0].partition("/")
        rest = host.rpartition("@")[2].lower().removesuffix(DEFAULT_PORTS[scheme]) + slash + path
    if not rest:
        return (scheme,)
    return scheme, *rest.rstrip("/").split("/")
