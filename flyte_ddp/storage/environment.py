"""The task's storage configuration in environment variables: how to read it and how to pass it on.

Flyte gives a task its storage configuration by the pod's identity, or as FLYTE_AWS_* or
FLYTE_AZURE_* variables, which only flytekit reads. This module alone translates them, so that
driver, worker and rank open every URL alike. Variables of the store's own client (AWS_*, AZURE_*)
win over Flyte's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from flyte_ddp.storage.limits import LIMITS_VARIABLE

# Groups of variables, each variable with Flyte's name for it ("" if Flyte has no name). A group is
# used whole, because a key from one source and a secret from another open nothing.
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
    {LIMITS_VARIABLE: ""},  # the places that the process may open
)
# A profile is a file of this machine, so it is not passed on. Its keys still win over Flyte's.
_PROFILE = "AWS_PROFILE"


def storage_environment() -> dict[str, str]:
    """Return the variables that give another process this process's storage configuration.

    They have the names that the stores' own clients know, so that a user's boto3 or pandas reads
    them too. Files and identities are not included. A pod's service account works by itself.
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

    A group of variables that this process already has stays as it is. The run's limits always win.
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
    named = {}
    for group in _GROUPS:
        for name, flyte in group.items():
            if flyte and name in found and not os.environ.get(flyte):
                named[flyte] = found[name]
    return named
