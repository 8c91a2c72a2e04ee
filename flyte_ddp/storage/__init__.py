"""The only package that opens paths and fsspec URLs. It adds the task's credentials and retries.

Imports no torch.
"""

from flyte_ddp.storage.directory import (
    SHORT_TIMEOUT,
    STORE_TIMEOUT,
    UNFINISHED,
    Storage,
    check_name,
    compute_sha256,
    fetch_file,
    file_below,
    read_file,
    write_file,
)
from flyte_ddp.storage.environment import (
    adopt_storage_environment,
    flyte_storage_environment,
    storage_environment,
)
from flyte_ddp.storage.filesystem import (
    check_place,
    check_url,
    list_client_modules,
    open_filesystem,
)
from flyte_ddp.storage.limits import check_places, limit_urls, permit
from flyte_ddp.storage.redaction import has_password, redact_errors, redact_url, redact_values

__all__ = [
    "SHORT_TIMEOUT",
    "STORE_TIMEOUT",
    "UNFINISHED",
    "Storage",
    "adopt_storage_environment",
    "check_name",
    "check_place",
    "check_places",
    "check_url",
    "compute_sha256",
    "fetch_file",
    "file_below",
    "flyte_storage_environment",
    "has_password",
    "limit_urls",
    "list_client_modules",
    "open_filesystem",
    "permit",
    "read_file",
    "redact_errors",
    "redact_url",
    "redact_values",
    "storage_environment",
    "write_file",
]
