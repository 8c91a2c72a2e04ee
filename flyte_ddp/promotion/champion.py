"""The champion: the model in use, the versions before it, and the small file that names the version
in use.

    URL/champion.json                     names the version in use; replaced by a single put
    URL/versions/VERSION/manifest.json    origin, metrics and checksum of the version
    URL/versions/VERSION/model_state.pt   its state dict, or model_state.safetensors
    URL/versions/VERSION/run_card.json    the run card of its training, if there was one
    URL/nights/NIGHT.json                 the run card of a challenger's training, of the newest 30
    URL/last_challenge.json               how the last challenge ended
    URL/last_run.json                     when the last retraining ended, even if it trained nothing

Versions never change once they are complete, and a reader follows the one name: it finds the old
model or the new one, nothing in between. This module knows neither Flyte nor the rules of
promotion. It imports no torch until a state is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import pickle
import re
import typing
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flyte_ddp.checkpoints import EXPORTED_STATE, MODEL_STATE
from flyte_ddp.config.fields import check, plain_number, whole_number
from flyte_ddp.errors import (
    ChampionChanged,
    ChampionError,
    ConfigError,
    FileChanged,
    NoChampion,
)
from flyte_ddp.events.history import plain
from flyte_ddp.events.nights import MAX_NIGHTS, NIGHTS
from flyte_ddp.storage import STORE_TIMEOUT, Storage, check_name, redact_url
from flyte_ddp.storage.state_dict_file import (
    class_names_of,
    from_bytes,
    is_safetensors,
    with_class_names,
)

POINTER = "champion.json"
VERSIONS = "versions"
MANIFEST = "manifest.json"
CARD = "run_card.json"
LAST_CHALLENGE = "last_challenge.json"
LAST_RUN = "last_run.json"
VERSION = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}")


@dataclass(frozen=True)
class Manifest:
    """Origin and metrics of a version. `promote` sets `version`, `parent`, `created_at`, `sha256`
    and `bytes`.
    """

    version: str  # name of the version; names sort by the time of the promotion
    parent: str  # the version in use before this one; "" for the first
    created_at: str  # time of the promotion, UTC, ISO 8601
    kickoff_time: str  # time at which the retraining started, UTC, ISO 8601
    recipe: str
    recipe_version: str  # SHA-256 of the code that a run of the recipe ships
    config: dict[str, Any]
    data: str  # the training data, in words
    data_fingerprint: str
    num_train_samples: int
    num_test_samples: int
    metrics: dict[str, float]  # figures on the held-out data of this version's training
    # figures of the parent on the same data; empty if they could not be measured
    parent_metrics: dict[str, float]
    code_version: str  # version of the code that trained the model
    execution: str  # Flyte's execution that trained the model; "" for a local run
    sha256: str = ""  # checksum of the file with the state dict
    bytes: int = 0  # size of the file with the state dict
    advantage: list[float] = field(default_factory=list)  # see `PromotionResult.advantage`
    # URL and SHA-256 of the weights from which the training started; "" for fresh weights
    initial_state: str = ""
    # names of the classes, in the order of the model's outputs; empty if not known
    class_names: list[str] = field(default_factory=list)
    file: str = MODEL_STATE  # name of the file with the state dict; it shows the format
    # hashes of the config's hidden values, see `storage.hidden`; None in manifests of an earlier
    # version of this library
    hidden: list[dict[str, str]] | None = None


@dataclass(frozen=True)
class Pointer:
    """The contents of `champion.json`."""

    version: str
    manifest_sha256: str
    parent: str  # the version's parent, because a rollback must work if the version is damaged
    # Time at which a rollback put the version in use; "" for no hold. Nothing is promoted until
    # `release`. It is part of the pointer because each rollback, even to the version in use, must
    # change the contents that a promotion compares before it writes.
    held_since: str = ""


Record = TypeVar("Record", Manifest, Pointer)
Read = TypeVar("Read")


class ChampionStore:
    """The versions below `url`, any fsspec URL or local path; it may be empty.

    Args:
        timeout: seconds that an operation waits for a store that cannot be reached.

    Raises:
        ConfigError: no such kind of URL is known here.
    """

    def __init__(self, url: str, timeout: float = STORE_TIMEOUT) -> None:
        self.storage = Storage(url, "champion", timeout)
        self.url = self.storage.url
        self.timeout = timeout

    def pointer(self) -> bytes:
        """Return the contents of `champion.json`, for `manifest`, `load` and `promote`; b"" if
        there is no champion.
        """
        return self.storage.read_if_there(POINTER)

    def manifest(self, pointer: bytes | None = None) -> Manifest:
        """Return the manifest of the version in use, now or when `pointer` was read.

        Raises:
            ChampionError: the manifest is missing or damaged; NoChampion before the first
                promotion.
        """
        if pointer is None:
            return self.read_newest(self.manifest)
        if not pointer and self.last(LAST_CHALLENGE).get("had_champion"):
            raise ChampionError(f"{self.storage.join(POINTER)} is missing")
        named = self.parse(pointer)
        contents = self._read(named.version, MANIFEST)
        if hashlib.sha256(contents).hexdigest() != named.manifest_sha256:
            raise ChampionError(
                f"{self.storage.join(_name(named.version, MANIFEST))} is damaged: "
                "its SHA-256 differs"
            )
        return _manifest(contents)

    def load(self, pointer: bytes | None = None) -> tuple[dict[str, Any], Manifest]:
        """Return the state dict, with tensors on the CPU, and the manifest of the version in use.
        Raises as `manifest`.
        """
        if pointer is None:
            return self.read_newest(self.load)
        manifest = self.manifest(pointer)
        contents = self._state(manifest)
        try:  # The checksum proves that these bytes were promoted, not that they are harmless.
            state: dict[str, Any] = from_bytes(contents)
        except pickle.UnpicklingError as error:
            raise ChampionError(
                f"{self.state_url(manifest)} is not a state dict of tensors"
            ) from error
        return with_class_names(state, manifest.class_names or class_names_of(state)), manifest

    def in_use(self, pointer: bytes | None = None) -> Pointer:
        """Parse `champion.json`, as it is now or when `pointer` was read. All fields are "" if
        there is no champion or the file is damaged.
        """
        with contextlib.suppress(ChampionError):
            if pointer is None:
                return self.parse(self.pointer())
            return self.parse(pointer)
        return Pointer("", "", "")

    def state_url(self, manifest: Manifest) -> str:
        """Return the URL of the state dict of a version. It never changes."""
        return self.storage.join(_name(manifest.version, manifest.file))

    def versions(self, newest: int = 0) -> list[Manifest]:
        """Return the manifests of all complete versions, oldest first. With `newest` return only
        that many of the newest versions.
        """
        found = []
        for version in self._list_versions()[-newest:]:
            # A promotion may have been interrupted, and a version may be damaged.
            with contextlib.suppress(ChampionError):
                found.append(_manifest(self._read(version, MANIFEST)))
        return found

    def promote(
        self, state: bytes, manifest: Manifest, replaced: bytes, card: bytes = b""
    ) -> Manifest:
        """Make `state`, a file with a state dict in torch's format or safetensors, the champion.

        Args:
            manifest: the manifest of the state; version, time, parent and checksum are set here.
            replaced: the pointer as it was when the two models were compared.
            card: the run card of the state's training; b"" for none.

        Returns:
            The manifest as written.

        Raises:
            ChampionChanged: the champion was replaced after the comparison. Compare again.
        """
        now = datetime.datetime.now(datetime.timezone.utc)
        version = f"{now:%Y%m%dT%H%M%S.%fZ}-{uuid.uuid4().hex[:8]}"
        file = MODEL_STATE
        if is_safetensors(state):
            file = EXPORTED_STATE
        manifest = dataclasses.replace(
            manifest,
            version=version,
            parent=self.in_use(replaced).version,
            created_at=_utc_now(),
            sha256=hashlib.sha256(state).hexdigest(),
            bytes=len(state),
            file=file,
        )
        contents = _json(dataclasses.asdict(manifest))
        self.storage.write(_name(manifest.version, manifest.file), state)
        if card:
            self.storage.write(_name(manifest.version, CARD), card)
        self.storage.write(_name(manifest.version, MANIFEST), contents)
        try:
            self._replace_pointer(_pointer(manifest, contents), replaced)
        except ChampionChanged:
            self._delete(manifest.version)
            raise
        return manifest

    def rollback(self, version: str = "") -> Manifest:
        """Put `version` in use again, by default the parent of the version in use, and return its
        manifest.

        The version stays in use until `release`: the next scheduled retraining must not promote the
        same bad model again.

        Raises:
            ConfigError: there is no such version.
            ChampionError: the version's files are missing or damaged.
            ChampionChanged: another version was put in use meanwhile.
        """
        pointer = self.pointer()
        wanted = version or self.parse(pointer).parent
        known = self._list_versions()
        if wanted not in known:
            got = "none, and the one in use has no parent"
            if wanted:
                got = repr(wanted)
            raise ConfigError(
                f"version: expected one of {', '.join(known)} in {self._shown}, got {got}"
            )
        contents = self._read(wanted, MANIFEST)
        manifest = _manifest(contents)
        self._state(manifest)
        self._replace_pointer(_pointer(manifest, contents, _utc_now()), pointer)
        return manifest

    def release(self) -> bool:
        """Let retrainings promote again. Returns False if nothing was held.

        Raises:
            ChampionError: `champion.json` is damaged; NoChampion if there is none.
            ChampionChanged: another version was put in use meanwhile. Its hold stays.
        """
        pointer = self.pointer()
        held = self.parse(pointer)
        if held.held_since:
            self._replace_pointer(dataclasses.replace(held, held_since=""), pointer)
        return held.held_since != ""

    def parse(self, pointer: bytes) -> Pointer:
        """Parse `champion.json`. Raises NoChampion if it is empty, and ChampionError if it names no
        version.
        """
        if not pointer:
            raise NoChampion(f"{self._shown} has no champion yet")
        try:
            found = _restore(Pointer, pointer)
            _check_names(found.version, *filter(None, [found.parent]))
            return found
        except (ValueError, TypeError) as error:
            raise ChampionError(f"{self.storage.join(POINTER)} is damaged: {error}") from error

    def record(self, name: str, outcome: str, execution: str, **values: Any) -> None:
        """Record the end of a challenge or of a retraining; `execution` is "" for a local run.

        Args:
            name: LAST_CHALLENGE, or LAST_RUN for `status`.
        """
        ended = {"outcome": outcome, "execution": execution, "ended_at": _utc_now()}
        self.storage.write(name, _json({**values, **ended}))

    def keep_night(self, name: str, card: bytes) -> None:
        """Keep the run card of a challenger among the newest nights, see `flyte-ddp compare`. The
        names sort by time.
        """
        nights = Storage(f"{self.url}/{NIGHTS}", "champion", self.timeout)
        nights.write(f"{name}.json", card)
        for old in sorted(nights.names())[:-MAX_NIGHTS]:
            nights.delete(old)

    def last(self, name: str) -> dict[str, Any]:
        """Return what `record` wrote last; empty if there is nothing, or a damaged record."""
        with contextlib.suppress(ChampionError):
            return self.read_record(name) or {}
        return {}

    def read_record(self, name: str) -> dict[str, Any] | None:
        """Return what `record` wrote last; None if there is nothing. Raises ChampionError if the
        record is damaged.
        """
        try:
            contents = self.storage.read(name)
        except FileNotFoundError:
            return None
        try:  # The read has its own block, because a store that refuses raises a ValueError too.
            return _read_object(contents)
        except (ValueError, TypeError) as error:
            raise ChampionError(f"{self.storage.join(name)} is damaged: {error}") from error

    def prune(self, keep: int) -> list[str]:
        """Delete old versions and return their names.

        The newest `keep` versions stay. The version in use and its parent, to which a rollback
        returns, stay too.

        Raises:
            ConfigError: `keep` is less than 1.
            ChampionError: no version is in use, or the pointer is damaged: nothing is deleted.
        """
        deleted = []
        for version in self._list_versions()[: -whole_number("keep", keep, minimum=1)]:
            # The pointer is read each time, because somebody may roll back meanwhile.
            pointer = self.parse(self.pointer())
            if version in (pointer.version, pointer.parent):
                continue
            self._delete(version)
            deleted.append(version)
        return deleted

    def _delete(self, version: str) -> None:
        storage = Storage(f"{self.url}/{VERSIONS}/{version}", "champion", self.timeout)
        # The manifest comes first: a version without a manifest does not exist.
        for name in sorted(storage.names()):
            storage.delete(name)
        if storage.is_local:
            storage.file_system.rmdir(storage.root)

    def read_newest(self, read: Callable[[bytes], Read]) -> Read:
        """Return what `read` returns for the version in use. Read again if another version was put
        in use meanwhile, because the first may have been pruned.
        """
        while True:
            pointer = self.pointer()
            try:
                return read(pointer)
            except ChampionError:
                if self.pointer() == pointer:
                    raise

    def _replace_pointer(self, pointer: Pointer, replaced: bytes) -> None:
        try:
            self.storage.replace(POINTER, _json(dataclasses.asdict(pointer)), replaced)
        except FileChanged as error:
            raise ChampionChanged(
                f"{self._shown}: another version was put in use meanwhile"
            ) from error

    def _state(self, manifest: Manifest) -> bytes:
        contents = self._read(manifest.version, manifest.file)
        if hashlib.sha256(contents).hexdigest() != manifest.sha256:
            raise ChampionError(f"{self.state_url(manifest)} is damaged: its SHA-256 differs")
        return contents

    def _read(self, version: str, name: str) -> bytes:
        try:
            return self.storage.read(_name(version, name))
        except FileNotFoundError as error:
            raise ChampionError(f"{self.storage.join(_name(version, name))} is missing") from error

    def _list_versions(self) -> list[str]:
        """Return the names of the versions, without other files such as a file browser's."""
        names = Storage(f"{self.url}/{VERSIONS}", "champion", self.timeout).names()
        return sorted(filter(VERSION.fullmatch, names))

    @property
    def _shown(self) -> str:
        return redact_url(self.url)


