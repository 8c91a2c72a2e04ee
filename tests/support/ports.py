"""Ports of this machine."""

import contextlib
import random
import socket


def free_port():
    """A port below the range from which the kernel assigns ports. So it stays free until it is
    needed.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
    raise AssertionError("no port is free")
