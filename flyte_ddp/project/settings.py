"""The settings of a project: settings.toml, and the environment variables that override it.

The file is found on sys.path, where pyflyte puts the project's directory while it imports. A
missing or wrong file does not fail the import: `SETTINGS` has the defaults then, and
`check_settings` refuses the run or the registration. This module imports no flytekit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from flyte_ddp.code.source_code import (
    SETTINGS_FILE,
    find_project,
    read_settings,
)
from flyte_ddp.config.fields import LIMITS, Checked, check, check_names, field, is_cron, validate
from flyte_ddp.errors import ConfigError
from flyte_ddp.observers.recorder import TRACKERS
from flyte_ddp.project.admission import Allowed
from flyte_ddp.storage import has_password

PROFILES = ("production", "sandbox")
# image name that flytekit accepts: with a tag or a digest
IMAGE_PATTERN = r"[^\s:@]\S*(:\w[\w.-]*|@sha256:[0-9a-f]{64})"
IMAGE_EXAMPLE = "an image with its tag, such as registry.example.com/flyte-ddp:1"
WANDB_MODES = ("online", "offline", "disabled")


class SettingsError(click.UsageError, ConfigError):
    """A setting that cannot be used. pyflyte prints its message alone."""


@dataclass(frozen=True)
class Size(Checked):
    cpus: int = field(minimum=1)
    memory_gib: int = field(minimum=1)
    disk_gib: int = field(minimum=0)
    timeout_hours: int = field(minimum=0, help="of one attempt; 0: none")
    shared_memory_gib: int = field(0, minimum=0)


@dataclass(frozen=True)
class Settings:
    """All settings, including the chosen profile. Raises ConfigError for a value of the wrong type
    or range.
    """

    profile: str = field("production", choices=PROFILES)
    image: str = field("", pattern=f"|{IMAGE_PATTERN}", example=IMAGE_EXAMPLE)
    service_account: str = field("flyte-ddp")
    recipes: tuple[str, ...] = field(("recipes",))
    notify_emails: tuple[str, ...] = field(
        (), pattern=r"[^@\s]+@[^@\s]+", example="an e-mail address"
    )
    metrics_port: int = field(0, minimum=0, maximum=65535)
    schedule: str = field(
        "",
        is_valid=is_cron,
        example="cron's five fields (minute 0-59, hour 0-23, day 1-31, month 1-12, weekday 0-7), "
        "of a day that comes, such as 0 3 * * *",
    )
    retrain_inputs: dict[str, Any] = field(factory=dict)
    wandb_mode: str = field("online", choices=WANDB_MODES)
    wandb_project: str = field("flyte-ddp")
    wandb_entity: str = field("")
    wandb_base_url: str = field("")
    gpus: int = field(1, minimum=0)
    gpu_type: str = field("")
    training: Size = field(
        Size(4, 16, 50, 48, 8), help="CPUs and memory for each GPU, or in all where there is none"
    )
    driver: Size = field(Size(1, 8, 20, 48))
    small: Size = field(Size(1, 2, 20, 6))
    allowed: Allowed = field(Allowed())
    prices: dict[str, float] = field(
        factory=dict, minimum=0, help="per hour of a node, by patterns for its labels"
    )
    filler_priority_class: str = field(
        "",
        pattern=r"|[a-z0-9]([-a-z0-9.]*[a-z0-9])?",
        example="the name of a PriorityClass",
    )
    termination_grace: int = field(60, minimum=10)  # seconds
    tracking: str = field("wandb", choices=TRACKERS)
    mlflow_url: str = field("", pattern=r"|https?://\S+", example="http://mlflow.team:5000")
    mlflow_experiment: str = field("flyte-ddp")
    tensorboard_logdir: str = field("")  # directory or URL; "" for one beside the checkpoints

    def __post_init__(self) -> None:
        validate(self)
        if has_password(self.mlflow_url):
            raise ConfigError(
                "mlflow.url: expected a URL without a user name and a password, because each pod's "
                "specification has it, got one; a token is the Flyte secret mlflow/token"
            )
        if self.tracking == "mlflow" and not self.mlflow_url:
            raise ConfigError(
                "mlflow.url: expected the URL of the server, which tracking names, got none"
            )

    @property
    def digest(self) -> str:
        """A hash of every setting, wherever it came from."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def tracking_place(self) -> tuple[str, ...]:
        """The name of the tracker and its place, for `make_tracker`."""
        places = {
            "wandb": (self.wandb_project,),
            "mlflow": (self.mlflow_url, self.mlflow_experiment),
            "tensorboard": (self.tensorboard_logdir,),
        }
        return (self.tracking, *places[self.tracking])

    @property
    def tracking_environment(self) -> dict[str, str]:
        """The tracker's variables for all tasks. Tasks without a run get them too, because each
        task reads the settings.
        """
        if self.tracking == "wandb":
            return {}
        places = {
            "mlflow": {
                "MLFLOW_TRACKING_URI": self.mlflow_url,
                "MLFLOW_EXPERIMENT_NAME": self.mlflow_experiment,
            },
            "tensorboard": {"TENSORBOARD_LOGDIR": self.tensorboard_logdir},
        }
        return {"TRACKING": self.tracking, **places[self.tracking]}

    @property
    def wandb_environment(self) -> dict[str, str]:
        """W&B's own variables, for the tasks that train."""
        given = {"WANDB_ENTITY": self.wandb_entity, "WANDB_BASE_URL": self.wandb_base_url}
        mode = "disabled"
        if self.tracking == "wandb":
            mode = self.wandb_mode
        return {
            "WANDB_MODE": mode,
            "WANDB_PROJECT": self.wandb_project,
            **{name: value for name, value in given.items() if value},
        }


