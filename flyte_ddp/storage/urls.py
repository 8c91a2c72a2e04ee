"""URLs as they may be shown: without passwords, signatures and tokens."""

from __future__ import annotations

import re
import urllib.parse


def redact_url(text: str) -> str:
    """Return `text`, a URL or a message with URLs in it, without passwords, signatures and tokens.

    Everything that is logged, shown or stored goes through here.
    """
    if "://" not in text:  # as in most of the many lines that ranks print
        return text
    return re.sub(r"\b[a-zA-Z][\w+.-]*://[^\s'\"<>]+", lambda match: _redact(match[0]), text)


def _redact(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if "::" in rest:  # a chain, such as zip://inner.csv::https://host/outer.zip
        first, _, others = rest.partition("::")
        return f"{_redact(f'{scheme}://{first}')}::{_redact(others) if '://' in others else others}"
    address, _, query = rest.partition("?")
    address = address.partition("#")[0]
    user, at, host = address.partition("/")[0].rpartition("@")
    # A name alone is a secret over HTTP (a token); elsewhere it is part of the place, as abfs://container@account.
    if at and (":" in user or scheme in ("http", "https")):
        address = f"...@{host}{address[len(user) + 1 + len(host) :]}"
    names = [pair.partition("=")[0] for pair in query.split("&") if pair]
    return f"{scheme}://{address}" + ("?" + "&".join(f"{name}=..." for name in names) if names else "")


def has_password(url: str) -> bool:
    """Return whether `url` has a password or a token before its host."""
    return "@" in urllib.parse.urlsplit(url).netloc and redact_url(url) != url
