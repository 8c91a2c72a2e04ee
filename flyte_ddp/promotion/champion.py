"""The champion: the model that is in use, the ones before it, and the one small file that says which it is.

    URL/champion.json                     names the version in use; replaced by a single put
    URL/versions/VERSION/manifest.json    what is known of it, its checksum among other things
    URL/versions/VERSION/model_state.pt   its state dict

Versions are never changed once they are complete, and a reader follows the one name, so it finds the old model or the
new one and nothing between. Knows neither Flyte nor how a challenger becomes the champion; imports no torch until a
state is loaded.

    state_dict, manifest = champion.load("s3://bucket/champions/digits")

reads the champion from anywhere, and `python -m flyte_ddp.promotion.champion {show,list,rollback} URL` is for people.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import io
import json
import os
import pickle
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flyte_ddp.errors import ChampionChanged, ChampionError, ConfigError, CorruptChampion, MissingChampion, NoChampion
from flyte_ddp.storage import Storage

POINTER = "champion.json"
VERSIONS = "versions"
MANIFEST = "manifest.json"
MODEL_STATE = "model_state.pt"
LAST_CHALLENGE = "last_challenge.json"
LOCK = ".lock"


@dataclass(frozen=True)
class Manifest:
    """What is known of a version. All of it is set by whoever promotes it but the first two and the last two."""

    version: str  # sorts by the time of the promotion
    parent: str  # the version in use before it; "" for the first
    created_at: str  # of the promotion, UTC, ISO 8601
    kickoff_time: str  # of the retraining, likewise
    recipe: str
    recipe_version: str  # SHA-256 of the code that a run of the recipe ships
    config: dict[str, Any]
    data: str  # which data it was trained on, in words
    data_fingerprint: str
    num_train_samples: int
    num_test_samples: int
    metrics: dict[str, float]  # on the held-out data of its own training
    parent_metrics: dict[str, float]  # of its parent, on the same data; empty where that could not be measured
    code_version: str  # of the code that trained it
    execution: str  # that trained it; "" for a local run
    sha256: str = ""  # of the file with the state dict
    bytes: int = 0  # likewise


@dataclass(frozen=True)
class Pointer:
    """The contents of `champion.json`."""

    version: str
    manifest_sha256: str
    parent: str  # of the version: a rollback must not need the files of what it replaces


class ChampionStore:
    """The versions below `url`, any fsspec URL or local path; nothing need be there yet.

    Raises:
        ConfigError: no such kind of URL is known here.
    """

    def __init__(self, url: str) -> None:
        self.storage = Storage(url, "champion")
        self.url = self.storage.url

    def pointer(self) -> bytes:
        """The pointer as it is now, for `manifest`, `load` and `promote`; empty where nothing was promoted yet."""
        try:
            return self.storage.read(POINTER)
        except FileNotFoundError:
            return b""

    def manifest(self, pointer: bytes | None = None) -> Manifest:
        """The manifest of the version in use, or of the one that was when `pointer` was read.

        Raises:
            NoChampion, MissingChampion, CorruptChampion: there is no such manifest.
        """
        named = self.named(self.pointer() if pointer is None else pointer)
        contents = self._read(named.version, MANIFEST)
        if hashlib.sha256(contents).hexdigest() != named.manifest_sha256:
            raise CorruptChampion(f"{self._url(named.version, MANIFEST)} is not what was written: its SHA-256 differs")
        return _manifest(contents)

    def load(self, pointer: bytes | None = None) -> tuple[dict[str, Any], Manifest]:
        """The state dict, tensors on the CPU, and the manifest of the version in use; `pointer` as in `manifest`.

        Raises:
            NoChampion, MissingChampion, CorruptChampion: there is no such state.
        """
        import torch

        manifest = self.manifest(pointer)
        contents = self._state(manifest)
        try:  # the right checksum says that it is what was promoted, not that this was harmless
            state: dict[str, Any] = torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CorruptChampion(f"{self.state_url(manifest.version)} is not a state dict of tensors") from error
        return state, manifest

    def version_in_use(self, pointer: bytes | None = None) -> str:
        """The version in use, or that was when `pointer` was read; "" where none is, or nothing says which."""
        with contextlib.suppress(ChampionError):
            return self.named(self.pointer() if pointer is None else pointer).version
        return ""

    def state_url(self, version: str) -> str:
        """Where the state dict of `version` is, for good."""
        return self._url(version, MODEL_STATE)

    def versions(self, newest: int = 0) -> list[Manifest]:
        """All versions that are complete, or the `newest` so many, oldest first."""
        found = []
        for version in sorted(Storage(f"{self.url}/{VERSIONS}", "champion").names())[-newest:]:
            with contextlib.suppress(ChampionError):  # of a promotion that was cut short, or damaged since
                found.append(_manifest(self._read(version, MANIFEST)))
        return found

    def promote(self, state: bytes, manifest: Manifest, replaced: bytes) -> Manifest:
        """Make `state`, a file with a state dict, the champion.

        Args:
            manifest: what there is to say of it; version, time, parent and checksum are filled in here.
            replaced: the pointer that `pointer` gave when the two were compared.

        Returns:
            The manifest as it was written.

        Raises:
            ChampionChanged: the champion is no longer the one that it was compared with. Compare again.
        """
        now = datetime.datetime.now(datetime.timezone.utc)
        manifest = dataclasses.replace(
            manifest,
            version=f"{now:%Y%m%dT%H%M%S.%fZ}-{uuid.uuid4().hex[:8]}",
            parent=self.version_in_use(replaced),
            created_at=f"{now:%Y-%m-%dT%H:%M:%SZ}",
            sha256=hashlib.sha256(state).hexdigest(),
            bytes=len(state),
        )
        place = self._place(manifest.version)
        contents = _json(dataclasses.asdict(manifest))
        place.write(MODEL_STATE, state)
        place.write(MANIFEST, contents)
        try:
            self._point_to(manifest, contents, replaced)
        except ChampionChanged:
            place.delete(MANIFEST)  # first: without it, there is no such version
            place.delete(MODEL_STATE)
            raise
        return manifest

    def rollback(self, version: str = "") -> Manifest:
        """Put `version` in use again, by default the parent of the one in use, and return its manifest.

        Raises:
            ConfigError: there is no such version.
            ChampionError: its files are missing or damaged.
            ChampionChanged: another version was put in use at the same moment.
        """
        pointer = self.pointer()
        wanted = version or self.named(pointer).parent
        if not wanted:
            raise ConfigError(f"version: {self.url!r} has none before the one in use; accepted is {self._listed()}")
        if "/" in wanted or wanted not in Storage(f"{self.url}/{VERSIONS}", "champion").names():
            raise ConfigError(f"version: {wanted!r} is not in {self.url!r}; accepted is {self._listed()}")
        contents = self._read(wanted, MANIFEST)
        manifest = _manifest(contents)
        self._state(manifest)
        self._point_to(manifest, contents, pointer)
        return manifest

    def named(self, pointer: bytes) -> Pointer:
        """What `pointer` says.

        Raises:
            NoChampion, CorruptChampion: nothing.
        """
        if not pointer:
            raise NoChampion(f"{self.url} has no champion yet")
        try:
            return Pointer(**json.loads(pointer))
        except (ValueError, TypeError) as error:
            raise CorruptChampion(f"{self.storage.join(POINTER)} is not what was written: {error}") from error

    def last_challenge(self) -> dict[str, Any]:
        """What `note_challenge` noted last; empty where nothing was, or nothing that can be read."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            note = json.loads(self.storage.read(LAST_CHALLENGE))
            return note if isinstance(note, dict) else {}
        return {}

    def note_challenge(self, note: dict[str, Any]) -> None:
        """Leave word of how the last challenge ended, the ones that changed nothing included."""
        self.storage.write(LAST_CHALLENGE, _json(note))

    def _point_to(self, manifest: Manifest, contents: bytes, replaced: bytes) -> None:
        pointer = Pointer(manifest.version, hashlib.sha256(contents).hexdigest(), manifest.parent)
        replace(self.storage, POINTER, _json(dataclasses.asdict(pointer)), replaced)

    def _state(self, manifest: Manifest) -> bytes:
        contents = self._read(manifest.version, MODEL_STATE)
        if len(contents) != manifest.bytes or hashlib.sha256(contents).hexdigest() != manifest.sha256:
            raise CorruptChampion(f"{self.state_url(manifest.version)} is not what was written: its SHA-256 differs")
        return contents

    def _read(self, version: str, name: str) -> bytes:
        try:
            return self._place(version).read(name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingChampion(f"{self._url(version, name)} is missing") from error

    def _place(self, version: str) -> Storage:
        return Storage(f"{self.url}/{VERSIONS}/{version}", "champion")

    def _url(self, version: str, name: str) -> str:
        return f"{self.url}/{VERSIONS}/{version}/{name}"

    def _listed(self) -> str:
        return ", ".join(manifest.version for manifest in self.versions()) or "none: no version was promoted yet"


def load(url: str) -> tuple[dict[str, Any], Manifest]:
    """The champion below `url`: its state dict, tensors on the CPU, and its manifest.

    The one call that whoever serves the model needs. It checks sizes and checksums, and unpickles tensors only.

    Raises:
        NoChampion, MissingChampion, CorruptChampion: all of them `ChampionError`; there is nothing to serve.
        ConfigError: no such kind of URL is known here.
    """
    return ChampionStore(url).load()


def replace(storage: Storage, name: str, contents: bytes, replaced: bytes) -> None:
    """Put `contents` at `name` if what is there is still `replaced`; b"" stands for nothing.

    On a local disk under a lock, on S3 by a conditional put. A store that has neither leaves the moment between the
    look and the put, some milliseconds in which the last of two writers wins; versions are lost in no case.

    Raises:
        ChampionChanged: it is not.
    """
    if storage.is_local:
        with _locked(os.path.join(storage.root, LOCK)):
            _check_unchanged(storage, name, replaced)
            storage.write(name, contents)
        return
    tag = _entity_tag(storage, name)  # before the look: if the object changes between the two, the put fails
    _check_unchanged(storage, name, replaced)
    if "s3" not in storage.file_system.protocol:
        storage.write(name, contents)
        return
    try:
        storage.file_system.pipe_file(
            f"{storage.root}/{name}", contents, **({"IfMatch": tag} if tag else {"IfNoneMatch": "*"})
        )
    except OSError as error:
        if _code(error) == "NotImplemented":  # a store that speaks S3 without this part of it
            storage.write(name, contents)
        elif _code(error) not in ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412", "409"):
            raise
        elif storage.read(name) != contents:  # else this put was sent again after its answer was lost on the way
            raise ChampionChanged(f"{storage.join(name)} was replaced meanwhile") from error


def _entity_tag(storage: Storage, name: str) -> str:
    storage.file_system.invalidate_cache()
    try:
        return str(storage.file_system.info(f"{storage.root}/{name}").get("ETag", ""))
    except FileNotFoundError:
        return ""


def _check_unchanged(storage: Storage, name: str, replaced: bytes) -> None:
    try:
        current = storage.read(name)
    except FileNotFoundError:
        current = b""
    if current != replaced:
        raise ChampionChanged(f"{storage.join(name)} was replaced meanwhile")


def _code(error: OSError) -> str:
    """The code in S3's answer, which s3fs keeps as the cause of its own error."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Alone among the processes of this machine, and of those that share the disk; a dead one's lock is nobody's."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _manifest(contents: bytes) -> Manifest:
    names = {field.name for field in dataclasses.fields(Manifest)}
    try:
        values = json.loads(contents)
        return Manifest(**{name: value for name, value in values.items() if name in names})  # a later version has more
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptChampion(f"a manifest is not what was written: {error}") from error


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=1).encode()


# --- The command ---------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """`python -m flyte_ddp.promotion.champion`."""
    parser = argparse.ArgumentParser(
        prog="python -m flyte_ddp.promotion.champion", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("show", "the manifest of the version in use, and how the last challenge ended"),
        ("list", "all versions, oldest first; * marks the one in use"),
        ("rollback", "put the version before the one in use, or VERSION, in use again"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("url", metavar="URL", help="where the champion is: any fsspec URL or a directory")
        if name == "rollback":
            command.add_argument("version", metavar="VERSION", nargs="?", default="")
    options = parser.parse_args(arguments)
    try:
        store = ChampionStore(options.url)
        if options.command == "show":
            text = json.dumps(
                {"champion": dataclasses.asdict(store.manifest()), "last_challenge": store.last_challenge()}, indent=1
            )
        elif options.command == "list":
            text = _table(store)
        else:
            text = f"{store.rollback(options.version).version} is in use again"
    except (ChampionError, ChampionChanged, ConfigError, OSError) as error:
        parser.exit(1, f"error: {error}\n")
    sys.stdout.write(f"{text}\n")
    return 0


def _table(store: ChampionStore) -> str:
    in_use = store.version_in_use()
    return "\n".join(
        f"{'*' if each.version == in_use else ' '} {each.version}  {each.recipe}  "
        + "  ".join(f"{name} {value:.4g}" for name, value in each.metrics.items())
        + f"  parent {each.parent or 'none'}  {each.data}"
        for each in store.versions()
    )


if __name__ == "__main__":
    sys.exit(main())
