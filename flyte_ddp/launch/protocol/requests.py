"""The two files in a run's store by which people look into the run: its status, and a request.

Whoever may write to the store may ask. A request names an action and never carries code.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.config.fields import whole_number
from flyte_ddp.errors import ConfigError

STATUS, REQUEST = "status.json", "request.json"
FOLDER = "profiles"  # directory with a directory of files for each request
MAX_STEPS = 100  # steps of a profile
MAX_PROFILE_SECONDS = 60.0
PROFILE, STACKS = "profile", "stacks"  # the actions
WAITING = "waiting"


@dataclass
class RunStatus:
    """What a run did when its driver wrote this. Times are in seconds since the epoch."""

    name: str  # name of the recipe, the function or the script
    # waiting, running (no step is known), training, saving, restarting; finished, stopped, failed
    phase: str
    # reason of a wait, a save or a restart, or the end of the run; a single line
    reason: str = ""
    written_at: float = 0.0
    step: int = 0  # optimizer steps since the start of the run
    num_steps: int = 0  # optimizer steps of the whole run; 0 if it is not known
    steps_per_second: float = 0.0
    world_size: int = 0

    @property
    def has_ended(self) -> bool:
        return self.phase in ("finished", "stopped", "failed")


@dataclass
class Request:
    """A request to a run, and in the end the answer.

    Raises:
        ConfigError: a field has the wrong type or range.
    """

    action: str
    id: str  # name of the directory of its files
    rank: int = 0
    num_steps: int = 5
    is_done: bool = False
    files: list[str] = field(default_factory=list)  # names in `folder`
    problem: str = ""  # why there are fewer files than asked for; one line

    def __post_init__(self) -> None:
        if self.action not in (PROFILE, STACKS):
            raise ConfigError(f"action: expected {PROFILE} or {STACKS}, got {self.action!r}")
        if not re.fullmatch(r"[0-9a-zA-Z-]{1,60}", self.id):
            raise ConfigError(f"id: expected letters, digits and dashes, got {self.id!r:.80}")
        whole_number("--steps", self.num_steps, minimum=1, maximum=MAX_STEPS)

    @property
    def folder(self) -> str:
        """The directory of its files in the store."""
        return f"{FOLDER}/{self.id}"


def to_json(value: RunStatus | Request) -> bytes:
    """Return the contents of the file for `value`."""
    return json.dumps(dataclasses.asdict(value), indent=1).encode()


def read_json(kind: type[Any], contents: bytes) -> Any:
    """Return the object of class `kind` in a file; None if the file contains no such object."""
    try:
        return kind(**json.loads(contents))
    except (ValueError, TypeError):
        return None
