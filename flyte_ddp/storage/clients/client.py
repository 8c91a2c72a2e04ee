"""What tells the clients of object stores apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


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
    extra: str = ""  # the extra of this package that installs the client
    # classes that may have opened a session, and the attribute of a file system that has it
    sessions: Mapping[str, str] = field(default_factory=dict)
