"""Run flytekit's commands in the test's process: each process of theirs takes 2 s of processor time
to start.
"""

from __future__ import annotations

import faulthandler
import sys

import pytest
from click.testing import CliRunner
from flytekit import FlyteContextManager
from flytekit.bin.entrypoint import execute_task_cmd
from flytekit.clis.sdk_in_container.pyflyte import main
from flytekit.loggers import logger as flytekit_logger

COMMANDS = {"pyflyte": main, "pyflyte-execute": execute_task_cmd}


def run_command(name, *arguments, cwd, **environment):
    """Run a command in `cwd` to its end, and return its exit code, its output and its errors."""
    num_contexts, level = FlyteContextManager.size(), flytekit_logger.level
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(sys, "argv", [name, *map(str, arguments)])
            # needs the real standard error
            patch.setattr(faulthandler, "register", lambda number: None)
            done = CliRunner(env={"COLUMNS": "200", **environment}).invoke(
                COMMANDS[name], list(map(str, arguments)), prog_name=name, catch_exceptions=False
            )
    finally:
        flytekit_logger.setLevel(level)  # pyflyte without --verbose logs no error
        while FlyteContextManager.size() > num_contexts:
            FlyteContextManager.pop_context()
    return done.exit_code, done.stdout, done.stderr
