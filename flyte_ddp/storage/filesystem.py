"""fsspec file systems, opened with the task's storage configuration and with time limits."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
import threading
from typing import Any

import fsspec

from flyte_ddp.errors import ConfigError
from flyte_ddp.storage.environment import storage_environment
from flyte_ddp.storage.failures import describe
from flyte_ddp.storage.urls import redact_url

CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 30.0  # seconds without a byte
SERVER_WORK_TIMEOUT = 300.0  # seconds in which a store puts parts together or copies a file, perhaps without a byte
MIN_UPLOAD_RATE = 128 << 10  # bytes per second of each of the parts on their way at once


def open_filesystem(
    url: str,
    field: str = "url",
    *,
    num_tries: int = 4,
    request_timeout: float = 0.0,
    anonymous: bool = False,
    endpoint_url: str = "",
    **options: Any,
) -> tuple[Any, str]:
    """Return (fsspec file system, path in it) of the path or URL `url`, with the task's storage configuration.

    Args:
        field: named in errors.
        num_tries: tries of each request to S3 before its error is raised.
        request_timeout: seconds without a byte before a request to S3 fails; 0 for `READ_TIMEOUT`.
        anonymous: do without credentials, for public buckets.
        endpoint_url: of the store; "" for that of the environment.
        options: for fsspec, over those made here.

    Raises:
        ConfigError: no such kind of URL is known here.
    """
    protocol = fsspec.utils.get_protocol(url)
    request_timeout = request_timeout or READ_TIMEOUT
    own: dict[str, Any] = {}
    if protocol in ("s3", "s3a"):
        own = _s3_options(num_tries, request_timeout, anonymous)
    elif protocol in ("gs", "gcs") and anonymous:
        own["token"] = "anon"
    elif protocol in ("abfs", "abfss", "az", "adl"):
        own = _azure_options(anonymous)
    if endpoint_url:
        own["endpoint_url"] = endpoint_url
    try:
        if _is_local(url):  # fsspec takes two colons in a path for a chain of file systems
            file_system = fsspec.filesystem("file", **options)
            return file_system, file_system._strip_protocol(url)
        file_system, path = fsspec.url_to_fs(url, **{**own, **options})
    except (ValueError, ImportError) as error:  # a protocol that fsspec does not know or has no package for
        raise ConfigError(
            f"{field}: expected a path or a URL that fsspec knows, got {redact_url(url)!r}: {describe(error)}"
        ) from error
    if protocol in ("s3", "s3a"):
        file_system.retries = 1  # s3fs has tries of its own, around those of its client
        _limit_requests(file_system, request_timeout, num_tries)
    return file_system, path


def _s3_options(num_tries: int, timeout: float, anonymous: bool) -> dict[str, Any]:
    # As arguments, not by the client's environment: fsspec shares file systems with equal arguments, and one that was
    # opened before the keys changed would keep the old ones.
    found = storage_environment()
    config: dict[str, Any] = {
        "connect_timeout": min(CONNECT_TIMEOUT, timeout),
        "read_timeout": timeout,
        "retries": {"mode": "standard", "total_max_attempts": num_tries},
    }
    if style := found.get("FLYTE_AWS_ADDRESSING_STYLE"):
        config["s3"] = {"addressing_style": style.lower()}
    options: dict[str, Any] = {"config_kwargs": config, "use_listings_cache": False}
    if endpoint := found.get("AWS_ENDPOINT_URL_S3") or found.get("AWS_ENDPOINT_URL"):
        options["endpoint_url"] = endpoint
    if anonymous:
        options["anon"] = True
    elif "AWS_ACCESS_KEY_ID" in found:
        options["key"] = found["AWS_ACCESS_KEY_ID"]
        options["secret"] = found.get("AWS_SECRET_ACCESS_KEY")
        options["token"] = found.get("AWS_SESSION_TOKEN")
    return options


def _is_local(url: str) -> bool:
    if "://" in url:
        return url.startswith(("file://", "local://"))
    return url.partition("::")[0] not in fsspec.available_protocols()  # else a chain, such as simplecache::/path


# Requests for which the store works on data that it has: their answer takes the longer, the larger the file is.
_SERVER_WORK = {
    "complete_multipart_upload": "CompleteMultipartUpload",
    "copy_object": "CopyObject",
    "upload_part_copy": "UploadPartCopy",
}


def _limit_requests(file_system: Any, timeout: float, num_tries: int) -> None:
    """End each request of an s3fs file system that gets no answer, and count the bytes that are stored.

    The client's own timeout begins when the whole request is sent. It never ends one to a silent store: the client
    waits for permission to send the body ("100-continue") or for room in the connection.
    """
    if "_call_s3" in vars(file_system):  # fsspec shares its instances
        return
    call = file_system._call_s3
    file_system.stored_bytes = {}  # of the files that are being uploaded, by path

    async def call_within_limit(method: str, *args: Any, **kwargs: Any) -> Any:
        body = kwargs.get("Body") or b""
        limit = timeout * num_tries + len(body) / MIN_UPLOAD_RATE
        if operation := _SERVER_WORK.get(method):
            limit = SERVER_WORK_TIMEOUT * num_tries
            await file_system.set_session()
            client = await file_system.get_s3(kwargs.get("Bucket"))
            client.meta.events.register(f"before-call.s3.{operation}", _wait_for_work, unique_id=operation)
        try:
            answer = await asyncio.wait_for(call(method, *args, **kwargs), limit)
        except asyncio.TimeoutError:
            raise ConnectionError(f"no answer to {method} for {limit:.0f} s") from None
        path = f"{kwargs.get('Bucket')}/{kwargs.get('Key')}"
        if method in ("put_object", "upload_part") and path in file_system.stored_bytes:
            file_system.stored_bytes[path] += len(body)
        return answer

    file_system._call_s3 = call_within_limit


def _wait_for_work(context: dict[str, Any], **_: Any) -> None:
    """Replace the client's timeout for one request."""
    context["read_timeout"] = SERVER_WORK_TIMEOUT


def _azure_options(anonymous: bool) -> dict[str, Any]:
    prefix = "AZURE_STORAGE_"
    found = storage_environment()
    options = {name.removeprefix(prefix).lower(): value for name, value in found.items() if name.startswith(prefix)}
    return {**options, "anon": anonymous}


def _close_sessions() -> None:
    """Close the connections of all file systems that this process has shared.

    flytekit opens some whose loop is its own; s3fs does not close those, and their client ends a healthy process with
    an error message ("Unclosed client session").
    """
    for module, name, session in (("s3fs", "S3FileSystem", "_s3creator"), ("gcsfs", "GCSFileSystem", "_session")):
        cls = getattr(sys.modules.get(module), name, None)
        for file_system in list(getattr(cls, "_cache", {}).values()):
            with contextlib.suppress(Exception):  # the process is ending: there is nothing left to fail
                loop = file_system.loop or file_system.storage_options["loop"]
                if loop.is_running():
                    close = getattr(file_system, session).__aexit__(None, None, None)
                    asyncio.run_coroutine_threadsafe(close, loop).result(timeout=2)


# Not `atexit.register`: flytekit's own handler, which ends its loop, would come first.
getattr(threading, "_register_atexit", atexit.register)(_close_sessions)
