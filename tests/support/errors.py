"""Errors that users see."""

from __future__ import annotations

import contextlib

import pytest


@contextlib.contextmanager
def raises_one_line(error, match=None):
    """`pytest.raises` of an error whose message is one line."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)
