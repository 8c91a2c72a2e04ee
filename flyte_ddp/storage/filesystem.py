"""fsspec file systems, opened with the task's storage configuration and with time limits."""

from __future__ import annotations

import asyncio
import contextlib
import pkgutil
import re
import sys
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from flyte_ddp.errors import ConfigError
from flyte_ddp.process.interpreter import call_before_exit
from flyte_ddp.storage.clients.azure import AZURE
from flyte_ddp.storage.clients.google import GOOGLE
from flyte_ddp.storage.clients.s3 import S3
from flyte_ddp.storage.failures import describe
from flyte_ddp.storage.limits import check_opening
from flyte_ddp.storage.redaction import redact_url


def open_filesystem(
    url: str, field: str = "url", *, anonymous: bool = False, **options: Any
) -> tuple[Any, str]:
    """Return the fsspec file system of the path or URL `url`, and the path in this file system.

    The file system has the task's storage configuration. It sends each request once, because
    `Storage.retry` repeats requests.

    Args:
        field: the name of the URL's field, for error messages.
        anonymous: True to send no credentials, for public buckets.
        options: arguments of the file system, which win over the arguments made here.

    Raises:
        ConfigError: the kind of URL is unknown, its package is missing, or the task's
            registration does not allow the URL (`limits`).
    """
    check_url(url, field)
    check_place(url, field)
    client = CLIENTS.get(fsspec.utils.get_protocol(url))
    try:
        # fsspec would read two colons in a path as a chain of file systems.
        if _is_local(url):
            file_system = LocalFileSystem(**options)
            return file_system, file_system._strip_protocol(url)
        if not client:
            file_system, path = fsspec.url_to_fs(url, **options)
            return file_system, path
        cls = pkgutil.resolve_name(client.file_system)
        in_url: dict[str, Any] = {}
        if client.has_options_in_urls:
            in_url = cls._get_kwargs_from_urls(url)
        file_system = cls(**{**in_url, **client.make_options(anonymous, url), **options})
    # fsspec does not know the protocol, or its package is missing.
    except (ValueError, ImportError) as error:
        remedy = ""
        if client and client.extra and isinstance(error, ImportError):
            remedy = f"; pip install 'flyte-ddp[{client.extra}]'"
        raise ConfigError(
            f"{field}: expected a path or a URL that fsspec knows, got {redact_url(url)!r}: "
            f"{describe(error)}{remedy}"
        ) from error
    if not hasattr(file_system, "stored_bytes"):  # fsspec shares its instances
        file_system.stored_bytes = 0  # progress of the present upload
        client.limit_requests(file_system)
    return file_system, file_system._strip_protocol(url)


def check_url(url: str, field: str) -> None:
    """Raise ConfigError for a URL without a host, bucket or path, for example because a variable
    was empty.
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
    """Refuse a place that this process may not open, as `limits.check_opening` does. All code that
    opens a place calls this function.
    """
    path = None
    if _is_local(url):
        path = LocalFileSystem._strip_protocol(url)
    check_opening(url, field, path, own)


def _is_local(url: str) -> bool:
    if "://" in url:
        return url.startswith(("file://", "local://"))
    # A protocol before two colons begins a chain, such as simplecache::/path.
    return url.partition("::")[0] not in fsspec.available_protocols()


# These protocols do not use fsspec's registry: another library, such as Flyte 2's SDK, may have put
# its own class there.
CLIENTS = {
    **dict.fromkeys(("s3", "s3a"), S3),
    **dict.fromkeys(("gs", "gcs"), GOOGLE),
    **dict.fromkeys(("abfs", "abfss", "az"), AZURE),
}


def list_client_modules(*values: object) -> list[str]:
    """Return the modules of the clients of all stores that URLs in `values` name, at any depth.

    The import of s3fs takes 2 s of processor time. It starts no thread and no event loop, and reads
    no credentials.
    """
    clients = [CLIENTS.get(scheme) for scheme in re.findall(r"(\w+)://", str(values))]
    return sorted({each.file_system.partition(":")[0] for each in clients if each})


def _close_sessions() -> None:
    """Close the connections of all file systems that fsspec shares in this process.

    flytekit opens file systems with an event loop of its own, which s3fs does not close. Their
    client would end a healthy process with an error message ("Unclosed client session").
    """
    for client in (S3, GOOGLE):
        for path, session in client.sessions.items():
            _close_sessions_of(path, session)


def _close_sessions_of(path: str, session: str) -> None:
    if path.partition(":")[0] not in sys.modules:
        return
    # The process is ending, so an error here could only hide its result.
    with contextlib.suppress(Exception):
        for file_system in list(pkgutil.resolve_name(path)._cache.values()):
            with contextlib.suppress(Exception):
                loop = file_system.loop or file_system.storage_options["loop"]
                if loop.is_running():
                    close = getattr(file_system, session).__aexit__(None, None, None)
                    asyncio.run_coroutine_threadsafe(close, loop).result(timeout=2)


# `atexit.register` would be too late: flytekit's own handler, which ends its loop, would run first.
call_before_exit(_close_sessions)
