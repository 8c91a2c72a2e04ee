"""fsspec file systems, opened with the task's storage configuration and with time limits."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import pkgutil
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from flyte_ddp.errors import ConfigError
from flyte_ddp.storage.environment import storage_environment
from flyte_ddp.storage.failures import describe
from flyte_ddp.storage.limits import check_opening
from flyte_ddp.storage.urls import redact_url

T = TypeVar("T")

CONNECT_TIMEOUT = 10.0  # seconds, enough for another continent
READ_TIMEOUT = 30.0  # seconds without a byte: a connection that was cut without notice is given up
# seconds in which a store puts the parts of a file together, perhaps without a byte
SERVER_WORK_TIMEOUT = 300.0
MIN_UPLOAD_RATE = 128 << 10  # bytes per second of each of the parts on their way at once


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


def _s3_options(anonymous: bool, url: str) -> dict[str, Any]:
    # As arguments, not by the client's environment: fsspec shares file systems with equal
    # arguments, and one that was opened before the keys changed would keep the old ones.
    found = storage_environment()
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "retries": {"mode": "standard", "total_max_attempts": 1},
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


async def _limit(
    file_system: Any, what: str, request: Awaitable[T], num_bytes: int, limit: float
) -> T:
    """Await `request` for `limit` seconds, and the time that its `num_bytes` may take, which then
    count as stored.
    """
    limit += num_bytes / MIN_UPLOAD_RATE
    try:
        answer = await asyncio.wait_for(request, limit)
    except asyncio.TimeoutError:
        raise ConnectionError(f"no answer to {what} for {limit:.0f} s") from None
    file_system.stored_bytes += num_bytes
    return answer


def _limit_s3_requests(file_system: Any) -> None:
    """End each request of an s3fs file system that gets no answer, and count the bytes that are
    stored.

    The client's own timeout begins when the whole request is sent. It never ends one to a silent
    store: the client waits for permission to send the body ("100-continue") or for room in the
    connection.
    """
    call = file_system._call_s3
    file_system.retries = 1  # s3fs has tries of its own, around those of its client

    async def call_within_limit(method: str, *args: Any, **kwargs: Any) -> Any:
        limit = READ_TIMEOUT
        if method == "complete_multipart_upload":  # the longer, the larger the file is
            limit = SERVER_WORK_TIMEOUT
            await file_system.set_session()
            client = await file_system.get_s3(kwargs.get("Bucket"))
            event = "before-call.s3.CompleteMultipartUpload"
            client.meta.events.register(
                event,
                # in place of the client's own timeout, for this request
                lambda context, **_: context.update(read_timeout=SERVER_WORK_TIMEOUT),
                unique_id=event,
            )
        num_bytes = len(kwargs.get("Body") or b"")
        return await _limit(file_system, method, call(method, *args, **kwargs), num_bytes, limit)

    file_system._call_s3 = call_within_limit


def _google_options(anonymous: bool, url: str) -> dict[str, Any]:
    import aiohttp

    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT)
    return {
        "requests_timeout": limits,
        "use_listings_cache": False,
        **({"token": "anon"} if anonymous else {}),
    }


def _limit_google_requests(file_system: Any) -> None:
    """Let a gcsfs file system try once, in silence, end uploads without an answer, and name a
    missing bucket.
    """
    send = type(file_system)._request.__wrapped__  # below its tries, which log a traceback each

    async def request(method: str, path: str, *args: Any, data: Any = None, **kwargs: Any) -> Any:
        call = send(file_system, method, path, *args, data=data, **kwargs)
        # else the client's own timeout, which begins when all is sent, is enough
        if data is not None:
            call = _limit(file_system, method, call, len(data), READ_TIMEOUT)
        try:
            return await call
        except FileNotFoundError as error:
            # Of a file or of its bucket? A listing tells.
            if method == "GET" and path.endswith("/o"):
                error.error_code = "NoSuchBucket"  # type: ignore[attr-defined]
            elif bucket := re.search(r"/b/([^/?]+)", file_system._format_path(path, args)):
                await request("GET", "b/{}/o", bucket[1], maxResults=1)
            raise

    file_system._request = request


def _azure_options(anonymous: bool, url: str) -> dict[str, Any]:
    """Return the options for the account that `url` names, or for the environment's. Keys of one
    account are not sent to another one.
    """
    prefix = "AZURE_STORAGE_"
    found = storage_environment()
    options = {
        name.removeprefix(prefix).lower(): value
        for name, value in found.items()
        if name.startswith(prefix)
    }
    named = re.match(r"[^/?#]*@([^./?#]+)", url.partition("://")[2])
    in_connection = re.search("AccountName=([^;]*)", options.get("connection_string", ""))
    own = options.get("account_name") or (in_connection[1] if in_connection else "")
    if named and named[1] != own:
        options["account_name"] = named[1]
        for name in ("account_key", "sas_token", "connection_string") if own else ():
            options.pop(name, None)
    limits = {"connection_timeout": CONNECT_TIMEOUT, "read_timeout": READ_TIMEOUT}
    # parts of 4 MB; by default some thousands, which share the time that each may take
    limits["max_concurrency"] = 8
    return {**options, **limits, "use_listings_cache": False, "anon": anonymous}


def _limit_azure_requests(file_system: Any) -> None:
    """Let an adlfs file system try once, with its timeouts for all requests, and end those that get
    no answer.
    """
    # its error says what its ten lines of warning say
    logging.getLogger("azure.identity").setLevel(logging.ERROR)
    client = file_system.service_client
    client._config.retry_policy.total_retries = 0
    transport = client._pipeline._transport
    transport.connection_config.timeout = CONNECT_TIMEOUT
    transport.connection_config.read_timeout = READ_TIMEOUT
    send = transport.send

    async def send_within_limit(request: Any, **kwargs: Any) -> Any:
        num_bytes = int(request.headers.get("Content-Length", 0))
        return await _limit(
            file_system, request.method, send(request, **kwargs), num_bytes, READ_TIMEOUT
        )

    transport.send = send_within_limit


def _put_in_google(file_system: Any, path: str, contents: bytes, tag: str) -> None:
    bucket, name, _ = file_system.split_path(path)
    url = f"{file_system._location}/upload/storage/v1/b/{bucket}/o"
    file_system.call(
        "POST", url, uploadType="media", name=name, ifGenerationMatch=tag or "0", data=contents
    )


def _put_in_azure(file_system: Any, path: str, contents: bytes, tag: str) -> None:
    from azure.core import MatchConditions

    condition = (
        {"etag": tag, "match_condition": MatchConditions.IfNotModified}
        if tag
        else {"overwrite": False}
    )
    file_system.pipe_file(path, contents, **condition)


@dataclass(frozen=True)
class Client:
    """How a kind of store is opened, and how it puts a file on a condition."""

    file_system: str  # its class
    make_options: Callable[[bool, str], dict[str, Any]]  # whether anonymous, and the URL
    limit_requests: Callable[[Any], None]
    tag: str  # what every put changes in a file's `info`
    # contents, if `tag` is still the given one, or there is no file for ""
    put: Callable[[Any, str, bytes, str], None]
    has_options_in_urls: bool = True  # such as Azure's account
    extra: str = ""  # that brings the package


# Never what is registered under these names: another library, such as Flyte 2's SDK, may have put
# its own there. Nor gcsfs' own choice, which asks another service for the kind of each bucket, and
# warns if that is away.
_S3 = Client(
    "s3fs:S3FileSystem",
    _s3_options,
    _limit_s3_requests,
    "ETag",
    lambda file_system, path, contents, tag: file_system.pipe_file(
        path, contents, **({"IfMatch": tag} if tag else {"IfNoneMatch": "*"})
    ),
)
_GOOGLE = Client(
    "gcsfs:core.GCSFileSystem",
    _google_options,
    _limit_google_requests,
    "generation",
    _put_in_google,
    False,
    "gcs",
)
_AZURE = Client(
    "adlfs:AzureBlobFileSystem",
    _azure_options,
    _limit_azure_requests,
    "etag",
    _put_in_azure,
    extra="azure",
)
CLIENTS = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("abfs", "abfss", "az"), _AZURE),
}


def _close_sessions() -> None:
    """Close the connections of all file systems that this process has shared.

    flytekit opens some whose loop is its own; s3fs does not close those, and their client ends a
    healthy process with an error message ("Unclosed client session").
    """
    google = "GCSFileSystem", "_session"  # flytekit's, and ours
    for module, name, session in (
        ("s3fs", "S3FileSystem", "_s3creator"),
        ("gcsfs", *google),
        ("gcsfs.core", *google),
    ):
        cls = getattr(sys.modules.get(module), name, None)
        for file_system in list(getattr(cls, "_cache", {}).values()):
            # the process is ending: there is nothing left to fail
            with contextlib.suppress(Exception):
                loop = file_system.loop or file_system.storage_options["loop"]
                if loop.is_running():
                    close = getattr(file_system, session).__aexit__(None, None, None)
                    asyncio.run_coroutine_threadsafe(close, loop).result(timeout=2)


# Not `atexit.register`: flytekit's own handler, which ends its loop, would come first.
getattr(threading, "_register_atexit", atexit.register)(_close_sessions)
