"""The task's storage configuration, read from and put into environment variables.

Flyte gives a task its storage configuration as FLYTE_AWS_* or FLYTE_AZURE_* variables, which only
flytekit reads, or by the pod's identity. It is read here and nowhere else, so that driver, worker
and rank open every URL alike. Variables of the store's own client (AWS_*, AZURE_*) win over
Flyte's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from flyte_ddp.storage.limits import LIMITS_VARIABLE

# Variables that belong together, each with Flyte's name for it ("" where it has none). A group is
# used whole: a key of one source with the secret of another opens nothing.
_GROUPS: tuple[dict[str, str], ...] = (
    {
        "AWS_ACCESS_KEY_ID": "FLYTE_AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY": "FLYTE_AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN": "",
    },
    {"AWS_ENDPOINT_URL": "FLYTE_AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3": ""},
    {"AWS_REGION": "", "AWS_DEFAULT_REGION": ""},
    {
        "AZURE_STORAGE_ACCOUNT_NAME": "FLYTE_AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY": "FLYTE_AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_TENANT_ID": "FLYTE_AZURE_TENANT_ID",
        "AZURE_STORAGE_CLIENT_ID": "FLYTE_AZURE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET": "FLYTE_AZURE_CLIENT_SECRET",
        "AZURE_STORAGE_CONNECTION_STRING": "",
        "AZURE_STORAGE_SAS_TOKEN": "",
    },
    {"GOOGLE_CLOUD_PROJECT": ""},
    {"STORAGE_EMULATOR_HOST": ""},
    {"FLYTE_AWS_ADDRESSING_STYLE": ""},
    {LIMITS_VARIABLE: ""},  # what may be opened with all this
)
# A profile lies in a file of this machine, so it is not passed on; but its keys win over Flyte's.
_PROFILE = "AWS_PROFILE"


def storage_environment() -> dict[str, str]:
    """Return the variables by which another process gets this one's storage configuration.

    They have the names that the stores' own clients know, so that a user's boto3 or pandas reads
    them too. Files and identities are not among them: a service account works by itself in a pod
    that has it.
    """
    found = {}
    for group in _GROUPS:
        own = {name: os.environ[name] for name in group if os.environ.get(name)}
        if not own and not ("AWS_ACCESS_KEY_ID" in group and os.environ.get(_PROFILE)):
            own = {
                name: os.environ[flyte] for name, flyte in group.items() if os.environ.get(flyte)
            }
        found.update(own)
    return found


def adopt_storage_environment(given: Mapping[str, str]) -> None:
    """Put `given`, another process's `storage_environment()`, in this process's environment.

    What this process has been given itself stays, whole groups of variables at a time. Limits are
    those of the run.
    """
    own = storage_environment()
    for group in _GROUPS:
        if LIMITS_VARIABLE in group or not any(name in own for name in group):
            os.environ.update({name: given[name] for name in group if name in given})


def flyte_storage_environment() -> dict[str, str]:
    """Return this process's storage configuration under Flyte's names, for flytekit outside a pod
    of Flyte's.
    """
    found = storage_environment()
    return {
        flyte: found[name]
        for group in _GROUPS
        for name, flyte in group.items()
        if flyte and name in found and not os.environ.get(flyte)
    }