def load_champion(url: str) -> tuple[dict[str, Any], Manifest]:
    """Return the champion below `url`: its state dict, with tensors on the CPU, and its manifest.

    A serving process needs only this call. It checks checksums, and unpickles tensors only.

    Raises:
        ChampionError: there is nothing to serve; `NoChampion` before the first promotion.
        StorageUnavailable: the store could not be reached for some minutes.
        ConfigError: no such kind of URL is known here, or the store refuses (`StorageDenied`).

    Example:
        # reads the model that a retraining has promoted
        from flyte_ddp.recipes.digits import Digits

        state, manifest = flyte_ddp.load_champion("s3://bucket/champion")
        model = Digits().model().eval()
        model.load_state_dict(state)
        print(manifest.version, manifest.metrics)
    """
    return ChampionStore(url).load()


def _name(version: str, name: str) -> str:
    return f"{VERSIONS}/{version}/{name}"


def _pointer(manifest: Manifest, contents: bytes, held_since: str = "") -> Pointer:
    digest = hashlib.sha256(contents).hexdigest()
    return Pointer(manifest.version, digest, manifest.parent, held_since)


def _manifest(contents: bytes) -> Manifest:
    try:
        found = _restore(Manifest, contents)
        _check_names(found.version, found.file)
        return found
    except (ValueError, TypeError) as error:
        raise ChampionError(f"a manifest is damaged, or of another version: {error}") from error


def _check_names(*names: object) -> None:
    """Raise ConfigError unless each name is a plain name of a file or directory, without /."""
    for name in names:
        if "/" in check_name(name, "champion"):
            raise ConfigError(f"champion: expected a name without /, got {name!r}")


def _read_object(contents: bytes) -> dict[str, Any]:
    values = json.loads(contents)
    if not isinstance(values, dict):
        raise TypeError(f"expected an object, got {values!r}")
    return values


def _restore(kind: type[Record], contents: bytes) -> Record:
    """Return the record of a file. A figure that is null in the file becomes NaN.

    Raises:
        ValueError, TypeError: the file has no such record, or a value of another type.
    """
    record = kind(**_read_object(contents))
    restored: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        value = getattr(record, name)
        if hint == dict[str, float] and isinstance(value, dict):
            value = {key: _restore_figure(name, each) for key, each in value.items()}
        elif hint == list[float] and isinstance(value, list):
            value = [_restore_figure(name, each) for each in value]
        else:
            value = check(name, value, hint)
        restored[name] = value
    return kind(**restored)


def _restore_figure(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    return plain_number(name, value)


def _utc_now() -> str:
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(plain(values), indent=1, allow_nan=False).encode()
