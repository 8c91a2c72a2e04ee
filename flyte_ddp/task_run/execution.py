"""The place of a task in its Flyte: names and URLs, those that outlive an attempt and those that do
not.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from flyte_ddp.errors import ConfigError


@dataclass(frozen=True)
class Execution:
    """The task's part of a run in Flyte. All attempts share the fields up to `url`."""

    checkpoints: str  # URL at which every attempt finds the checkpoints of those before it
    # Names the task, and the run in W&B; "" in a local run where nothing names it.
    run_id: str
    is_local: bool  # the task runs in the user's own process and not in a pod
    champions: str = ""  # URL that all runs of a project and domain share; "" in a local run
    url: str = ""  # the execution in Flyte's console; "" if unknown
    attempt_id: str = ""  # names what belongs to this attempt alone; "" in a local run
    attempt: int = 0  # from 0
    previous_pod: str = ""  # name of the pod of the attempt before; "" if there is none

    @property
    def name(self) -> str:
        """The name of the task for records that outlive it; "" in a local run."""
        return "" if self.is_local else self.run_id

    def default_champion(self, recipe: str) -> str:
        """Return the URL of a recipe's champion, where the user gave none. Raises ConfigError in a
        local run.
        """
        if self.is_local:
            raise ConfigError("champion: expected a directory or a URL in a local run, got ''")
        return f"{self.champions}/{recipe}"


def champions_of(outputs: str, project: str, domain: str) -> str:
    """Return the URL of the champions of a project and domain.

    It is at the bucket's top: a lifecycle rule for outputs must not delete the model in use.

    Args:
        outputs: URL or path where Flyte keeps the outputs of tasks.
    """
    parts = urlsplit(outputs)
    bucket = f"{parts.scheme}://{parts.netloc}" if parts.netloc else outputs  # a path has none
    return f"{bucket}/champions/{project}/{domain}"
