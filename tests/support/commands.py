"""Run flytekit's commands in the test's process: each process of theirs takes 2 s of processor time to start."""

from __future__ import annotations

import faulthandler

import pytest
from click.testing import CliRunner
from flytekit import FlyteContextManager
from flytekit.bin.entrypoint import execute_task_cmd
from flytekit.clis.sdk_in_container.pyflyte import main

COMMANDS = {"pyflyte": main, "pyflyte-execute": execute_task_cmd}


def run_command(name, *arguments, cwd, **environment):
    """Run a command in `cwd` to its end, and return its exit code, its output and its errors."""
    num_contexts = FlyteContextManager.size()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(faulthandler, "register", lambda number: None)  # needs the real standard error
            done = CliRunner(env={"COLUMNS": "200", **environment}).invoke(
                COMMANDS[name], list(map(str, arguments)), prog_name=name, catch_exceptions=False
            )
    finally:
        while FlyteContextManager.size() > num_contexts:
            FlyteContextManager.pop_context()
    return done.exit_code, done.stdout, done.stderr
