"""fsspec file systems, opened with the task's storage configuration and with time limits."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import pkgutil
import re
import sys
import threading
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from flyte_ddp.errors import ConfigError
from flyte_ddp.storage.clients.azure import AZURE
from flyte_ddp.storage.clients.google import GOOGLE
from flyte_ddp.storage.clients.s3 import S3
from flyte_ddp.storage.failures import describe
from flyte_ddp.storage.limits import check_opening
from flyte_ddp.storage.urls import redact_url


def open_filesystem(
    url: str, field: str = "url", *, anonymous: bool = False, **options: Any
) -> tuple[Any, str]:
    """Return (fsspec file system, path in it) of the path or URL `url`, with the task's storage
    configuration.

    Each request is tried once: `Storage.retry` is what tries again.

    Args:
        field: named in errors.
        anonymous: do without credentials, for public buckets.
        options: for fsspec, over those made here.

    Raises:
        ConfigError: no such kind of URL is known here, its package is missing, or the task's
            registration does not allow it (`limits`).
    """
    check_url(url, field)
    check_place(url, field)
    client = CLIENTS.get(fsspec.utils.get_protocol(url))
    try:
        # fsspec takes two colons in a path for a chain of file systems
        if _is_local(url):
            file_system = LocalFileSystem(**options)
            return file_system, file_system._strip_protocol(url)
        if not client:
            file_system, path = fsspec.url_to_fs(url, **options)
            return file_system, path
        cls = pkgutil.resolve_name(client.file_system)
        in_url = cls._get_kwargs_from_urls(url) if client.has_options_in_urls else {}
        file_system = cls(**{**in_url, **client.make_options(anonymous, url), **options})
    except (
        ValueError,
        ImportError,
    ) as error:  # a protocol that fsspec does not know or has no package for
        extra = client.extra if client and isinstance(error, ImportError) else ""
        remedy = f"; pip install 'flyte-ddp[{extra}]'" if extra else ""
        raise ConfigError(
            f"{field}: expected a path or a URL that fsspec knows, got {redact_url(url)!r}: "
            f"{describe(error)}{remedy}"
        ) from error
    if not hasattr(file_system, "stored_bytes"):  # fsspec shares its instances
        file_system.stored_bytes = 0  # of the file that is being uploaded
        client.limit_requests(file_system)
    return file_system, file_system._strip_protocol(url)


def check_url(url: str, field: str) -> None:
    """Raise ConfigError for a URL without its host, bucket or path, such as one made of an empty
    variable.
    """
    scheme, _, rest = url.rpartition("::")[2].partition(":")
    is_remote = scheme in fsspec.available_protocols() and scheme not in ("file", "local", "memory")
    is_empty = not url or (scheme in ("file", "local") and rest == "//")
    if is_empty or (is_remote and ":" in url and not re.match(r"//[^/?#]", rest)):
        raise ConfigError(
            f"{field}: expected a path, or a URL with a host or bucket such as "
            f"s3://bucket/directory, got {redact_url(url)!r}"
        )


def check_place(url: str, field: str, *own: str) -> None:
    """Refuse a place that this process may not open, as `limits.check_opening`. Called by all that
    opens one.
    """
    check_opening(url, field, LocalFileSystem._strip_protocol(url) if _is_local(url) else None, own)


def _is_local(url: str) -> bool:
    if "://" in url:
        return url.startswith(("file://", "local://"))
    # else a chain, such as simplecache::/path
    return url.partition("::")[0] not in fsspec.available_protocols()


# Never what is registered under these names: another library, such as Flyte 2's SDK, may have put
# its own class there.
CLIENTS = {
    **dict.fromkeys(("s3", "s3a"), S3),
    **dict.fromkeys(("gs", "gcs"), GOOGLE),
    **dict.fromkeys(("abfs", "abfss", "az"), AZURE),
}


def _close_sessions() -> None:
    """Close the connections of all file systems that this process has shared.

    flytekit opens some whose loop is its own; s3fs does not close those, and their client ends a
    healthy process with an error message ("Unclosed client session").
    """
    for client in (S3, GOOGLE):
        for path, session in client.sessions.items():
            _close_sessions_of(path, session)


def _close_sessions_of(path: str, session: str) -> None:
    if path.partition(":")[0] not in sys.modules:
        return
    # The process is ending: nothing is left that could fail.
    with contextlib.suppress(Exception):
        for file_system in list(pkgutil.resolve_name(path)._cache.values()):
            with contextlib.suppress(Exception):
                loop = file_system.loop or file_system.storage_options["loop"]
                if loop.is_running():
                    close = getattr(file_system, session).__aexit__(None, None, None)
                    asyncio.run_coroutine_threadsafe(close, loop).result(timeout=2)


# Not `atexit.register`: flytekit's own handler, which ends its loop, would come first.
getattr(threading, "_register_atexit", atexit.register)(_close_sessions)