def load_settings(
    file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Read `file`, by default the project's, and the variables that override it.

    Raises:
        ConfigError: the file is missing, or contains an unknown name or a wrong value.
    """
    file = file or _find_file()
    tables = read_settings(file)
    switch = environment.get("SANDBOX", "").lower()
    if switch not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"SANDBOX: expected 0, 1, false or true, got {switch!r}")
    if switch in ("1", "true"):
        tables["profile"] = "sandbox"
    elif switch:
        tables["profile"] = "production"
    profiles = {name: tables.pop(name, {}) for name in PROFILES}
    for tracker in TRACKERS:
        for name, value in tables.pop(tracker, {}).items():
            tables[f"{tracker}_{name}"] = value
    check_names(Settings, tables, file.name)
    chosen = str(tables.get("profile", PROFILES[0]))
    for name, profile in profiles.items():
        check_names(Settings, profile, f"{file.name}: {name}")
    given = {
        name: _read_variable(variable, environment[variable], name)
        for variable, name in VARIABLES.items()
        if environment.get(variable)
    }
    image = image_of_command()
    if image:
        given["image"] = image
    made = _make({**tables, **profiles.get(chosen, {}), **given}, file.name)
    for name, profile in profiles.items():
        if name != chosen:  # A mistake is reported now, and not when somebody chooses the profile.
            _make({**tables, "profile": name, **profile, **given}, f"{file.name}: {name}")
    return made


def _find_file() -> Path:
    project = find_project()
    if project is None:
        raise ConfigError(
            f"{SETTINGS_FILE}: expected one with `recipes` in the project's directory, which "
            "is on sys.path, got none"
        )
    return project / SETTINGS_FILE


def image_of_command() -> str:
    """Return the image that `--image` of a pyflyte command names; "" if the command has no
    `--image`.

    flytekit applies it only to tasks that name no image. So the settings read it too. Otherwise a
    task would run in the image that the registering environment names.
    """
    context = click.get_current_context(silent=True)
    while context is not None:
        config = context.params.get("image_config")
        source = context.get_parameter_source("image_config")
        if config is not None and source is click.core.ParameterSource.COMMANDLINE:
            default = type(config).auto_default_image().default_image
            named = config.default_image
            if named and named != default:
                return str(named.full)
            return ""
        context = context.parent
    return ""


def _make(values: Mapping[str, Any], name: str) -> Settings:
    """Return the settings with these values. Raises ConfigError that begins with `name`."""
    try:
        return Settings(**values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _read_variable(variable: str, text: str, name: str) -> Any:
    """Return the value of an environment variable, converted to the type of field `name`. Commas
    separate the items of a list, and an object is JSON.
    """
    kind: Any = typing.get_type_hints(Settings)[name]
    value: object = text
    if typing.get_origin(kind) is tuple:
        value = [item.strip() for item in text.split(",") if item.strip()]
    elif kind is not str:
        with contextlib.suppress(ValueError):  # `check` refuses text that is not JSON.
            value = json.loads(text)
    return check(variable, value, kind, Settings.__dataclass_fields__[name].metadata[LIMITS])


_NAMES = (
    *("image", "gpus", "gpu_type", "metrics_port", "notify_emails", "retrain_inputs"),
    *("wandb_mode", "wandb_project", "wandb_entity", "wandb_base_url", "tracking"),
)
VARIABLES = {**{name.upper(): name for name in _NAMES}, "RETRAIN_SCHEDULE": "schedule"}
VARIABLES |= {"MLFLOW_TRACKING_URI": "mlflow_url", "MLFLOW_EXPERIMENT_NAME": "mlflow_experiment"}
VARIABLES |= {"TENSORBOARD_LOGDIR": "tensorboard_logdir"}

# Errors that do not fail the import. They fail the run or the registration.
_problems: list[SettingsError] = []


@contextlib.contextmanager
def delaying_errors() -> Iterator[None]:
    """Keep a ConfigError or ValueError of the block for `check_settings`."""
    try:
        yield
    except ValueError as error:
        _problems.append(SettingsError(str(error)))


def check_settings() -> None:
    """Raise the SettingsError that an import delayed, if there was one."""
    if _problems:
        raise _problems[0]


SETTINGS = Settings()
with delaying_errors():
    SETTINGS = load_settings()
