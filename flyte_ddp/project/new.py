"""Make a project that trains on Flyte, and print what a namespace needs: `flyte-ddp new` and
`flyte-ddp deploy`.

A project consists of declarations, which its owner may change. They call this package. A new
version is another wheel. The wheel carries the files of a project as its data.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flyte_ddp.code.source_code import describe_commit, read_settings
from flyte_ddp.config.fields import suggest
from flyte_ddp.errors import ConfigError

DISTRIBUTION = "flyte-ddp"
# root of the checkout if this package runs from one, as after `make setup`; otherwise the directory
# of the installed packages
ROOT = Path(__file__).resolve().parents[2]
DATA = "share/flyte-ddp/"  # directory of the project files in an installation
TRAINING = (
    *("recipes/wine.py", "tasks/__init__.py", "tasks/train.py", "tests/test_recipes.py"),
    *("workflows/single_node.py", "workflows/multi_node.py"),
)
FUNCTION = ("workflows/train.py", "tests/test_train.py")
# Files of a project for Flyte 2. The other files below flyte2/ replace the files of the same name
# for Flyte 1.
FLYTE_2_WORKFLOWS = "workflows/flyte2.py"
FLYTE_2 = ("recipes/wine.py", FLYTE_2_WORKFLOWS, "tests/test_recipes.py")
ALWAYS = (
    *("workflows/__init__.py", "settings.toml", "pyproject.toml", "requirements.txt"),
    *("Dockerfile", "Makefile", "README.md", ".gitignore", ".dockerignore"),
)
# files that the modules of a part import. A project with a function may lack them.
BASE = ("tasks/__init__.py", "tasks/train.py")
NEEDS = {
    **dict.fromkeys(("names", "retrain", "scaling", "sweep", "text"), BASE),
    **dict.fromkeys(("predict", "script"), ("tasks/__init__.py",)),
}
PARTS = {
    "names": ("tasks/generate.py", "workflows/pet_names.py"),
    "predict": ("tasks/predict.py", "workflows/predict.py"),
    "retrain": ("tasks/retrain.py", "workflows/retrain.py"),
    "scaling": ("tasks/study.py", "workflows/scaling.py"),
    "script": ("tasks/script.py", "workflows/script.py"),
    "sweep": ("tasks/study.py", "workflows/sweep.py"),
    "text": ("tasks/generate.py", "workflows/text.py"),
}
NAMESPACE = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
IMAGE = r"[A-Za-z0-9][\w./:@-]*"
RIGHTS = ("namespace", "rbac", "networkpolicy", "pod-template", "admission-policy")


def make_project(
    directory: str,
    parts: Collection[str] = (),
    is_function: bool = False,
    wheel: str = "",
    flyte: int = 1,
) -> Iterator[str]:
    """Make a project in `directory`, or add `parts` to the existing project there. Yield lines for
    people.

    Args:
        parts: names in `PARTS`.
        is_function: the project has a task with a training function, instead of a recipe.
        wheel: the file of this package. With "", it is the file from which pip installed this
            package, or the file that `make wheel` built in this checkout.
        flyte: version of Flyte, 1 or 2. A project for 2 has all workflows in one file.

    Raises:
        ConfigError: an unknown part or version of Flyte, or a part of Flyte 1 for Flyte 2; the
            directory contains files and is no project, cannot be made, or contains another file
            with the name of a part; an option for new projects alone; the wheel does not exist.
            Nothing is written then.
    """
    project = Path(directory)
    is_there = _has_files(project)
    _check_request(project, is_there, parts, is_function, flyte)
    if is_there and (is_function or wheel):
        name = "--wheel"
        if is_function:
            name = "--function"
        raise ConfigError(f"{name}: expected a new project, got {directory!r}, which is there")
    files = choose_files(project, parts, is_function, flyte, is_new=not is_there)
    own_wheel = None
    if not is_there:
        own_wheel = _find_wheel(wheel)
    for name, content in files.items():
        if (project / name).exists() and (project / name).read_bytes() != content:
            raise ConfigError(f"--with: expected no file of your own at {name}, got one")
    try:
        for name, content in files.items():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_bytes(content)
        if own_wheel:
            (project / "wheels").mkdir()
            shutil.copy(own_wheel, project / "wheels")
    except OSError as error:
        raise ConfigError(
            f"new: expected a directory that can be made and written, got {directory!r}: "
            f"{error.strerror}"
        ) from error
    if own_wheel:
        yield f"made {project} with flyte-ddp {own_wheel.name.split('-')[1]}"
        yield f"try: cd {shlex.quote(str(project))} && make train"
    else:
        yield from (f"added {name}" for name in files)


def _check_request(
    project: Path, is_there: bool, parts: Collection[str], is_function: bool, flyte: int
) -> None:
    """Raise ConfigError for unknown options, or options that do not fit the directory."""
    if flyte not in (1, 2):
        raise ConfigError(f"--flyte: expected 1 or 2, got {flyte}")
    for part in parts:
        if part not in PARTS:
            raise ConfigError(
                f"--with: expected some of {', '.join(PARTS)}, got {part!r}{suggest(part, PARTS)}"
            )
    is_flyte_2 = flyte == 2 or (is_there and (project / FLYTE_2_WORKFLOWS).exists())
    if is_flyte_2 and (parts or is_function):
        raise ConfigError(
            "--flyte 2: expected no --with and no --function: its workflows/flyte2.py has all "
            "workflows, to change or to leave out"
        )
    if is_there and not (parts and (project / "settings.toml").is_file()):
        raise ConfigError(
            "new: expected a directory that is empty or not there, or a project and --with, got "
            f"{str(project)!r}"
        )


def choose_files(
    project: Path, parts: Collection[str], is_function: bool, flyte: int, is_new: bool
) -> dict[str, bytes]:
    """Return the contents of the files to write, by name. A file that a part only imports is
    written if it is missing.
    """
    names = [name for part in parts for name in PARTS[part]]
    if is_new:
        names += ALWAYS
        if flyte == 2:
            names += FLYTE_2
        elif is_function:
            names += FUNCTION
        else:
            names += TRAINING
    names += [name for part in parts for name in NEEDS[part] if not (project / name).exists()]
    files = project_files()
    if flyte == 2:
        files |= {name: files[f"flyte2/{name}"] for name in names if f"flyte2/{name}" in files}
    if is_function:
        settings = files["settings.toml"]
        files["settings.toml"] = settings.replace(b'recipes = ["recipes"]', b"recipes = []")
    return {name: files[name] for name in names}


def _has_files(project: Path) -> bool:
    """Return whether a directory contains files. Files that other programs hide in it, such as the
    .git of an empty clone, do not count. Raises ConfigError if `project` is no directory.
    """
    try:
        names = [each.name for each in project.iterdir()]
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(
            f"new: expected a directory, got {str(project)!r}: {error.strerror}"
        ) from error
    return any(not name.startswith(".") or name in ALWAYS for name in names)


def find_version() -> tuple[str, str]:
    """Return the version of this package, and the commit of a checkout or "installed"."""
    try:
        return metadata.version(DISTRIBUTION), "installed"
    except metadata.PackageNotFoundError:
        version = read_settings(ROOT / "pyproject.toml")["project"]["version"]
        return version, describe_commit(str(ROOT)) or "a checkout without git"


def manifests(namespace: str, image: str, has_namespace: bool = True) -> str:
    """Return the manifests in deploy/ that give tasks in `namespace` their rights, for
    `kubectl apply`.

    Args:
        image: the image that pods of runs may have; "" for the image in the manifests.
        has_namespace: the namespace exists already. Flyte makes it.
    """
    import yaml

    if not re.fullmatch(NAMESPACE, namespace):
        raise ConfigError(
            "--namespace: expected a name of Kubernetes, at most 63 of a-z, 0-9 and -, got "
            f"{namespace!r}"
        )
    if image and not re.fullmatch(IMAGE, image):
        raise ConfigError(
            f"--image: expected a name such as registry.example.com/image:1, got {image!r}"
        )
    files = project_files()
    documents = []
    for name in RIGHTS[has_namespace:]:
        text = files[f"deploy/{name}.yaml"].decode().replace("NAMESPACE", namespace)
        if image:
            text = text.replace("registry.example.com/flyte-ddp", re.sub(r"[:@][^/]*$", "", image))
        documents += yaml.safe_load_all(text)
    for each in documents:
        if each["kind"] in ("NetworkPolicy", "PodTemplate"):  # their files name no namespace
            each["metadata"]["namespace"] = namespace
    return str(yaml.safe_dump_all(documents, sort_keys=False))


def project_files() -> dict[str, bytes]:
    """Return the files of projects by name, from an installation or a checkout."""
    try:
        entries = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        return dict(_files_of_checkout())
    found = {}
    for entry in entries:
        _, has_data, name = str(entry).partition(DATA)
        if has_data:
            # `pip install --target` moves the data beside the packages. The listed names of the
            # files do not change.
            file = ROOT / DATA / name
            if not file.is_file():
                file = Path(str(entry.locate()))
            found[name] = file.read_bytes()
    return found


def _files_of_checkout() -> Iterator[tuple[str, bytes]]:
    """Yield the files that pyproject.toml puts into the wheel, with their names."""
    build = read_settings(ROOT / "pyproject.toml")["tool"]["hatch"]["build"]
    for source, target in build["targets"]["wheel"]["shared-data"].items():
        top = ROOT / source
        files = [top]
        if top.is_dir():
            files = list(top.rglob("*"))
        for file in files:
            if file.is_file():
                name = Path(target, file.relative_to(top)).relative_to(DATA)
                yield name.as_posix(), file.read_bytes()


def _find_wheel(given: str) -> Path:
    """Return the wheel of this package. Raises ConfigError if the file does not exist, or has
    another version.
    """
    name = given
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version, remedy = "of this checkout", "make wheel builds it"
        name = name or str(max((ROOT / "dist").glob("*.whl"), key=os.path.getmtime, default=""))
        has_version = True
    else:
        version = distribution.version
        remedy = f"pip download --no-deps {DISTRIBUTION}=={version} fetches it"
        source = distribution.read_text("direct_url.json")
        if not name and source:
            name = unquote(urlsplit(json.loads(source)["url"]).path)
        has_version = f"-{version}-" in name
    if not (name.endswith(".whl") and Path(name).is_file() and has_version):
        raise ConfigError(
            f"--wheel: expected the file of flyte-ddp {version}, which the project's image "
            f"installs, got {name!r}; {remedy}"
        )
    return Path(name)
