"""Say whether a slow resolver delays the ranks.

torch asks in each rank for the name of the address where the ranks meet, only to show it in its
messages. A resolver that does not answer costs the rank five seconds or more.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

SLOW_SECONDS = 1.0


def ask_name(host: str, relay: Callable[[str], None]) -> None:
    """Ask for the name of an address as torch does. Relay a line if the answer took long."""
    begun_at = time.monotonic()
    address = host
    if ":" not in host:
        address = f"::ffff:{host}"  # torch connects to it in this form
    with contextlib.suppress(OSError):  # without a name, the answer is the address
        socket.getnameinfo((address, 0), 0)
    seconds = time.monotonic() - begun_at
    if seconds > SLOW_SECONDS:
        relay(
            f"DNS on {socket.gethostname()} took {seconds:.1f} s to answer which name {host} has. "
            "torch waits for this in each rank. See docs/reliability.md#messages"
        )
