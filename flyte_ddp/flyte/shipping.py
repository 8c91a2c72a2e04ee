"""One version of the code and one image, by every way of registering. Run while pyflyte imports the
tasks.

`pyflyte run --remote` ships by default only the modules that happen to be loaded, registers with
flytekit's own image where --image is not given, and counts neither settings nor environment
variables into the version. pyflyte imports the tasks inside its own command, so this module
completes that command's parameters: all files are shipped, the image is the one of the settings,
and a second image, which no task uses, carries the hash of the settings into the version.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import click
from flytekit.constants import CopyFileDetection

from flyte_ddp.config.source_code import (
    SETTINGS_FILE,
    find_project,
    recipe_packages,
    source_files,
)
from flyte_ddp.flyte.settings import (
    PACKAGES,
    SETTINGS,
    SettingsError,
    check_settings,
    require_image,
    shipped_code,
)

CODE_VARIABLE = "FLYTE_DDP_CODE"  # of every task: the hash of the code that was registered
# the project, or the checkout
ROOT = find_project() or Path(__file__).resolve().parents[2]
# then pyflyte ships nothing of this package
IS_INSTALLED = Path(sysconfig.get_path("purelib")).resolve() == ROOT


def check_code() -> None:
    """Raise SettingsError if this process's code is not the registered one, under which its results
    would be filed.
    """
    registered = os.environ.get(CODE_VARIABLE)
    if registered and registered != shipped_code():
        raise SettingsError(
            f"code: expected the version {registered[:8]}, which was registered, got "
            f"{shipped_code()[:8]} in "
            f"{ROOT}: build and push the image {os.environ.get('FLYTE_INTERNAL_IMAGE', '')} again "
            "from the same files, "
            "or register with --copy all"
        )


def prepare_registration() -> None:
    """Complete a pyflyte command that registers the tasks. Raises SettingsError for bad settings,
    without an image or without all code.
    """
    command = registering_command()
    if command is None:
        return
    from flytekit import FlyteContextManager
    from flytekit.configuration import Image, ImageConfig
    from flytekit.configuration.default_images import DefaultImages

    check_settings()
    images = command.params["image_config"]
    default = images.default_image
    if default is None or default.full == DefaultImages.default_image():
        default = Image.look_up_image_info("default", require_image(SETTINGS.image))
    others = [image for image in images.images if image.name != default.name]
    images = ImageConfig.create_from(
        default, [*others, Image("settings", "flyte-ddp/settings", SETTINGS.digest)]
    )

    if "remote" in command.params:  # pyflyte run
        click.get_current_context().obj.image_config = images
        if not runs_file_of_checkout():
            return  # a workflow from elsewhere uses these tasks as a library
    else:  # pyflyte register or package
        FlyteContextManager.current_context().serialization_settings.image_config = images
    ship_all_files()
    _check_that_all_is_shipped()


def _check_that_all_is_shipped() -> None:
    """Refuse code that --copy all, or the image, would leave out."""
    from flytekit.tools.ignore import (
        DockerIgnore,
        FlyteIgnore,
        GitIgnore,
        IgnoreGroup,
        StandardIgnore,
    )

    ignored = IgnoreGroup(str(ROOT), [GitIgnore, DockerIgnore, StandardIgnore, FlyteIgnore])
    for package in recipe_packages():
        files = source_files([package])
        if not files or any(ROOT not in file.parents for file in files.values()):
            raise SettingsError(
                f"{SETTINGS_FILE}: recipes: expected packages beside "
                f"{SETTINGS_FILE}, got {package!r}"
            )
    for name, file in source_files([*PACKAGES, *recipe_packages()]).items():
        # it is in the image
        is_installed = "flyte_ddp" not in os.listdir(ROOT) and name.startswith("flyte_ddp/")
        if not is_installed and ignored.is_ignored(str(file)):
            raise SettingsError(
                f"{name}: expected a file that is shipped, got one that .dockerignore, "
                ".flyteignore or .gitignore "
                "excludes: remove it, or let it through"
            )


def registering_command() -> click.Context | None:
    """Return the command of pyflyte that imports this process's tasks to register them; None if
    there is none.
    """
    command = click.get_current_context(silent=True)
    while command is not None and "image_config" not in command.params:
        command = command.parent
    return None if command is None or command.params.get("remote") is False else command


def runs_file_of_checkout() -> bool:
    """Return True if the file that `pyflyte run` was given lies in this checkout."""
    context = click.get_current_context(silent=True)
    while context is not None:
        file = Path(context.info_name or "")
        if file.is_file() and ROOT in file.resolve().parents:
            return True
        context = context.parent
    return False


def ship_all_files() -> None:
    """Let the command that registers from this checkout ship all files. Raises ClickException if
    told to ship less.
    """
    command = registering_command()
    if command is None or IS_INSTALLED:
        return
    if "remote" in command.params:  # pyflyte run
        if runs_file_of_checkout():
            click.get_current_context().obj.copy = CopyFileDetection.ALL
    elif command.params["copy"] is CopyFileDetection.LOADED_MODULES:  # pyflyte register or package
        raise click.ClickException(
            "--copy: expected all or none, got auto, which leaves out modules that are not loaded"
        )
