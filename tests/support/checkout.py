"""Copies of the repository for tests that run a user's commands in one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def copy_repository(directory):
    """Copy what belongs to the repository, committed or not, to `directory`, with this environment
    as its `.venv`, and the command as its `bin/flyte-ddp`.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():  # Files that were deleted without git are left out.
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, directory / name)
    command = directory / "bin/flyte-ddp"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m flyte_ddp "$@"\n')
    command.chmod(0o755)
    environment = directory / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name not in (".installed", ".tested", "checkout"):
            (environment / entry.name).symlink_to(entry)
    (environment / "checkout").mkdir()  # `make setup` makes this folder: the library of this copy
    (environment / "checkout/flyte_ddp").symlink_to("../../flyte_ddp")
    for name in (".installed", ".tested"):  # newer than the pins: make installs nothing
        (environment / name).touch()
    if (REPOSITORY / ".uv").is_dir():
        # uv is not installed again either: this takes longer than the commands.
        (directory / ".uv").symlink_to(REPOSITORY / ".uv")


def build_wheel(directory, checkout=REPOSITORY):
    """Return the wheel of a checkout, as `make wheel` builds it."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(checkout)], check=True, timeout=240
    )
    (file,) = directory.glob("*.whl")
    return file


def own_environment():
    """Return the environment of a shell outside of this one, with uv on its path."""
    uv = Path(shutil.which("uv") or REPOSITORY / ".uv/bin/uv")
    outside = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    return {**outside, "PATH": f"{uv.parent}{os.pathsep}{os.environ['PATH']}"}


def install_wheel(directory, wheel):
    """Install the wheel into a new environment below `directory`, and return the directory of its
    commands.
    """
    python = directory / "outer/bin/python"
    for command in (
        ("venv", "--quiet", "--seed", "--python", sys.executable, python.parents[1]),
        (
            "pip",
            "install",
            "--quiet",
            "--python",
            python,
            "-c",
            REPOSITORY / "requirements.txt",
            wheel,
        ),
    ):
        subprocess.run(["uv", *map(str, command)], env=own_environment(), check=True, timeout=900)
    return python.parent
