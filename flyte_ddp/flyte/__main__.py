"""Commands for `make image`, the doctor and the person on call.

python -m flyte_ddp.flyte image | requests [--json]
python -m flyte_ddp.flyte abort EXECUTION [PROJECT DOMAIN]     # by default flytesnacks development
"""

from __future__ import annotations

import json
import sys

from flytekit.exceptions.base import FlyteException

from flyte_ddp.flyte.resources import pod
from flyte_ddp.flyte.settings import SETTINGS, SettingsError, check_settings

RESOURCES = {
    "cpu": "cpu",
    "memory": "mem",
    "ephemeral-storage": "ephemeral_storage",
    "nvidia.com/gpu": "gpu",
}


def main(arguments: list[str]) -> str:
    check_settings()
    match arguments:
        case ["image"]:
            if not SETTINGS.image:
                raise SettingsError("image: expected its name in settings.toml or IMAGE, got none")
            return SETTINGS.image
        case ["requests"]:
            return "\n".join(
                f"{name:<12}{', '.join(f'{value} {key}' for key, value in asked.items())}"
                for name, asked in requests_of_pods().items()
            )
        case ["requests", "--json"]:
            return json.dumps(requests_of_pods())
        case ["abort", execution, *place] if len(place) in (0, 2):
            project, domain = place or ("flytesnacks", "development")
            abort_execution(execution, project, domain)
            return f"aborted {execution} in {project}-{domain}"
    raise SettingsError(__doc__ or "")


def requests_of_pods() -> dict[str, dict[str, str]]:
    """Return what a pod of each size requests, which is its limit too, by the names that Kubernetes
    gives resources.
    """
    sizes = {
        "training": pod(SETTINGS.training, SETTINGS.gpus),
        "evaluation": pod(SETTINGS.training, min(1, SETTINGS.gpus)),
        "driver": pod(SETTINGS.driver),
        "small": pod(SETTINGS.small),
    }
    return {
        name: {
            resource: str(value)
            for resource, attribute in RESOURCES.items()
            if (value := getattr(options["limits"], attribute))
        }
        for name, options in sizes.items()
    }


def abort_execution(name: str, project: str, domain: str) -> None:
    """Abort an execution by Flyte's API, for the person on call who has no flytectl.

    Flyte deletes its pods, with the clusters that they own, and does not retry it.

    Raises:
        SettingsError: Flyte refuses it, knows no such execution, or cannot be reached.
    """
    from flytekit.clients.friendly import SynchronousFlyteClient
    from flytekit.configuration import Config
    from flytekit.models.core.identifier import WorkflowExecutionIdentifier

    identifier = WorkflowExecutionIdentifier(project, domain, name)
    try:
        SynchronousFlyteClient(Config.auto().platform).terminate_execution(
            identifier, "aborted by `python -m flyte_ddp.flyte abort`"
        )
    except FlyteException as error:
        details = getattr(error.__cause__ or error, "details", None)  # without gRPC's frame
        message = str(details() if callable(details) else error).strip()
        raise SettingsError(
            f"Flyte did not abort {name} in {project}-{domain}: {message}"
        ) from error


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))  # noqa: T201
    except SettingsError as error:
        sys.exit(str(error))
