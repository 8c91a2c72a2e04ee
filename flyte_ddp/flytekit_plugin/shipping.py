"""Ship all files with a task, by every command of pyflyte that registers it. Called while the
command imports the task.

By default pyflyte ships the modules that happen to be loaded. This package loads most of its own
when they are needed, and a part of it beside the task would hide the whole one in the image.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import click
from flytekit.constants import CopyFileDetection

from flyte_ddp.config.source_code import find_project

# the checkout, if this is one, or the project
ROOT = find_project() or Path(__file__).resolve().parents[2]
# then pyflyte ships nothing of this package
IS_INSTALLED = Path(sysconfig.get_path("purelib")).resolve() == ROOT


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
