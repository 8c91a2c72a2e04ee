"""The client of S3. It uses a private name of its library, s3fs."""

from __future__ import annotations

from typing import Any

from flyte_ddp.storage.clients import timeouts
from flyte_ddp.storage.clients.client import Client
from flyte_ddp.storage.environment import storage_environment


def make_options(anonymous: bool, url: str) -> dict[str, Any]:
    # The keys are arguments, because fsspec shares file systems with equal arguments. A file system
    # with keys from the environment would keep its old keys when they change.
    found = storage_environment()
    config: dict[str, Any] = {
        "connect_timeout": timeouts.CONNECT_TIMEOUT,
        "read_timeout": timeouts.READ_TIMEOUT,
        "retries": {"mode": "standard", "total_max_attempts": 1},
    }
    style = found.get("FLYTE_AWS_ADDRESSING_STYLE")
    if style:
        config["s3"] = {"addressing_style": style.lower()}
    options: dict[str, Any] = {"config_kwargs": config, "use_listings_cache": False}
    endpoint = found.get("AWS_ENDPOINT_URL_S3") or found.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["endpoint_url"] = endpoint
    if anonymous:
        options["anon"] = True
    elif "AWS_ACCESS_KEY_ID" in found:
        options["key"] = found["AWS_ACCESS_KEY_ID"]
        options["secret"] = found.get("AWS_SECRET_ACCESS_KEY")
        options["token"] = found.get("AWS_SESSION_TOKEN")
    return options


def limit_requests(file_system: Any) -> None:
    """End each request of an s3fs file system that gets no answer, and count the stored bytes.

    The client's own timeout begins when the whole request is sent, so a silent store is never
    noticed: the client waits for permission to send the body ("100-continue") or for room in the
    connection.
    """
    call = getattr(file_system, "_call_s3", None)
    if call is None:
        return
    file_system.retries = 1  # s3fs repeats requests, and so does its client

    async def call_within_limit(method: str, *args: Any, **kwargs: Any) -> Any:
        limit = timeouts.READ_TIMEOUT
        if method == "complete_multipart_upload":  # this call takes longer for larger files
            limit = timeouts.SERVER_WORK_TIMEOUT
            await file_system.set_session()
            client = await file_system.get_s3(kwargs.get("Bucket"))
            event = "before-call.s3.CompleteMultipartUpload"
            client.meta.events.register(
                event,
                # This replaces the client's own timeout for this request.
                lambda context, **_: context.update(read_timeout=timeouts.SERVER_WORK_TIMEOUT),
                unique_id=event,
            )
        num_bytes = len(kwargs.get("Body") or b"")
        return await timeouts.limit_request(
            file_system, method, call(method, *args, **kwargs), num_bytes, limit
        )

    file_system._call_s3 = call_within_limit


def put(file_system: Any, path: str, contents: bytes, tag: str) -> None:
    condition = {"IfNoneMatch": "*"}
    if tag:
        condition = {"IfMatch": tag}
    file_system.pipe_file(path, contents, **condition)


S3 = Client(
    "s3fs:S3FileSystem",
    make_options,
    limit_requests,
    "ETag",
    put,
    sessions={"s3fs:S3FileSystem": "_s3creator"},
)
