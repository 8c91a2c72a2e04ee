"""Make a project that trains on Flyte, and bring it up to a newer version: `flyte-ddp new` and
`flyte-ddp update`.

A project has its own copy of what registers and builds: tasks/, workflows/, deploy/, Dockerfile and
pins. The wheel carries them as its data, as they stand in the checkout that it is built from. A
file beside them, `NOTES`, has a hash of each as it was copied. So an update knows which of them its
user has changed, and leaves these alone.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flyte_ddp.errors import ConfigError

DISTRIBUTION = "flyte-ddp"
DATA = "share/flyte-ddp/"  # where an installation has the files of a project
NOTES = ".flyte-ddp.json"
YOURS = "requirements-own.txt"  # the packages of the project's recipes
PINS = "requirements"  # begins the names of files that are too long to be shown


def make_project(directory: str, wheel: str = "") -> Iterator[str]:
    """Make a project in `directory`, and yield lines for people.

    Args:
        wheel: the file that this package is installed from; "" for the one that pip has noted.

    Raises:
        ConfigError: the directory has files; this is a checkout; the wheel is not there.
    """
    project = Path(directory)
    if project.exists() and not (project.is_dir() and not any(project.iterdir())):
        raise ConfigError(
            f"new: expected a directory that is empty or not there, got {directory!r}"
        )
    files, own_wheel = _files_of_installation(), _find_wheel(wheel)
    for name, content in files.items():
        _write(project / name, content)
    _put_wheel(project, own_wheel)
    _note(project, files)
    yield f"made {project} with flyte-ddp {metadata.version(DISTRIBUTION)}"
    yield f"try: cd {project} && make train"


def update_project(directory: str, wheel: str = "") -> Iterator[str]:
    """Bring the project in `directory` up to this version, and yield a line for each file that
    changes or would.

    A file that its user has changed stays; if this version has another one than the one that it was
    made from, the new one is put beside it as NAME.new, and the difference is yielded. One that its
    user has deleted stays away. `YOURS` is added where it is missing, and never changed.

    Raises:
        ConfigError: no such project; this is a checkout; the wheel is not there.
    """
    project = Path(directory)
    try:
        noted = json.loads((project / NOTES).read_text(encoding="utf-8"))
        version, copied = str(noted["version"]), dict(noted["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"update: expected a project of flyte-ddp new, got {directory!r} without {NOTES}"
        ) from None
    files, own_wheel = _files_of_installation(), _find_wheel(wheel)
    yield f"{project}: from flyte-ddp {version} to {metadata.version(DISTRIBUTION)}"
    for name in sorted(copied.keys() | files.keys()):
        file, new = project / name, files.get(name)
        present = file.read_bytes() if file.is_file() else None
        is_changed = (None if present is None else _hash(present)) != copied.get(name)
        if (
            present == new
            or (new is not None and _hash(new) == copied.get(name))
            or (name == YOURS and present)
        ):
            continue  # as this version has it, or the user's change of what this version still has
        if not is_changed:
            if new is None:
                file.unlink()
                yield f"removed {name}"
            else:
                _write(file, new)
                yield f"{'updated' if name in copied else 'added'} {name}"
        elif present is None:
            yield f"{name}: you have deleted it; it stays away"
        elif new is None:
            yield f"{name}: no part of a project any more; yours stays, because you have changed it"
        else:
            _write(file.with_name(f"{file.name}.new"), new)
            yield f"{name}: yours stays, because you have changed it; the new one is {name}.new"
            if not name.startswith(PINS):
                yield from _difference(name, present, new)
    _put_wheel(project, own_wheel)
    _note(project, files)


def _files_of_installation() -> dict[str, bytes]:
    """Return the files of a new project by their names. Raises ConfigError if this is not installed
    from a wheel.
    """
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        files = []
    found = {}
    for entry in files:
        _, has_data, name = str(entry).partition(DATA)
        if has_data:
            # With --target, pip moves the data beside the packages and leaves their names as they
            # were.
            beside = Path(__file__).parents[2] / DATA / name
            found[name] = (beside if beside.is_file() else Path(str(entry.locate()))).read_bytes()
    if not found:
        raise ConfigError(
            "flyte-ddp: expected an installation from a wheel (make wheel), got a checkout"
        )
    return dict(sorted(found.items()))


def _find_wheel(given: str) -> Path:
    """Return the wheel that this is installed from. Raises ConfigError if it is not there, or
    another version.
    """
    version = metadata.version(DISTRIBUTION)
    name = given
    if not name and (noted := metadata.distribution(DISTRIBUTION).read_text("direct_url.json")):
        name = unquote(urlsplit(json.loads(noted)["url"]).path)
    wheel = Path(name)
    if not (name.endswith(".whl") and wheel.is_file() and f"-{version}-" in wheel.name):
        raise ConfigError(
            f"--wheel: expected the file of flyte-ddp {version}, which the project's image "
            f"installs, got {name!r}; "
            f"pip download --no-deps {DISTRIBUTION}=={version} fetches it"
        )
    return wheel


def _put_wheel(project: Path, wheel: Path) -> None:
    directory = project / "wheels"
    directory.mkdir(exist_ok=True)
    if (directory / wheel.name).exists() and wheel.samefile(directory / wheel.name):
        return
    for old in directory.glob("flyte_ddp-*.whl"):
        old.unlink()
    shutil.copy(wheel, directory)


def _note(project: Path, files: dict[str, bytes]) -> None:
    noted = {
        "version": metadata.version(DISTRIBUTION),
        "files": {name: _hash(files[name]) for name in files},
    }
    (project / NOTES).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    if content.startswith(b"#!"):
        file.chmod(0o755)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _difference(name: str, present: bytes, new: bytes) -> Iterator[str]:
    old_lines, new_lines = (
        content.decode(errors="replace").splitlines() for content in (present, new)
    )
    yield from difflib.unified_diff(old_lines, new_lines, name, f"{name}.new", lineterm="", n=1)
