"""The command line that started this process, and other commands for the same shell. Log lines and
errors show these commands to the user.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys

PROGRAM = "flyte-ddp"
# environment variable that Flyte sets in a task's pod
POD_VARIABLE = "FLYTE_INTERNAL_EXECUTION_ID"
# environment variable that a driver sets for its ranks: its own `find_flyte_ddp_command()`
COMMAND_VARIABLE = "FLYTE_DDP_COMMAND"


def find_entered_command() -> list[str]:
    """Return the command line of this process, as the user entered it. The same command in the same
    directory starts the process again.
    """
    program = sys.argv[0]
    # `python FILE` and `python -m MODULE`: `orig_argv` is what the user entered. The user enters an
    # executable program such as flyte-ddp without Python, which only its first line names.
    is_python_script = program in sys.orig_argv and not os.access(program, os.X_OK)
    if is_python_script or program.endswith(".py"):
        return sys.orig_argv
    # If the user entered a name alone, the shell has searched PATH for the program's path.
    name = os.path.basename(program)
    if shutil.which(name) == program:
        program = name
    return [program, *sys.argv[1:]]


def find_flyte_ddp_command() -> str:
    """Return how the user starts flyte-ddp in the shell that started this process, such as
    `.venv/bin/flyte-ddp`.

    In a rank this is the driver's command, from `COMMAND_VARIABLE`. In a pod it is `flyte-ddp`,
    because the user's shell is on another machine.
    """
    command = os.environ.get(COMMAND_VARIABLE)
    if command:
        return command
    program = find_entered_command()[0]
    if POD_VARIABLE in os.environ or program == PROGRAM:
        return PROGRAM
    if os.path.basename(program) == PROGRAM:
        return shlex.quote(program)
    return shlex.join([sys.orig_argv[0], "-m", "flyte_ddp"])
