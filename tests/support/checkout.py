"""Copies of the repository for tests that run a user's commands in one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def copy_repository(directory):
    """Copy what belongs to the repository, committed or not, to `directory`, with this environment as its `.venv`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():  # not one that was deleted without git
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, directory / name)
    environment = directory / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".installed":
            (environment / entry.name).symlink_to(entry)
    (environment / ".installed").touch()  # newer than requirements.txt: make installs nothing
    if (REPOSITORY / ".uv").is_dir():
        (directory / ".uv").symlink_to(REPOSITORY / ".uv")  # nor uv, which takes longer than the commands
