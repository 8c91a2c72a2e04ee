"""The time that a request to a store may take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

CONNECT_TIMEOUT = 10.0  # seconds, enough for another continent
READ_TIMEOUT = 30.0  # seconds without a byte: a connection that was cut without notice is given up
# seconds in which a store puts the parts of a file together, perhaps without a byte
SERVER_WORK_TIMEOUT = 300.0
MIN_UPLOAD_RATE = 128 << 10  # bytes per second of each of the parts on their way at once


async def limit_request(
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
