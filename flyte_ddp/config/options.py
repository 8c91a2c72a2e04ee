"""The command lines of this package: each option is a row of a table. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

# Name, help and default. A name without dashes is a positional argument. A default of False makes a
# switch. An option with the default None is required.
Option = tuple[str, str, Any]


def make_parser(
    command: str, text: str, options: Iterable[Option], **settings: Any
) -> argparse.ArgumentParser:
    """Return the parser of a command. `settings` are passed to `ArgumentParser`."""
    parser = argparse.ArgumentParser(f"flyte-ddp {command}", description=text, **settings)
    add_options(parser, options)
    return parser


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add `options`. Each accepts dashes and underscores in its name."""
    for name, text, default in options:
        kind: dict[str, Any] = {"required": default is None}
        if default is False:
            kind = {"action": "store_true"}
        elif not name.startswith("-"):
            kind = {"metavar": name.upper()}
            if default is not None:
                kind["nargs"] = "?"
        if default is not None and default is not False:
            kind["type"] = type(default)
        names = dict.fromkeys((name, name[:2] + name[2:].replace("-", "_")))
        parser.add_argument(*names, help=text, default=default, **kind)
