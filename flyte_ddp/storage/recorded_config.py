"""The config in a record: it is shown without secrets, and compared by its true values.

A checkpoint, a run card or a manifest holds a redacted config (`redact_values`). A redacted value
is never compared, and nothing is built from it. The record also holds a salted, slow hash of each
hidden value, and values are compared by these hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from flyte_ddp.errors import ConfigError
from flyte_ddp.storage.redaction import HIDDEN, drop_signatures, redact_values

OPTIONS = "recipe_options"
COST = {"n": 2**14, "r": 8, "p": 1}  # scrypt's cost: 40 ms and 16 MiB for a value
SALT_BYTES = 16

# Name, salt and hash of each hidden value. This is a list, because `redact_values` would hide the
# value of a key such as api_key.
Hashes = list[dict[str, str]]


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values by name. An option of the recipe is called recipe_options.NAME."""
    options = config.get(OPTIONS)
    if not isinstance(options, Mapping):  # the argument of a function may have this name
        return dict(config)
    values = {name: value for name, value in config.items() if name != OPTIONS}
    return values | {f"{OPTIONS}.{name}": value for name, value in options.items()}


def hash_hidden(config: Mapping[str, Any]) -> Hashes:
    """Return the hashes of the values that a record of `config` hides."""
    shown = flatten(redact_values(config))
    hashes = []
    for name, value in flatten(config).items():
        if shown[name] != value:
            salt = os.urandom(SALT_BYTES).hex()
            hashes.append({"name": name, "salt": salt, "scrypt": _hash(value, salt)})
    return hashes


def _hash(value: Any, salt: str) -> str:
    text = json.dumps(drop_signatures(value), sort_keys=True, default=str)
    return hashlib.scrypt(text.encode(), salt=bytes.fromhex(salt), **COST).hex()


class RecordedConfig:
    """The config in a record.

    Args:
        shown: the config as the record shows it.
        hashes: the hashes of the hidden values; None in a record of version 0.1.0, whose hidden
            values are unknown.
    """

    def __init__(self, shown: Mapping[str, Any], hashes: Sequence[Mapping[str, str]] | None):
        self.shown = flatten(shown)
        self._has_hashes = hashes is not None
        self._hashes = {each["name"]: each for each in hashes or ()}

    def is_hidden(self, name: str) -> bool:
        """Return whether the record hides the value called `name`."""
        if self._has_hashes:
            return name in self._hashes
        return HIDDEN in json.dumps(self.shown.get(name))

    def is_same(self, name: str, value: Any) -> bool:
        """Return whether the record has this value. An unknown value equals none."""
        if not self.is_hidden(name):
            return bool(self.shown.get(name) == value)
        found = self._hashes.get(name)
        return found is not None and _hash(value, found["salt"]) == found["scrypt"]

    def is_all(self, config: Mapping[str, Any]) -> bool:
        """Return whether the record has exactly the values of `config`."""
        values = flatten(config)
        if values.keys() != self.shown.keys():
            return False
        return all(self.is_same(name, value) for name, value in values.items())

    def check(self, values: Mapping[str, Any], where: str, remedy: str = "") -> None:
        """Raise ConfigError if one of these values is not the recorded one.

        Args:
            where: text to put after the expected value.
        """
        for name, value in values.items():
            if not self.is_same(name, value):
                raise ConfigError(f"{name}: {self._describe(name, value, where)}{remedy}")

    def _describe(self, name: str, value: Any, where: str) -> str:
        expected = repr(self.shown.get(name))
        key = name.removeprefix(f"{OPTIONS}.")
        got = repr(redact_values({key: value})[key])
        if got == expected:
            got = "another value, which is hidden too"
        return f"expected {expected}{where}, got {got}"
