"""The client of Google Cloud Storage, gcsfs, and the private names of it that are used."""

from __future__ import annotations

import re
from typing import Any

from flyte_ddp.storage.clients import timeouts
from flyte_ddp.storage.clients.client import Client


def make_options(anonymous: bool, url: str) -> dict[str, Any]:
    import aiohttp

    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=timeouts.CONNECT_TIMEOUT, sock_read=timeouts.READ_TIMEOUT
    )
    options: dict[str, Any] = {"requests_timeout": limits, "use_listings_cache": False}
    if anonymous:
        options["token"] = "anon"
    return options


def limit_requests(file_system: Any) -> None:
    """Let a gcsfs file system try once, in silence, end uploads without an answer, and name a
    missing bucket.
    """
    # gcsfs' own retries, which wrap this function, log a traceback each.
    send = getattr(getattr(type(file_system), "_request", None), "__wrapped__", None)
    if send is None:
        return

    async def request(method: str, path: str, *args: Any, data: Any = None, **kwargs: Any) -> Any:
        call = send(file_system, method, path, *args, data=data, **kwargs)
        # else the client's own timeout, which begins when all is sent, is enough
        if data is not None:
            call = timeouts.limit_request(
                file_system, method, call, len(data), timeouts.READ_TIMEOUT
            )
        try:
            return await call
        except FileNotFoundError as error:
            # Of a file or of its bucket? A listing tells.
            if method == "GET" and path.endswith("/o"):
                error.error_code = "NoSuchBucket"  # type: ignore[attr-defined]
            elif named := re.search(r"(?:^|/)b/([^/?]+)", path):
                bucket = args[0] if named[1] == "{}" else named[1]
                await request("GET", "b/{}/o", bucket, maxResults=1)
            raise

    file_system._request = request


def put(file_system: Any, path: str, contents: bytes, tag: str) -> None:
    bucket, name, _ = file_system.split_path(path)
    host = file_system.base.removesuffix("/storage/v1/")
    url = f"{host}/upload/storage/v1/b/{bucket}/o"
    file_system.call(
        "POST", url, uploadType="media", name=name, ifGenerationMatch=tag or "0", data=contents
    )


# gcsfs' own choice of a class asks another service for the kind of each bucket, and warns if that
# service cannot be reached.
GOOGLE = Client(
    "gcsfs:core.GCSFileSystem",
    make_options,
    limit_requests,
    "generation",
    put,
    has_options_in_urls=False,
    extra="gcs",
    # flytekit's class, and ours
    sessions={"gcsfs:GCSFileSystem": "_session", "gcsfs:core.GCSFileSystem": "_session"},
)
