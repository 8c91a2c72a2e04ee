"""The time that a request to a store may take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

CONNECT_TIMEOUT = 10.0  # seconds, enough for another continent
READ_TIMEOUT = 30.0  # seconds without a byte, after which a connection counts as cut
# seconds in which a store joins the parts of a file, perhaps without sending a byte
SERVER_WORK_TIMEOUT = 300.0
MIN_UPLOAD_RATE = 128 << 10  # bytes per second for each of the parts that are sent at once


async def limit_request(
    file_system: Any, what: str, request: Awaitable[T], num_bytes: int, limit: float
) -> T:
    """Await `request` for `limit` seconds plus the time that its `num_bytes` may take. Then count
    these bytes as stored.
    """
    limit += num_bytes / MIN_UPLOAD_RATE
    try:
        answer = await asyncio.wait_for(request, limit)
    except asyncio.TimeoutError:
        raise ConnectionError(f"no answer to {what} for {limit:.0f} s") from None
    file_system.stored_bytes += num_bytes
    return answer
