"""`flyte-ddp image` and `abort`: for `make image` and the person on call."""

from __future__ import annotations

from collections.abc import Sequence

from flytekit.exceptions.base import FlyteException

from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ClusterError
from flyte_ddp.flyte.register import PROJECT_OPTIONS, find_image
from flyte_ddp.project.settings import SETTINGS, check_settings


def image(arguments: Sequence[str]) -> str:
    make_parser("image", "print the image of the project in this directory", ()).parse_args(
        arguments
    )
    check_settings()
    return find_image(SETTINGS)


def abort(arguments: Sequence[str]) -> str:
    """Abort an execution by Flyte's API, for the person on call who has no flytectl.

    Flyte deletes its pods, with the clusters that they own, and does not retry it.

    Raises:
        ClusterError: Flyte refuses the request, knows no such execution, or cannot be reached.
    """
    from flytekit.clients.friendly import SynchronousFlyteClient
    from flytekit.configuration import Config
    from flytekit.models.core.identifier import WorkflowExecutionIdentifier

    given = make_parser(
        "abort",
        "end an execution of Flyte's for good, with its pods and clusters",
        (("execution", "its name", None), *PROJECT_OPTIONS),
    ).parse_args(arguments)
    place = f"{given.execution} in {given.project}-{given.domain}"
    identifier = WorkflowExecutionIdentifier(given.project, given.domain, given.execution)
    try:
        SynchronousFlyteClient(Config.auto().platform).terminate_execution(
            identifier, "aborted by `flyte-ddp abort`"
        )
    except FlyteException as error:
        details = getattr(error.__cause__ or error, "details", None)
        message = str(error)
        if callable(details):  # gRPC's text without its frame
            message = str(details())
        raise ClusterError(f"Flyte did not abort {place}: {message.strip()}") from error
    return f"aborted {place}"
