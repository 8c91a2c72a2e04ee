"""The place of a task in its Flyte: the names and URLs of the task, and of the current attempt."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from flyte_ddp.errors import ConfigError


@dataclass(frozen=True)
class Execution:
    """The task's part of a run in Flyte. All attempts share the fields up to `url`."""

    checkpoints: str  # URL at which every attempt finds the checkpoints of earlier attempts
    # name of the task, and of the run in W&B; "" in a local run without a name
    run_id: str
    is_local: bool  # The task runs in the user's own process and not in a pod.
    champions: str = ""  # URL that all runs of a project and domain share; "" in a local run
    url: str = ""  # URL of the execution in Flyte's console; "" if unknown
    attempt_id: str = ""  # name of this attempt alone; "" in a local run
    attempt: int = 0  # number of the attempt, from 0
    previous_pod: str = ""  # name of the previous attempt's pod; "" if there is none

    @property
    def name(self) -> str:
        """The name of the task for records that outlive it; "" in a local run."""
        if self.is_local:
            return ""
        return self.run_id

    def default_champion(self, recipe: str) -> str:
        """Return the default URL of a recipe's champion. Raises ConfigError in a local run, which
        has none.
        """
        if self.is_local:
            raise ConfigError("champion: expected a directory or a URL in a local run, got ''")
        return f"{self.champions}/{recipe}"


def champions_of(outputs: str, project: str, domain: str) -> str:
    """Return the URL of the champions of a project and domain.

    The URL is at the bucket's top: a lifecycle rule for outputs must not delete the model in use.

    Args:
        outputs: URL or path where Flyte keeps the outputs of tasks.
    """
    parts = urlsplit(outputs)
    bucket = outputs
    if parts.netloc:  # A path has none.
        bucket = f"{parts.scheme}://{parts.netloc}"
    return f"{bucket}/champions/{project}/{domain}"
