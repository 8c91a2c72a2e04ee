"""The command by which a person started this process, for lines that name another one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

PROGRAM = "flyte-ddp"
# environment variable of a task's pod; Flyte itself starts the task again
POD = "FLYTE_INTERNAL_EXECUTION_ID"
# A variable in the environment of ranks: the result of `own_command` in their driver.
COMMAND_VARIABLE = "FLYTE_DDP_COMMAND"


def typed_command() -> list[str]:
    """Return the command line of this process. It starts the process again in its directory."""
    program = sys.argv[0]
    # true for `python script.py` and `python -m flyte_ddp`
    is_argument = program in sys.orig_argv and not os.access(program, os.X_OK)
    if is_argument or program.endswith(".py"):
        return sys.orig_argv
    # The shell has given the whole path of a program that it found itself.
    name = os.path.basename(program)
    if shutil.which(name) == program:
        program = name
    return [program, *sys.argv[1:]]


def own_command() -> str:
    """Return how a person starts a command of this package where this process was started, such as
    `.venv/bin/flyte-ddp`.

    A rank returns the same as its driver. In a pod this is the bare name, because the person is
    somewhere else.
    """
    command = os.environ.get(COMMAND_VARIABLE)
    if command:
        return command
    program = typed_command()[0]
    if POD in os.environ or program == PROGRAM:
        return PROGRAM
    if os.path.basename(program) == PROGRAM:
        return shlex.quote(program)
    return shlex.join([sys.orig_argv[0], "-m", "flyte_ddp"])
