"""The settings of registration: settings.toml, and the environment variables that win over it. Imports no flytekit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from flyte_ddp.cluster.admission import Allowed
from flyte_ddp.config.source_code import SETTINGS_FILE, digest_of, read_settings, recipe_packages

PROFILES = ("production", "sandbox")
PACKAGES = ("flyte_ddp", "tasks", "workflows")  # what is shipped beside the recipes
ROOT = Path(__file__).parent.parent  # what is shipped lies below it: a checkout, or the code of an image


class SettingsError(click.UsageError, ValueError):
    """A setting that cannot be used. pyflyte prints its message alone."""


@dataclass(frozen=True)
class Size:
    """The resources and the time of one task."""

    cpus: int
    memory_gib: int
    disk_gib: int
    timeout_hours: int  # of one attempt; 0: none
    shared_memory_gib: int = 0


@dataclass(frozen=True)
class Settings:
    """All settings, those of the chosen profile included."""

    profile: str
    image: str
    recipes: tuple[str, ...]
    notify_emails: tuple[str, ...]
    metrics_port: int
    retrain_inputs: Mapping[str, Any]
    wandb_mode: str
    wandb_project: str
    wandb_entity: str
    wandb_base_url: str
    gpus: int
    gpu_type: str
    training: Size  # CPUs and memory for each GPU, or in all where there is none
    driver: Size
    small: Size
    allowed: Allowed

    @property
    def digest(self) -> str:
        """A hash of every setting, wherever it came from."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def version(self) -> str:
        """The version of an image's code with these settings: the image's tag and a hash of both."""
        _, _, tag = require_image(self.image).rpartition(":")
        return f"{tag[:32]}-{hashlib.sha256((shipped_code() + self.digest).encode()).hexdigest()[:8]}"


def require_image(image: str) -> str:
    """Return `image`.

    Raises:
        SettingsError: there is none, or it has no tag.
    """
    where = f"{SETTINGS_FILE}, in IMAGE or by --image"
    if not image:
        raise SettingsError(f"image: expected the name of your image in {where}, got none")
    if not re.fullmatch(r"[^\s:@]+(:\d+/[^\s:@]+)?(:[\w.-]+|@sha256:[0-9a-f]{64})", image):
        raise SettingsError(f"image: expected NAME:TAG in {where}, got {image!r}")
    return image


def shipped_code() -> str:
    """Return a hash of everything that a registration ships: library, tasks, workflows, recipes and settings."""
    return digest_of([*PACKAGES, *recipe_packages()], extra_files=[ROOT / SETTINGS_FILE])


def load_settings(file: Path = ROOT / SETTINGS_FILE, environment: Mapping[str, str] = os.environ) -> Settings:
    """Read `file` and the environment variables that win over it.

    Raises:
        SettingsError: no file, a name that is unknown or missing, or a value that cannot be used.
    """
    if not file.is_file():
        raise SettingsError(f"{file.name}: expected in {file.parent}, got no such file")
    try:
        tables = read_settings(file)
    except ValueError as error:
        raise SettingsError(f"{file.name}: expected TOML, got {error}") from error
    switch = environment.get("SANDBOX", "").lower()
    if switch not in ("", "0", "1", "false", "true"):
        raise SettingsError(f"SANDBOX: expected 0, 1, false or true, got {switch!r}")
    if switch:
        tables["profile"] = "sandbox" if switch in ("1", "true") else "production"
    if tables.get("profile") not in PROFILES:
        raise SettingsError(f"{file.name}: profile: expected {' or '.join(PROFILES)}, got {tables.get('profile')!r}")
    profiles = {name: tables.pop(name, {}) for name in PROFILES}
    wandb = tables.pop("wandb", {})
    values = {**tables, **profiles[tables["profile"]], **{f"wandb_{name}": value for name, value in wandb.items()}}
    for variable, (name, parse) in VARIABLES.items():
        text = environment.get(variable)
        if text and not (name in ("gpus", "gpu_type") and tables["profile"] == "sandbox"):
            values[name] = parse(variable, text)
    return Settings(**_checked(file.name, values, Settings))


def _checked(place: str, values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return `values` as the fields of dataclass `kind`, which names a table at `place`."""
    fields = {each.name: each for each in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise SettingsError(f"{place}: expected {', '.join(fields)}, got {name!r}")
    found = {}
    for name, each in fields.items():
        if name not in values and each.default is not dataclasses.MISSING:
            continue
        if name not in values:
            raise SettingsError(f"{place}: {name}: expected a value, got none")
        value = values[name]
        expected, is_right = _KINDS[str(each.type)]
        if not is_right(value):
            raise SettingsError(f"{place}: {name}: expected {expected}, got {value!r}")
        found[name] = tuple(value) if str(each.type).startswith("tuple") else value
        if table := _TABLES.get(str(each.type)):
            found[name] = table(**_checked(f"{place}: {name}", value, table))
    for address in found.get("notify_emails", ()):
        if address.count("@") != 1:
            raise SettingsError(f"{place}: notify_emails: expected e-mail addresses, got {address!r}")
    return found


_TABLES: dict[str, type] = {"Size": Size, "Allowed": Allowed}
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "int": ("a whole number of at least 0", lambda value: type(value) is int and value >= 0),
    "Size": ("a table of sizes", lambda value: isinstance(value, dict)),
    "Allowed": ("a table", lambda value: isinstance(value, dict)),
    "Mapping[str, Any]": ("a table", lambda value: isinstance(value, dict)),
    "tuple[str, ...]": (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    ),
}


def _number(variable: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise SettingsError(f"{variable}: expected a whole number of at least 1, got {text!r}")
    return int(text)


def _object(variable: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SettingsError(f"{variable}: expected a JSON object, got {text!r}")
    return found


def _text(variable: str, text: str) -> str:
    return text


def _addresses(variable: str, text: str) -> list[str]:
    return [address.strip() for address in text.split(",") if address.strip()]


VARIABLES: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "IMAGE": ("image", _text),
    "GPUS": ("gpus", _number),
    "GPU_TYPE": ("gpu_type", _text),
    "METRICS_PORT": ("metrics_port", _number),
    "WANDB_MODE": ("wandb_mode", _text),
    "WANDB_PROJECT": ("wandb_project", _text),
    "WANDB_ENTITY": ("wandb_entity", _text),
    "WANDB_BASE_URL": ("wandb_base_url", _text),
    "NOTIFY_EMAILS": ("notify_emails", _addresses),
    "RETRAIN_INPUTS": ("retrain_inputs", _object),
}
