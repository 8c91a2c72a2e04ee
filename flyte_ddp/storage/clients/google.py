"""The client of Google Cloud Storage. It uses some private names of its library, gcsfs."""

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
    """Let a gcsfs file system try each request once, end uploads without an answer, and report a
    missing bucket.
    """
    # gcsfs' own retries wrap this function, and each of them logs a traceback.
    send = getattr(getattr(type(file_system), "_request", None), "__wrapped__", None)
    if send is None:
        return

    async def request(method: str, path: str, *args: Any, data: Any = None, **kwargs: Any) -> Any:
        call = send(file_system, method, path, *args, data=data, **kwargs)
        # The client's own timeout begins when the request is sent, which is too late for an upload.
        if data is not None:
            call = timeouts.limit_request(
                file_system, method, call, len(data), timeouts.READ_TIMEOUT
            )
        try:
            return await call
        except FileNotFoundError as error:
            # Either the file or its bucket is missing. Listing the bucket shows which.
            if method == "GET" and path.endswith("/o"):
                error.error_code = "NoSuchBucket"  # type: ignore[attr-defined]
                raise
            named = re.search(r"(?:^|/)b/([^/?]+)", path)
            if named:
                bucket = named[1]
                if bucket == "{}":
                    bucket = args[0]
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


# The class is named because gcsfs' own choice asks another service about each bucket, and warns if
# this service cannot be reached.
GOOGLE = Client(
    "gcsfs:core.GCSFileSystem",
    make_options,
    limit_requests,
    "generation",
    put,
    has_options_in_urls=False,
    extra="gcs",
    # flytekit's class, and the class above
    sessions={"gcsfs:GCSFileSystem": "_session", "gcsfs:core.GCSFileSystem": "_session"},
)
