"""One version of the code and one image, by every way of registering. Run when pyflyte imports the
tasks.

`pyflyte run --remote` ships by default only the modules that happen to be loaded, registers with
flytekit's own image where --image is not given, and counts neither settings nor environment
variables into the version. pyflyte imports the tasks inside its own command, so this module
completes that command's parameters: all files are shipped, the image is the one of the settings,
and a second image, which no task uses, carries the hash of the settings into the version.
"""

from __future__ import annotations

import os

import click

from flyte_ddp.config.source_code import SETTINGS_FILE, recipe_packages, source_files
from flyte_ddp.flytekit_plugin.shipping import (
    registering_command,
    runs_file_of_checkout,
    ship_all_files,
)
from tasks.settings import PACKAGES, ROOT, SettingsError, load_settings, require_image, shipped_code

CODE_VARIABLE = "FLYTE_DDP_CODE"  # of every task: the hash of the code that was registered


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
    """Complete a pyflyte command that registers the tasks. Raises SettingsError without an image or
    all code.
    """
    command = registering_command()
    if command is None:
        return
    from flytekit import FlyteContextManager
    from flytekit.configuration import Image, ImageConfig
    from flytekit.configuration.default_images import DefaultImages

    settings = load_settings()
    images = command.params["image_config"]
    default = images.default_image
    if default is None or default.full == DefaultImages.default_image():
        default = Image.look_up_image_info("default", require_image(settings.image))
    others = [image for image in images.images if image.name != default.name]
    images = ImageConfig.create_from(
        default, [*others, Image("settings", "flyte-ddp/settings", settings.digest)]
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
