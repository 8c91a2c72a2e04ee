"""Commands for `make image`, `make register`, the doctor and the person on call.

python -m flyte_ddp.flyte image | version | requests [--json]
python -m flyte_ddp.flyte limits PROJECT DOMAIN VERSION
python -m flyte_ddp.flyte abort EXECUTION [PROJECT DOMAIN]     # by default flytesnacks development
"""

from __future__ import annotations

import json
import sys

from flyte_ddp.flyte.settings import SettingsError, load_settings, require_image


def main(arguments: list[str]) -> str:
    settings = load_settings()
    match arguments:
        case ["image"]:
            return require_image(settings.image)
        case ["version"]:
            return settings.version
        case ["requests"]:
            from flyte_ddp.flyte.limits import describe_requests

            return describe_requests()
        case ["requests", "--json"]:
            from flyte_ddp.flyte.limits import requests_of_pods

            return json.dumps(requests_of_pods())
        case ["limits", project, domain, version]:
            from flyte_ddp.flyte.limits import check_limits

            check_limits(project, domain, version, require_image(settings.image))
            return f"Flyte accepts what the tasks request in {project}-{domain}"
        case ["abort", execution, *place] if len(place) in (0, 2):
            project, domain = place or ("flytesnacks", "development")
            abort_execution(execution, project, domain)
            return f"aborted {execution} in {project}-{domain}"
    raise SettingsError(__doc__ or "")


def abort_execution(name: str, project: str, domain: str) -> None:
    """Abort an execution by Flyte's API, for the person on call who has no flytectl.

    Flyte deletes its pods, with the clusters that they own, and does not retry it.

    Raises:
        SettingsError: Flyte refuses it, knows no such execution, or cannot be reached.
    """
    from flytekit.models.core.identifier import WorkflowExecutionIdentifier

    from flyte_ddp.flyte.limits import open_flyte

    with open_flyte(f"to abort {name} in {project}-{domain}") as client:
        identifier = WorkflowExecutionIdentifier(project, domain, name)
        client.terminate_execution(identifier, "aborted by `python -m flyte_ddp.flyte abort`")


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))  # noqa: T201
    except SettingsError as error:
        sys.exit(str(error))
