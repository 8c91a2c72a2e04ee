"""Classification of the errors that the stores' clients raise. Each client has its own classes.

Each error becomes one of three: FileNotFoundError (proven missing), `StorageDenied` (the user's
mistake) or `StorageUnavailable` (the store may come back).
"""

from __future__ import annotations

import contextlib
import email.utils
import enum
import errno
import socket
import textwrap
import time
from collections.abc import Iterator, Mapping

from flyte_ddp.errors import CheckpointError, ConfigError
from flyte_ddp.storage.redaction import redact_url

# Classes of errors that mean "no usable credentials", of any store's client. They are compared by
# name, so that this module imports no client.
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
# Error codes that say more than the HTTP status of the answer.
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
MAX_CLOCK_SKEW = 840.0  # seconds; S3 refuses a request with a date 15 minutes off
# Refusals that pass when a machine's clock is set right.
_PASSING_REFUSALS = {"RequestTimeTooSkewed", "RequestExpired"}
# Mistakes in a program or in a machine. Another try would only hide them.
_NOT_OF_THE_STORE = (
    TypeError,
    AttributeError,
    NameError,
    NotImplementedError,
    ImportError,
    MemoryError,
    CheckpointError,  # contents that cannot be written
    ConfigError,  # a ValueError of this package
)


MAX_TEXT = 300  # characters of an error in one line
# The permission that a request to S3 needs. Without the right to list, S3 answers "forbidden" for a
# missing file.
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
    # Once the store has answered, the service that issues credentials may be away, and a ValueError
    # is an unreadable answer. Before that, a ValueError is a wrong address.
    if _lacks_credentials(error) or isinstance(error, ValueError):
        if has_answered:
            return Meaning.AWAY
        return Meaning.DENIED
    if code in _PASSING_REFUSALS or (status == 403 and _clocks_differ(error)):
        return Meaning.AWAY
    if status == 401 or _is_forbidden(error, status) or _is_wrong_place(error):
        return Meaning.DENIED
    return Meaning.AWAY


def _is_wrong_place(error: Exception) -> bool:
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return True
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENAMETOOLONG):
        return True
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def is_full(error: BaseException) -> bool:
    """Return whether `error` says that a disk or a user's quota on it is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_of_machine(error: BaseException | None) -> bool:
    """Return whether `error` comes from this machine or its network, such as too many open files,
    and not from the sample that was being made.
    """
    for cause in _causes(error):
        # torch has no class of its own for this error.
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
            return True
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            # Decoders raise OSError without a number for damaged bytes.
            return cause.errno is not None or isinstance(cause, (ConnectionError, TimeoutError))
    return False


def remedy_for(error: Exception, is_local: bool) -> str:
    """Return what a user can do about an `error` that means DENIED.

    Args:
        is_local: True if the place is a directory on a disk.
    """
    status, code = answer(error)
    if is_local:
        return "give a place where this process may read and create files"
    if code in _BUCKETS:
        return "create the bucket or correct the URL"
    if code == "ExpiredToken":
        return "renew the keys"
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
    """Return the HTTP status and the error code of the answer behind `error`; 0 and "" if there was
    no answer.
    """
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, Mapping):  # botocore
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or code
        else:  # azure, aiohttp, gcsfs
            code = getattr(cause, "error_code", None) or ""
            code = str(getattr(code, "value", code))  # azure's code is an enum
            values = (getattr(cause, name, None) for name in ("status_code", "status", "code"))
            status = next((value for value in values if value is not None), "")
        if str(status).isdigit():
            return int(status), code
        if code:
            return 0, code
    return 0, ""


def is_unexplained(error: BaseException) -> bool:
    """Return whether the store refused a request without its reason. The answer to a HEAD request
    has no body.
    """
    status, code = answer(error)
    return status == 400 and code in ("", str(status))


def _clocks_differ(error: BaseException) -> bool:
    """Return whether the store's clock, by the date of its answer, is too far from this machine's.

    The answer to a HEAD request has no body with an error code.
    """
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if not isinstance(response, Mapping):
            continue
        metadata = response.get("ResponseMetadata", {})
        with contextlib.suppress(KeyError, ValueError, TypeError):
            theirs = email.utils.parsedate_to_datetime(metadata["HTTPHeaders"]["date"])
            return abs(theirs.timestamp() - time.time()) > MAX_CLOCK_SKEW
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        cause = error.__cause__
        if cause is None and not error.__suppress_context__:
            cause = error.__context__
        error = cause


def describe(error: BaseException) -> str:
    """Return the class and the message of `error` in one short line without secrets."""
    # azure appends the whole answer to its message.
    message = redact_url(str(error).partition("Content: <")[0])
    text = f"{type(error).__name__}: {message}".removesuffix(": ")
    _, code = answer(error)
    if not code.isdigit() and code not in text:
        text = f"{text} ({code})"  # s3fs names the message alone
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror) and str(cause.strerror) not in text:
            text = f"{text} ({cause.strerror})"  # botocore names the URL alone
    return textwrap.shorten(text, MAX_TEXT, placeholder=" ...")


def _is_forbidden(error: Exception, status: int) -> bool:
    is_refused_by_gcsfs = str(error).startswith("Forbidden: ")
    return status == 403 or isinstance(error, PermissionError) or is_refused_by_gcsfs


def _lacks_credentials(error: Exception) -> bool:
    return any(type(cause).__name__ in _NO_CREDENTIALS for cause in _causes(error))
