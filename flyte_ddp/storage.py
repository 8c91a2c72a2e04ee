"""The only module that opens a path or an fsspec URL: with the task's credentials, retries and clear errors. No torch.

Flyte gives a task its storage configuration as FLYTE_AWS_* or FLYTE_AZURE_* variables, which only flytekit reads, or by
the pod's identity. It is read here and nowhere else, so that driver, worker and rank open every URL alike. Variables of
the store's own client (AWS_*, AZURE_*) win over Flyte's.

Every error of a store becomes one of three: FileNotFoundError (proven missing), `StorageDenied` (the user's mistake) or
`StorageUnavailable` (the store may come back).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import fcntl
import logging
import os
import random
import re
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from flyte_ddp.errors import ConfigError, FileChanged, StorageDenied, StorageUnavailable

T = TypeVar("T")

CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 30.0  # seconds without a byte
UPLOAD_PART = 8 << 20  # bytes of one request
MIN_UPLOAD_RATE = 128 << 10  # bytes per second of each of the parts on their way at once
FIRST_PAUSE, MAX_PAUSE = 0.5, 15.0  # seconds between two tries
STORE_TIMEOUT = 600.0  # seconds that an operation keeps trying while the store is away
ACCESS_CHECK_TIMEOUT = 60.0  # seconds; nothing has been started yet that would be lost

# Variables that belong together, each with Flyte's name for it ("" where it has none). A group is used whole: a key of
# one source with the secret of another opens nothing.
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
)
# A profile lies in a file of this machine, so it is not handed on; but who set it wants its keys, not Flyte's.
_PROFILE = "AWS_PROFILE"

# Classes of errors that mean "no usable credentials", of any store's client; by name, so that none is imported here.
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "NoAuthTokenError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
}
# Answers that no second try changes, apart from those with HTTP status 401 and 403.
_REFUSALS = {
    "AccountProblem",
    "AllAccessDisabled",
    "AuthorizationHeaderMalformed",
    "ContainerNotFound",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidBucketName",
    "InvalidToken",
    "NoSuchBucket",
    "PermanentRedirect",
    "SignatureDoesNotMatch",
}
# Mistakes in a program or in a machine: to wait for another result would hide them.
_NOT_OF_THE_STORE = (TypeError, AttributeError, NameError, NotImplementedError, ImportError, MemoryError)

logger = logging.getLogger(__name__)
_jitter = random.SystemRandom()  # of its own: the shared generator belongs to the training
_lock = threading.Lock()
_outages: dict[str, float] = {}  # store -> when it went away, so that a whole process logs an outage once
_reached: set[str] = set()  # stores that have answered this process


def storage_environment() -> dict[str, str]:
    """Return the variables by which another process gets this one's storage configuration.

    They have the names that the stores' own clients know, so that a user's boto3 or pandas reads them too. Files and
    identities are not among them: a service account works by itself in a pod that has it.
    """
    found = {}
    for group in _GROUPS:
        own = {name: os.environ[name] for name in group if os.environ.get(name)}
        if not own and not ("AWS_ACCESS_KEY_ID" in group and os.environ.get(_PROFILE)):
            own = {name: os.environ[flyte] for name, flyte in group.items() if os.environ.get(flyte)}
        found.update(own)
    return found


def adopt_storage_environment(given: Mapping[str, str]) -> None:
    """Put `given`, another process's `storage_environment()`, in this process's environment.

    What this process has been given itself stays, whole groups of variables at a time.
    """
    own = storage_environment()
    for group in _GROUPS:
        if not any(name in own for name in group):
            os.environ.update({name: given[name] for name in group if name in given})


def open_filesystem(
    url: str,
    field: str = "url",
    *,
    num_tries: int = 4,
    request_timeout: float = 0.0,
    anonymous: bool = False,
    endpoint_url: str = "",
    **options: Any,
) -> tuple[Any, str]:
    """Return (fsspec file system, path in it) of the path or URL `url`, with the task's storage configuration.

    Args:
        field: named in errors.
        num_tries: tries of each request to S3 before its error is raised.
        request_timeout: seconds without a byte before a request to S3 fails; 0 for `READ_TIMEOUT`.
        anonymous: do without credentials, for public buckets.
        endpoint_url: of the store; "" for that of the environment.
        options: for fsspec, over those made here.

    Raises:
        ConfigError: no such kind of URL is known here.
    """
    protocol = fsspec.utils.get_protocol(url)
    request_timeout = request_timeout or READ_TIMEOUT
    own: dict[str, Any] = {}
    if protocol in ("s3", "s3a"):
        own = _s3_options(num_tries, request_timeout, anonymous)
    elif protocol in ("gs", "gcs") and anonymous:
        own["token"] = "anon"
    elif protocol in ("abfs", "abfss", "az", "adl"):
        own = _azure_options(anonymous)
    if endpoint_url:
        own["endpoint_url"] = endpoint_url
    try:
        file_system, path = fsspec.url_to_fs(url, **{**own, **options})
    except (ValueError, ImportError) as error:  # a protocol that fsspec does not know or has no package for
        raise ConfigError(
            f"{field}: expected a path or a URL that fsspec knows, got {redact_url(url)!r}: {_describe(error)}"
        ) from error
    if protocol in ("s3", "s3a"):
        file_system.retries = 1  # s3fs has tries of its own, around those of its client
        _limit_requests(file_system, request_timeout * num_tries)
    return file_system, path


def _s3_options(num_tries: int, timeout: float, anonymous: bool) -> dict[str, Any]:
    # Given as arguments, not left to the client: fsspec shares file systems with equal arguments, and one that was
    # opened before the keys changed would go on with the old ones.
    found = storage_environment()
    config: dict[str, Any] = {
        "connect_timeout": min(CONNECT_TIMEOUT, timeout),
        "read_timeout": timeout,
        "retries": {"mode": "standard", "total_max_attempts": num_tries},
    }
    if style := found.get("FLYTE_AWS_ADDRESSING_STYLE"):
        config["s3"] = {"addressing_style": style.lower()}
    options: dict[str, Any] = {"config_kwargs": config, "use_listings_cache": False}
    if endpoint := found.get("AWS_ENDPOINT_URL_S3") or found.get("AWS_ENDPOINT_URL"):
        options["endpoint_url"] = endpoint
    if anonymous:
        options["anon"] = True
    elif "AWS_ACCESS_KEY_ID" in found:
        options["key"] = found["AWS_ACCESS_KEY_ID"]
        options["secret"] = found.get("AWS_SECRET_ACCESS_KEY")
        options["token"] = found.get("AWS_SESSION_TOKEN")
    return options


def _limit_requests(file_system: Any, timeout: float) -> None:
    """End each request of an s3fs file system that gets no answer.

    Its client's own timeout begins when the whole request is sent. It never ends one to a silent store: the client
    waits for permission to send the body ("100-continue") or for room in the connection.
    """
    if "_call_s3" in vars(file_system):  # fsspec shares its instances
        return
    call = file_system._call_s3

    async def call_within_limit(method: str, *args: Any, **kwargs: Any) -> Any:
        limit = timeout + len(kwargs.get("Body") or b"") / MIN_UPLOAD_RATE
        try:
            answer = await asyncio.wait_for(call(method, *args, **kwargs), limit)
        except asyncio.TimeoutError:
            raise ConnectionError(f"no answer to {method} for {limit:.0f} s") from None
        if method in ("put_object", "upload_part"):
            file_system.last_upload_at = time.monotonic()
        return answer

    file_system._call_s3 = call_within_limit


def _azure_options(anonymous: bool) -> dict[str, Any]:
    prefix = "AZURE_STORAGE_"
    found = storage_environment()
    options = {name.removeprefix(prefix).lower(): value for name, value in found.items() if name.startswith(prefix)}
    return {**options, "anon": anonymous}


def redact_url(text: str) -> str:
    """Return `text`, a URL or a message with URLs in it, without passwords, signatures and tokens.

    Everything that is logged, shown or stored goes through here.
    """
    return re.sub(r"\b[a-zA-Z][\w+.-]*://[^\s'\"<>]+", lambda match: _redact(match[0]), text)


def _redact(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if "::" in rest:  # a chain, such as zip://inner.csv::https://host/outer.zip
        first, _, others = rest.partition("::")
        return f"{_redact(f'{scheme}://{first}')}::{_redact(others) if '://' in others else others}"
    address, _, query = rest.partition("?")
    address = address.partition("#")[0]
    user, at, host = address.partition("/")[0].rpartition("@")
    # A name alone is a secret over HTTP (a token); elsewhere it is part of the place, as abfs://container@account.
    if at and (":" in user or scheme in ("http", "https")):
        address = f"...@{host}{address[len(user) + 1 + len(host) :]}"
    names = [pair.partition("=")[0] for pair in query.split("&") if pair]
    return f"{scheme}://{address}" + ("?" + "&".join(f"{name}=..." for name in names) if names else "")


def has_password(url: str) -> bool:
    """Tell if `url` has a password or a token before its host."""
    return "@" in urllib.parse.urlsplit(url).netloc and redact_url(url) != url


class Storage:
    """The files directly below `url`, such as a run's checkpoints. Names are relative to it; contents are bytes.

    Every operation waits with back-off while the store cannot be reached. One line is logged when a store goes away
    and one when it is back.

    Args:
        field: what users call this place; named in errors.
        timeout: seconds that an operation waits for the store; 0 for a single try.
        options: of `open_filesystem`.

    Attributes:
        stop: set it to end waiting: what waits raises StorageUnavailable.

    Raises:
        ConfigError: no such kind of URL is known here.

    Each operation raises:
        StorageDenied: credentials are missing, wrong or not sufficient, or there is no such bucket.
        StorageUnavailable: the store could not be reached for `timeout` seconds.
    """

    def __init__(self, url: str, field: str = "checkpoints", timeout: float = STORE_TIMEOUT, **options: Any) -> None:
        self.url = url if "?" in url else url.rstrip("/") or "/"
        self.field = field
        self.timeout = timeout
        self.stop = threading.Event()
        # `retry` is what tries again.
        self.file_system, self.root = open_filesystem(self.url, field, **{"num_tries": 1, **options})
        protocol = self.file_system.protocol
        protocols = (protocol,) if isinstance(protocol, str) else protocol
        self.is_local = "file" in protocols
        self._upload_options = {"chunksize": UPLOAD_PART} if "s3" in protocols else {}
        if self.is_local:
            self.url = self.root  # absolute: a process with another working directory means the same place

    def join(self, name: str) -> str:
        """Return the full URL of `name`."""
        return f"{self.url}/{name}"

    def check_access(self, field: str = "") -> None:
        """Write, read and delete a small file, before anything that needs this place is started.

        Args:
            field: named in errors in place of that of this object.

        Raises:
            StorageDenied: this process may not; in one line, with the remedy.
            StorageUnavailable: the store could not be reached for `ACCESS_CHECK_TIMEOUT` seconds.
        """
        probe = Storage(self.url, field or self.field, min(self.timeout, ACCESS_CHECK_TIMEOUT))
        name, contents = f".probe-{uuid.uuid4().hex}", b"written to see that it can be"
        try:
            probe.write(name, contents)
        except FileNotFoundError as error:  # a directory that cannot be created, below /proc for example
            raise probe._denied(error) from None
        try:
            if probe.read(name) != contents:
                raise StorageDenied(f"{probe.field}: {redact_url(self.url)} does not return what was written to it")
        finally:
            probe.delete(name)

    def write(self, name: str, contents: bytes) -> None:
        """Put `contents` at `name`, replacing what was there. No reader ever sees a part of it."""
        self.retry(lambda: self._write(f"{self.root}/{name}", contents))

    def replace(self, name: str, contents: bytes, replaced: bytes) -> None:
        """Put `contents` at `name` if what is there is still `replaced`; b"" stands for no file.

        On a local disk under a lock, on S3 by a conditional put. A store that has neither leaves the moment between the
        look and the put, some milliseconds in which the last of two writers wins.

        Raises:
            FileChanged: another process has replaced it.
        """
        if self.is_local:
            with _locked(os.path.join(self.root, ".lock")):
                self._check_unchanged(name, replaced)
                self.write(name, contents)
            return
        tag = self.retry(lambda: self._entity_tag(name))  # before the look: if it changes in between, the put fails
        self._check_unchanged(name, replaced)
        if "s3" not in self.file_system.protocol:
            self.write(name, contents)
            return
        condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
        try:
            self.retry(lambda: self.file_system.pipe_file(f"{self.root}/{name}", contents, **condition))
        except OSError as error:
            status, code = _answer(error)
            if status == 501 or code == "NotImplemented":  # a store that speaks S3 without this part of it
                self.write(name, contents)
            elif not (
                isinstance(error, (FileNotFoundError, FileExistsError))
                or status in (404, 409, 412)
                or code in ("PreconditionFailed", "ConditionalRequestConflict")
            ):
                raise
            elif self.read(name) != contents:  # else this put was sent again after its answer was lost on the way
                raise FileChanged(f"{self.join(name)} was replaced meanwhile") from error

    def _entity_tag(self, name: str) -> str:
        self.file_system.invalidate_cache()
        try:
            return str(self.file_system.info(f"{self.root}/{name}").get("ETag", ""))
        except FileNotFoundError:
            return ""

    def _check_unchanged(self, name: str, replaced: bytes) -> None:
        try:
            current = self.read(name)
        except FileNotFoundError:
            current = b""
        if current != replaced:
            raise FileChanged(f"{self.join(name)} was replaced meanwhile")

    @property
    def last_upload_at(self) -> float:
        """When the last upload of this process, or part of one, arrived: monotonic clock; 0 where it is not known."""
        return float(getattr(self.file_system, "last_upload_at", 0.0))

    def _write(self, path: str, contents: bytes) -> None:
        if not self.is_local:
            # An object store shows an object once it is complete.
            self.file_system.pipe_file(path, contents, **self._upload_options)
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def read(self, name: str) -> bytes:
        """Return the contents of `name`.

        Raises:
            FileNotFoundError: the store says that there is none.
        """
        contents: bytes = self.retry(lambda: self.file_system.cat_file(f"{self.root}/{name}"))
        return contents

    def delete(self, name: str) -> None:
        """Remove `name`, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.retry(lambda: self.file_system.rm_file(f"{self.root}/{name}"))

    def rename(self, name: str, new_name: str) -> None:
        """Give the file `name` another name, replacing what has that name.

        Raises:
            FileNotFoundError: there is no `name`.
        """
        path, new_path = f"{self.root}/{name}", f"{self.root}/{new_name}"
        if self.is_local:
            self.retry(lambda: os.replace(path, new_path))
            return
        # Two steps, so that a retry after a lost answer does not look for what is already gone.
        self.retry(lambda: self.file_system.cp_file(path, new_path))
        self.delete(name)

    def names(self) -> list[str]:
        """Return the names of the files directly below, unsorted; none where the directory does not exist."""

        def list_names() -> list[str]:
            self.file_system.invalidate_cache()
            return [entry.rsplit("/", 1)[-1] for entry in self.file_system.ls(self.root, detail=False)]

        try:
            return self.retry(list_names)
        except FileNotFoundError:
            return []

    def retry(self, action: Callable[[], T]) -> T:
        """Return the result of `action`, which uses `file_system`; try it again while the store cannot be reached.

        An answer that depends on a condition (HTTP 409, 412 and 501) is raised as it is.
        """
        deadline = time.monotonic() + self.timeout
        pause = FIRST_PAUSE
        while True:
            try:
                result = action()
            except Exception as error:  # every file system has errors of its own
                self._raise_if_final(error)
                _note_outage(self._store, error)
                left = deadline - time.monotonic()
                # A part by chance, so that ranks which failed together do not come back together.
                if left <= 0 or self.stop.wait(min(left, pause * _jitter.uniform(0.5, 1.0))):
                    raise StorageUnavailable(
                        f"{self.field}: {redact_url(self.url)} could not be reached for {self.timeout:g} s: "
                        f"{_describe(error)}"
                    ) from None
                pause = min(2 * pause, MAX_PAUSE)
            else:
                _note_answer(self._store)
                return result

    @property
    def _store(self) -> str:
        """The part of the URL that comes and goes as a whole."""
        if self.is_local:
            return self.url
        scheme, _, rest = self.url.rpartition("::")[2].partition("://")
        return redact_url(f"{scheme}://{rest.partition('/')[0]}")

    def _raise_if_final(self, error: Exception) -> None:
        """Raise what `error` means, if trying again cannot change it."""
        if isinstance(error, _NOT_OF_THE_STORE):
            raise error
        status, code = _answer(error)
        if code in _REFUSALS:
            raise self._denied(error) from None
        if isinstance(error, (FileNotFoundError, FileExistsError)) or status in (409, 412, 501):
            raise error
        if code in ("PreconditionFailed", "ConditionalRequestConflict", "NotImplemented"):
            raise error
        if status == 404:
            raise FileNotFoundError(errno.ENOENT, _describe(error))
        if any(type(cause).__name__ in _NO_CREDENTIALS for cause in _causes(error)):
            if self._store in _reached:  # the service that gives them out is away
                return
            raise self._denied(error) from None
        if (
            status in (401, 403)
            # ValueError: an address that is none.
            or isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError, ValueError))
            or (isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENAMETOOLONG))
            or str(error).startswith("Forbidden: ")  # gcsfs
            or "CERTIFICATE_VERIFY_FAILED" in str(error)
        ):
            raise self._denied(error) from None

    def _denied(self, error: Exception) -> StorageDenied:
        status, code = _answer(error)
        if isinstance(error, IsADirectoryError):
            remedy = "give a file"
        elif self.is_local:
            remedy = "give a place where this process may read and create files"
        elif code in ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName"):
            remedy = "create the bucket or correct the URL"
        elif any(type(cause).__name__ in _NO_CREDENTIALS for cause in _causes(error)):
            remedy = (
                "give this process credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or Flyte's FLYTE_AWS_*, "
                "FLYTE_AZURE_*) in its environment, or a service account that may use the bucket"
            )
        elif status in (401, 403) or isinstance(error, PermissionError):
            remedy = "correct the keys, or give their owner the permission"
        else:
            remedy = "correct the URL, the endpoint or the keys"
        return StorageDenied(
            f"{self.field}: expected a place that this process may use, got {redact_url(self.url)}: "
            f"{_describe(error)}; {remedy}"
        )


