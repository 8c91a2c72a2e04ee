"""The differences between the clients of object stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Client:
    """How to open a kind of store, and how to put a file there on a condition."""

    file_system: str  # module and class of the fsspec file system
    make_options: Callable[[bool, str], dict[str, Any]]  # arguments: whether anonymous, and the URL
    limit_requests: Callable[[Any], None]
    tag: str  # key in a file's `info`; every put changes its value
    # function that puts contents at a path if the file still has the given tag; "" for no file
    put: Callable[[Any, str, bytes, str], None]
    has_options_in_urls: bool = True  # True if URLs contain options, such as Azure's account
    extra: str = ""  # extra of this package that installs the client
    # file systems' classes that may have opened a session, each with the session's attribute
    sessions: Mapping[str, str] = field(default_factory=dict)
