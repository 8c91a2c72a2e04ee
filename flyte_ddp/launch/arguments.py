"""The arguments of a function that records of its run show."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_LENGTH = 1000  # characters of a value as JSON


def name_arguments(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the plain arguments of a call by the names of the parameters, with defaults.

    Arguments may be missing. Left out are values that JSON does not have, such as tensors, and long
    ones. A dataclass and a namespace become the dict of their fields.
    """
    if isinstance(function, functools.partial):
        given = {**function.keywords, **keywords}
        return name_arguments(function.func, (*function.args, *arguments), given)
    try:
        signature = inspect.signature(function)
        bound = signature.bind_partial(*arguments, **keywords)
    except (TypeError, ValueError):  # The call itself says what is wrong with it.
        return {}
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    texts = {name: _to_json(value) for name, value in named.items()}
    return {name: json.loads(text) for name, text in texts.items() if text}


def _to_json(value: Any) -> str:
    """Return a value as JSON; "" for one that is long or has no JSON."""
    text = ""
    try:
        # Part by part, because a list may have millions of numbers.
        for part in json.JSONEncoder(default=_list_fields).iterencode(value):
            text += part
            if len(text) > MAX_LENGTH:
                return ""
    except (TypeError, ValueError, RecursionError):
        return ""
    return text


def _list_fields(value: Any) -> Any:
    """Return plain values in place of one that JSON does not have. Raises TypeError for others."""
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return os.fspath(value)
