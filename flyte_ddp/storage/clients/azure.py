"""The client of Azure Blob Storage. It uses some private names of its library, adlfs."""

from __future__ import annotations

import logging
import re
from typing import Any

from flyte_ddp.storage.clients import timeouts
from flyte_ddp.storage.clients.client import Client
from flyte_ddp.storage.environment import storage_environment


def make_options(anonymous: bool, url: str) -> dict[str, Any]:
    """Return the options for the account in `url`, or else for the account in the environment. Keys
    of one account are never sent to another account.
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
    own = options.get("account_name")
    if not own and in_connection:
        own = in_connection[1]
    if named and named[1] != own:
        options["account_name"] = named[1]
        if own:
            for name in ("account_key", "sas_token", "connection_string"):
                options.pop(name, None)
    limits = {"connection_timeout": timeouts.CONNECT_TIMEOUT, "read_timeout": timeouts.READ_TIMEOUT}
    # A part has 4 MB. By default some thousands of parts would share the time that one may take.
    limits["max_concurrency"] = 8
    return {**options, **limits, "use_listings_cache": False, "anon": anonymous}


def limit_requests(file_system: Any) -> None:
    """Let an adlfs file system try each request once, with timeouts, and end requests without an
    answer.
    """
    # The library's error repeats its ten lines of warning.
    logging.getLogger("azure.identity").setLevel(logging.ERROR)
    try:
        retries = file_system.service_client._config.retry_policy
        transport = file_system.service_client._pipeline._transport
    except AttributeError:
        return
    retries.total_retries = 0
    transport.connection_config.timeout = timeouts.CONNECT_TIMEOUT
    transport.connection_config.read_timeout = timeouts.READ_TIMEOUT
    send = transport.send

    async def send_within_limit(request: Any, **kwargs: Any) -> Any:
        num_bytes = int(request.headers.get("Content-Length", 0))
        return await timeouts.limit_request(
            file_system, request.method, send(request, **kwargs), num_bytes, timeouts.READ_TIMEOUT
        )

    transport.send = send_within_limit


def put(file_system: Any, path: str, contents: bytes, tag: str) -> None:
    from azure.core import MatchConditions

    condition: dict[str, Any] = {"overwrite": False}
    if tag:
        condition = {"etag": tag, "match_condition": MatchConditions.IfNotModified}
    file_system.pipe_file(path, contents, **condition)


AZURE = Client(
    "adlfs:AzureBlobFileSystem", make_options, limit_requests, "etag", put, extra="azure"
)