def read_file(url: str, field: str = "url", timeout: float = STORE_TIMEOUT) -> bytes:
    """Return the contents of the one file at `url`. Raises as `Storage.read` does."""
    place = Storage(url, field, timeout)
    contents: bytes = place.retry(lambda: place.file_system.cat_file(place.root))
    return contents


def write_file(url: str, contents: bytes, field: str = "url", timeout: float = STORE_TIMEOUT) -> None:
    """Put `contents` at `url`, whole or not at all. Raises as `Storage.write` does."""
    place = Storage(url, field, timeout)
    place.retry(lambda: place._write(place.root, contents))


def fetch_file(url: str, file: str | os.PathLike[str], field: str = "url", timeout: float = STORE_TIMEOUT) -> None:
    """Copy the file at `url` to the local path `file` without holding it in memory. Raises as `Storage.read` does."""
    place = Storage(url, field, timeout)
    part = Path(file).with_name(f"{Path(file).name}.{uuid.uuid4().hex}.part")
    try:
        place.retry(lambda: place.file_system.get_file(place.root, str(part)))
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Exclusive file lock among all processes that share the disk; released if the holder dies."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _close_sessions() -> None:
    """Close the connections of all file systems that this process has shared.

    flytekit opens some whose loop is its own; s3fs does not close those, and their client ends a healthy process with
    an error message ("Unclosed client session").
    """
    for module, name, session in (("s3fs", "S3FileSystem", "_s3creator"), ("gcsfs", "GCSFileSystem", "_session")):
        cls = getattr(sys.modules.get(module), name, None)
        for file_system in list(getattr(cls, "_cache", {}).values()):
            with contextlib.suppress(Exception):  # the process is ending: there is nothing left to fail
                loop = file_system.loop or file_system.storage_options["loop"]
                if loop.is_running():
                    close = getattr(file_system, session).__aexit__(None, None, None)
                    asyncio.run_coroutine_threadsafe(close, loop).result(timeout=2)


