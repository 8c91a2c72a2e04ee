"""Abort an execution by Flyte's API, for the person on call who has no flytectl."""

from __future__ import annotations

from tasks.limits import flyte_message
from tasks.settings import SettingsError


def abort_execution(name: str, project: str, domain: str) -> None:
    """Abort an execution. Flyte deletes its pods, with the clusters that they own, and does not retry it.

    Raises:
        SettingsError: Flyte refuses it, knows no such execution, or cannot be reached.
    """
    from flytekit.configuration import Config
    from flytekit.exceptions.system import FlyteSystemException
    from flytekit.exceptions.user import FlyteUserException
    from flytekit.models.core.identifier import WorkflowExecutionIdentifier
    from flytekit.remote import FlyteRemote

    remote = FlyteRemote(Config.auto(), default_project=project, default_domain=domain)
    try:
        remote.client.terminate_execution(
            WorkflowExecutionIdentifier(project, domain, name), "aborted by `python -m tasks abort`"
        )
    except FlyteSystemException as error:
        raise SettingsError(
            f"Flyte does not answer ({flyte_message(error)}); name it in ~/.flyte/config.yaml or FLYTECTL_CONFIG"
        ) from error
    except FlyteUserException as error:
        raise SettingsError(f"Flyte refuses to abort {name} in {project}-{domain}: {flyte_message(error)}") from error
