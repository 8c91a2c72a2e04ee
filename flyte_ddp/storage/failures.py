"""Classification of errors of the stores' clients. Every kind of file system has its own.

They become one of three: FileNotFoundError (proven missing), `StorageDenied` (the user's mistake)
or `StorageUnavailable` (the store may come back).
"""

from __future__ import annotations

import contextlib
import email.utils
import enum
import errno
import textwrap
import time
from collections.abc import Iterator, Mapping

from flyte_ddp.errors import CheckpointError, ConfigError
from flyte_ddp.storage.urls import redact_url

# Classes of errors that mean "no usable credentials", of any store's client; by name, so that none
# is imported here.
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "NoAuthTokenError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
    "ClientAuthenticationError",
}
# Codes of answers whose HTTP status does not tell enough.
_BUCKETS = {
    "ContainerNotFound",
    "InvalidBucketName",
    "InvalidResourceName",
    "NoSuchBucket",
    "OutOfRangeInput",
}
_REFUSALS = {
    *_BUCKETS,
    "AccountProblem",
    "AllAccessDisabled",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "PermanentRedirect",
    "SignatureDoesNotMatch",
}
_CONDITIONS = {"ConditionalRequestConflict", "NotImplemented", "PreconditionFailed"}
MAX_CLOCK_SKEW = 840.0  # seconds; S3 refuses requests whose clock is 15 minutes from its own
# The clock of a machine was set, or will be.
_PASSING_REFUSALS = {"RequestTimeTooSkewed", "RequestExpired"}
# Mistakes in a program or in a machine: to wait for another result would hide them.
_NOT_OF_THE_STORE = (
    *(TypeError, AttributeError, NameError, NotImplementedError, ImportError, MemoryError),
    CheckpointError,  # what was to be written cannot be
    ConfigError,  # ours, which is a ValueError
)


MAX_TEXT = 300  # characters of an error in one line
# The permission that a request to S3 needs. A file that is not there is "forbidden" to who may not
# list.
_PERMISSIONS = {
    **dict.fromkeys(("ListObjectsV2", "ListObjects", "HeadBucket"), "s3:ListBucket"),
    **dict.fromkeys(("DeleteObject", "DeleteObjects"), "s3:DeleteObject"),
    **dict.fromkeys(
        ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
        "s3:PutObject",
    ),
    "HeadObject": "s3:GetObject, and s3:ListBucket",
    **dict.fromkeys(("GetObject", "CopyObject"), "s3:GetObject"),
}


class Meaning(enum.Enum):
    """The meaning of an error for the operation that met it."""

    AWAY = "the store may come back"
    MISSING = "there is no such file"
    DENIED = "the user's mistake"
    FINAL = "the operation's own result, or a bug: another try would end the same way"


def classify(error: Exception, has_answered: bool) -> Meaning:
    """Return what `error` means.

    Args:
        has_answered: True if the store has answered this process before.
    """
    if isinstance(error, _NOT_OF_THE_STORE):
        return Meaning.FINAL
    status, code = answer(error)
    if code in _REFUSALS:
        return Meaning.DENIED
    is_condition = code in _CONDITIONS or status in (409, 412, 501)
    if is_condition or isinstance(error, (FileNotFoundError, FileExistsError)):
        return Meaning.FINAL
    if status == 404:
        return Meaning.MISSING
    # The service that issues credentials may be away. A ValueError is at first an address that is
    # none, later an answer that cannot be read.
    if _lacks_credentials(error) or isinstance(error, ValueError):
        return Meaning.AWAY if has_answered else Meaning.DENIED
    if code in _PASSING_REFUSALS or (status == 403 and _clocks_differ(error)):
        return Meaning.AWAY
    if (
        status == 401
        or _is_forbidden(error, status)
        or isinstance(error, (IsADirectoryError, NotADirectoryError))
        or (isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENAMETOOLONG))
        or "CERTIFICATE_VERIFY_FAILED" in str(error)
    ):
        return Meaning.DENIED
    return Meaning.AWAY


def is_full(error: BaseException) -> bool:
    """Return whether `error` says that a disk, or what its user may take of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_of_machine(error: BaseException | None) -> bool:
    """Return whether `error` says nothing about the sample that was made: it is of this machine,
    such as too many open files, or of its network.
    """
    for cause in _causes(error):
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):  # torch's
            return True
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            # Decoders raise OSError without a number for damaged bytes.
            return cause.errno is not None or isinstance(cause, (ConnectionError, TimeoutError))
    return False


def remedy_for(error: Exception, is_local: bool) -> str:
    """Return what a user can do about `error`, which means DENIED.

    Args:
        is_local: True if the place is a directory on a disk.
    """
    status, code = answer(error)
    if is_local:
        return "give a place where this process may read and create files"
    if code in _BUCKETS:
        return "create the bucket or correct the URL"
    if _is_forbidden(error, status):
        requests = (getattr(cause, "operation_name", "") for cause in _causes(error))
        needed = next((f" {_PERMISSIONS[name]}" for name in requests if name in _PERMISSIONS), "")
        return f"correct the keys, or give their owner the permission{needed}"
    if _lacks_credentials(error) or status == 401:
        return (
            "give this process credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "AZURE_STORAGE_* or GOOGLE_APPLICATION_CREDENTIALS (or Flyte's FLYTE_AWS_*, "
            "FLYTE_AZURE_*) in its environment, or a service account that may use the bucket"
        )
    return "correct the URL, the endpoint or the keys"


def answer(error: BaseException) -> tuple[int, str]:
    """Return (HTTP status, error code) of the store's answer that `error` stands for; 0 and ""
    where it has none.
    """
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, Mapping):  # botocore
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or code
        else:  # azure, aiohttp, gcsfs
            code = getattr(cause, "error_code", None) or ""
            code = str(getattr(code, "value", code))  # an enum, of azure
            values = (getattr(cause, name, None) for name in ("status_code", "status", "code"))
            status = next((value for value in values if value is not None), "")
        if str(status).isdigit() or code:
            return int(status) if str(status).isdigit() else 0, code
    return 0, ""


def _clocks_differ(error: BaseException) -> bool:
    """Return whether the store's clock is too far from this machine's, as the date of its answer
    shows.

    The answer to a HEAD request has no body that could say so.
    """
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, Mapping) else {}
        with contextlib.suppress(KeyError, ValueError, TypeError):
            theirs = email.utils.parsedate_to_datetime(metadata["HTTPHeaders"]["date"])
            return abs(theirs.timestamp() - time.time()) > MAX_CLOCK_SKEW
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def describe(error: BaseException) -> str:
    """Return class and message of `error` in one line that ends, without secrets."""
    # Without azure's whole answer, after what it says.
    message = redact_url(str(error).partition("Content: <")[0])
    text = f"{type(error).__name__}: {message}".removesuffix(": ")
    return textwrap.shorten(text, MAX_TEXT, placeholder=" ...")


def _is_forbidden(error: Exception, status: int) -> bool:
    # of gcsfs
    return (
        status == 403 or isinstance(error, PermissionError) or str(error).startswith("Forbidden: ")
    )


def _lacks_credentials(error: Exception) -> bool:
    return any(type(cause).__name__ in _NO_CREDENTIALS for cause in _causes(error))
