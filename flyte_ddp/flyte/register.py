"""`flyte-ddp register`: check the files to ship, then call `pyflyte register`.

Code travels with the registration, and Flyte's own hash is its version. The settings are part of
the version: see `flyte_ddp.flyte.resources.pod`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flytekit.tools.ignore import (
    DockerIgnore,
    FlyteIgnore,
    GitIgnore,
    IgnoreGroup,
    StandardIgnore,
)

from flyte_ddp.code.source_code import COMMIT_VARIABLE, SETTINGS_FILE, describe_commit
from flyte_ddp.config.fields import Limits, check
from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.project.settings import IMAGE_EXAMPLE, IMAGE_PATTERN, Settings, load_settings

PYFLYTE = (sys.executable, "-m", "flytekit.clis.sdk_in_container.pyflyte")
# directories of a project that are no part of a registration
LEFT_OUT = (".venv", "runs", "wandb")
PROJECT_OPTIONS = (
    ("--project", "(default flytesnacks)", "flytesnacks"),
    ("--domain", "(default development)", "development"),
)
OPTIONS = (
    *PROJECT_OPTIONS,
    ("--image", "of every task (default: the settings')", ""),
    ("--service-account", "of the launch plans (default: the settings')", ""),
    ("--version", "(default: a hash, by Flyte)", ""),
    ("--activate", "start the schedules", False),
    ("--dry-run", "send nothing", False),
)


def main(arguments: Sequence[str]) -> int:
    """Register the workflows of the project in the working directory; return pyflyte's status.

    Raises:
        ConfigError: the settings are bad, there is no image, or a file would be left out or shipped
            by mistake.
    """
    about = "Register the workflows of this directory's project, with its code."
    epilog = "The settings are those of settings.toml and the variables that it names."
    options = make_parser("register", about, OPTIONS, epilog=epilog).parse_args(arguments)
    settings = load_settings(Path(SETTINGS_FILE))
    if options.image:
        check("--image", options.image, str, Limits(pattern=IMAGE_PATTERN, example=IMAGE_EXAMPLE))
    image = options.image or find_image(settings)
    origin = SETTINGS_FILE
    if options.image:
        origin = "--image"
    elif os.environ.get("IMAGE"):
        origin = "IMAGE"
    check_shipped(settings)
    copy, version = "all", options.version
    if options.dry_run:  # A dry run must not need a Flyte, but pyflyte uploads the files it packs.
        copy, version = "none", version or "dry-run"
    command = [*PYFLYTE, "register", "--copy", copy, "--image", image]
    command += ["--project", options.project, "--domain", options.domain]
    command += ["--service-account", options.service_account or settings.service_account]
    if version:
        command += ["--version", version]
    if options.activate:
        command.append("--activate-launchplans")
    if options.dry_run:
        command.append("--dry-run")
    print_line(f"image: {image} ({origin}), of every task, driver and worker")
    environment = {**os.environ, "IMAGE": image, COMMIT_VARIABLE: describe_commit()}
    return subprocess.call([*command, "workflows"], env=environment)


def find_image(settings: Settings) -> str:
    """Return the image of the tasks. Raises ConfigError if the settings name none."""
    if not settings.image:
        raise ConfigError(f"image: expected its name in {SETTINGS_FILE} or IMAGE, got none")
    return settings.image


def check_shipped(settings: Settings) -> None:
    """Raise ConfigError for a file that `--copy all` would leave out, or ship by mistake."""
    kinds = [GitIgnore, DockerIgnore, StandardIgnore, FlyteIgnore]
    ignored = IgnoreGroup(os.getcwd(), kinds)
    for name in (SETTINGS_FILE, "workflows", *settings.recipes):
        for file in list(Path(name).rglob("*.py")) or [Path(name)]:
            if not file.exists() or ignored.is_ignored(str(file)):
                raise ConfigError(
                    f"{file}: expected a file that is shipped, got one that is not there, or that "
                    ".dockerignore, .flyteignore or .gitignore excludes"
                )
    for name in LEFT_OUT:
        if Path(name).exists() and not ignored.is_ignored(name):
            raise ConfigError(f".gitignore: expected a line for {name}, which would be shipped")