# Not `atexit.register`: flytekit's own handler, which ends its loop, would come first.
getattr(threading, "_register_atexit", atexit.register)(_close_sessions)


def _answer(error: BaseException) -> tuple[int, str]:
    """Return (HTTP status, error code) of the store's answer that `error` stands for; 0 and "" where it has none."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, Mapping):  # botocore
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or code
        else:  # azure, aiohttp, gcsfs
            code = str(getattr(cause, "error_code", None) or "")
            values = (getattr(cause, name, None) for name in ("status_code", "status", "code"))
            status = next((value for value in values if value is not None), "")
        if str(status).isdigit() or code:
            return int(status) if str(status).isdigit() else 0, code
    return 0, ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _describe(error: BaseException) -> str:
    """Return class and message of `error` in one line that ends, without secrets."""
    message = " ".join(str(error).split())
    if len(message) > 300:
        message = message[:300] + "..."
    return redact_url(f"{type(error).__name__}: {message}".removesuffix(": "))


def _note_outage(store: str, error: BaseException) -> None:
    with _lock:
        is_new = store not in _outages
        _outages.setdefault(store, time.monotonic())
    if is_new:
        logger.warning("%s cannot be reached: %s; waiting for it", store, _describe(error))


def _note_answer(store: str) -> None:
    with _lock:
        _reached.add(store)
        since = _outages.pop(store, None)
    if since is not None:
        logger.warning("%s answers again after %.0f s", store, time.monotonic() - since)
