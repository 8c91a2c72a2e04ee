"""The source code of a run: its files and a hash of them. The same files are shipped and hashed.

A recipe may import from its own package and from the packages of recipes that settings.toml names,
so all of these belong to the run. Imports no torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from flyte_ddp.code import main_module
from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import ConfigError

SETTINGS_FILE = "settings.toml"
MAX_SIZE = 32 << 20  # bytes of code; a larger directory also contains data
# environment variable with the commit of a registered task, because its pod has no repository
COMMIT_VARIABLE = "FLYTE_DDP_COMMIT"
STARTED = time.time()  # start of this process, approximately
# the type of each field of settings.toml, and how an error names the type
_TABLES = ("production", "sandbox", "allowed", "wandb", "mlflow", "tensorboard")
_SHAPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(_TABLES, (dict, "a table")),
    "recipes": (list, "a list of names"),
    "image": (str, "a string"),
    "filler_priority_class": (str, "a string"),
}
_project: Path | None = None  # remembered result of `find_project`
_imported: dict[str, str] = {}  # digests of modules' files when this process imported them
_importing = threading.RLock()
# Python counts the depth of its parsers' recursion in one variable for all threads
_parsing = threading.Lock()


def find_project() -> Path | None:
    """Return the first directory on sys.path with a settings.toml of this package; None if there is
    none.

    The result is remembered, because pyflyte has the directory on the path only while it imports a
    workflow.
    """
    global _project
    if _project is None:
        _project = next((each for each in map(Path, sys.path) if _is_project(each)), None)
        _project = _project and _project.resolve()
    return _project


@functools.cache
def describe_commit(directory: str = "") -> str:
    """Return the commit of the git repository of a directory; "" without git or a repository. It
    ends with "-dirty" if tracked files have changed.

    The default is the project's directory, or the working directory if there is no project.
    """
    if not directory and COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    directory = directory or str(find_project() or os.getcwd())
    command = ["git", "-C", directory, "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [*command, "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
            timeout=ANSWER_TIMEOUT,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # the user may commit meanwhile
        )
        return done.stdout.strip()
    return ""


def _is_project(directory: Path) -> bool:
    """Return whether the settings.toml in a directory belongs to this package: it names recipes."""
    try:
        return "recipes" in read_settings(directory / SETTINGS_FILE)
    except ConfigError:
        return True  # the error is raised again where the settings are read


def extend_path() -> None:
    """Put the project's directory and the working directory at the end of sys.path, for recipes.

    The ranks get this process's path.
    """
    for directory in (find_project(), os.getcwd()):
        if directory and str(directory) not in sys.path:
            sys.path.append(str(directory))


def read_settings(file: Path | None = None) -> dict[str, Any]:
    """Return the tables of a TOML file, by default the project's; none where there is no such file.

    Raises:
        ConfigError: the file is not TOML, or a field of a project's settings has another type.
    """
    if file is None:
        project = find_project()
        if project is None:
            return {}
        file = project / SETTINGS_FILE
    found: dict[str, Any] = {}
    try:
        if file.is_file():
            found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.name}: expected TOML, got {error}") from error
    if "recipes" in found:
        for name, (kind, what) in _SHAPES.items():
            if not isinstance(found.get(name, kind()), kind):
                raise ConfigError(f"{file.name}: {name}: expected {what}, got {found[name]!r}")
    return found


def recipe_packages() -> list[str]:
    """Return the packages of recipes that settings.toml names; none where the library is used
    without it.
    """
    return list(read_settings().get("recipes", []))


def list_packages(module: str) -> list[str]:
    """Return the top-level packages whose code decides what a recipe defined in `module` does."""
    return sorted({"flyte_ddp", module.split(".")[0], *recipe_packages()})


@contextlib.contextmanager
def importing_edits(packages: Collection[str]) -> Iterator[None]:
    """Let the block import edited code of `packages` again.

    The ranks are new processes, and import the files as they are now. All modules of the packages
    are imported again, so that no module keeps a class from another module's former code. The
    modules stay the same objects, as with `importlib.reload`. So a notebook's own names for them
    have the new code. If the block raises, the modules are as before.

    Raises:
        ConfigError: the library was edited.
    """
    packages = {"flyte_ddp", *packages}.difference(main_module.NAMES)
    with _importing:
        digests = _digest_loaded(packages)
        edited = {name for name, digest in digests.items() if _is_edited(name, digest)}
        library = sorted(name for name in edited if name.partition(".")[0] == "flyte_ddp")
        if library:
            raise ConfigError(
                f"recipe: expected {library[0]} as this process has imported it, got a file that "
                "was edited since: restart the process"
            )
        others = packages - {"flyte_ddp"}
        outdated = [name for name in sys.modules if name.partition(".")[0] in others]
        known = {}
        if edited:
            known = {name: _imported.pop(name, "") for name in outdated}
        importlib.invalidate_caches()
        # No bytecode is written: an edit may outdate it.
        writes, sys.dont_write_bytecode = not sys.dont_write_bytecode, True
        try:
            with _importing_in_place(known) as restored:
                yield
        except BaseException:
            restored.update(known)
            raise
        finally:
            sys.dont_write_bytecode = not writes
            _imported.update({name: known[name] for name in restored if name in digests})
        for name, digest in _digest_loaded(packages).items():
            _imported.setdefault(name, digest)


@contextlib.contextmanager
def _importing_in_place(names: Collection[str]) -> Iterator[set[str]]:
    """Let the block import modules again, into the same objects.

    Yields:
        The names of the modules that could not be imported again, and are as before. The set is
        complete after the block.
    """
    old = {name: sys.modules.pop(name) for name in names}
    values = {name: dict(vars(module)) for name, module in old.items()}
    restored: set[str] = set()

    def restore(name: str) -> None:
        vars(old[name]).clear()
        vars(old[name]).update(values[name])
        sys.modules[name] = old[name]
        restored.add(name)

    files = {name: str(getattr(module, "__file__", None)) for name, module in old.items()}
    sources = [name for name, file in files.items() if file.endswith(".py")]
    for name in sources:
        # The bytecode may seem up to date: it identifies its source by seconds and size alone.
        with contextlib.suppress(OSError):
            os.unlink(importlib.util.cache_from_source(files[name]))
    finder = _SameObjects({name: old[name] for name in sources})
    sys.meta_path.insert(0, finder)
    try:
        yield restored
        # A method may later import a module that the block has not imported.
        for name in sources:
            try:
                importlib.import_module(name)
            except Exception:  # an import can raise anything, and nobody asked for this module
                restore(name)
        for name in old:
            sys.modules.setdefault(name, old[name])
    except BaseException:
        for name in old:
            restore(name)
        raise
    finally:
        sys.meta_path.remove(finder)


class _SameObjects(importlib.abc.MetaPathFinder):
    """Finds modules that are imported again, and lets the loader execute them in their former
    objects.
    """

    def __init__(self, modules: Mapping[str, types.ModuleType]) -> None:
        self.modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        module = self.modules.get(name)
        if module is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _InPlaceLoader(name, spec.origin, module)
        return spec


class _InPlaceLoader(importlib.machinery.SourceFileLoader):
    """Executes a file in a module that exists, without its former names."""

    def __init__(self, name: str, path: str, module: types.ModuleType) -> None:
        super().__init__(name, path)
        self._module = module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        self.get_code(module.__name__)  # raises for a syntax error before any name is deleted
        for name, value in list(vars(module).items()):
            is_own = name.startswith("__") and name.endswith("__") and name != "__all__"
            is_submodule = isinstance(value, types.ModuleType) and value.__name__.endswith(
                f"{module.__name__}.{name}"
            )
            if not is_own and not is_submodule:
                del vars(module)[name]
        super().exec_module(module)


def _is_edited(name: str, digest: str) -> bool:
    if name in _imported or name.partition(".")[0] == "flyte_ddp":
        return _imported.get(name, digest) != digest
    # No digest was taken at the import of this module, so its file's time decides.
    return not digest or os.path.getmtime(str(sys.modules[name].__file__)) > STARTED


def _digest_loaded(packages: Collection[str]) -> dict[str, str]:
    """Return a digest of the file of each loaded module of `packages`; "" for a file that no longer
    exists.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in packages:
            continue  # reading an attribute of a lazily loaded module would import it
        file = Path(getattr(module, "__file__", None) or "")
        if file.suffix == ".py":
            found[name] = ""
            if file.is_file():
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def packages_beside(module: str) -> tuple[str, ...]:
    """Return the top-level packages and modules that a function defined in `module` may need.

    These are its own package, and the imported packages in the same directory, unless this is a
    directory of installed packages. A notebook counts as a module of the working directory.
    """
    own = sys.modules.get(module.partition(".")[0])
    root = find_root(own)
    if root is None and module in main_module.NAMES:
        root = Path.cwd()
    if root is None:
        return ()
    beside = {module.partition(".")[0]}
    if root not in _installed():
        loaded = [name for name in sys.modules if "." not in name]
        beside |= {name for name in loaded if find_root(sys.modules.get(name)) == root}
    # The functions of the main module travel by value.
    return tuple(sorted(beside.difference(main_module.NAMES)))


def find_packages(carried: Any) -> set[str]:
    """Return the packages that a class or function that travels by value may need."""
    module = getattr(carried, "func", carried).__module__  # the function of a partial is its `func`
    return {*packages_beside(module or "__main__"), *recipe_packages()} - {"flyte_ddp"}


def is_installed(package: str) -> bool:
    """Return whether a top-level package or module belongs to Python or this library, or is
    installed.
    """
    root = find_root(sys.modules.get(package))
    if root is None or package in {"flyte_ddp", *main_module.NAMES}:
        return True
    above = {root, *root.parents}
    return bool(above & _installed()) or any(each.name == "dist-packages" for each in above)


@functools.cache
def _installed() -> frozenset[Path]:
    """Return the directories of installed packages."""
    paths = sysconfig.get_paths()
    return frozenset(Path(paths[key]).resolve() for key in ("stdlib", "purelib", "platlib"))


def find_root(module: Any) -> Path | None:
    """Return the directory that contains a top-level package or module."""
    file = getattr(module, "__file__", None)
    if file:
        path = Path(file).resolve()
        if path.stem == "__init__":
            path = path.parent
        return path.parent
    for path in getattr(module, "__path__", []):  # a package without an __init__
        return Path(path).resolve().parent
    return None


def source_files(packages: Iterable[str]) -> dict[str, Path]:
    """Return the files of top-level packages and modules by their names relative to an entry of
    sys.path, sorted.
    """
    found: dict[str, Path] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None:
            continue
        if spec.submodule_search_locations is None:
            if spec.origin is not None:
                found[Path(spec.origin).name] = Path(spec.origin)
            continue
        for location in spec.submodule_search_locations:
            found |= {
                f"{package}/{name}": file for name, file in files_below(Path(location)).items()
            }
    return dict(sorted(found.items()))


def imported_files(module: str, packages: Iterable[str]) -> dict[str, Path]:
    """Return the part of `source_files(packages)` that decides what `module` does, sorted by name.

    It consists of the module's own file, the files that it imports directly or indirectly, and all
    files that are not Python, because the module may read them. An import by a name computed at run
    time is not found.
    """
    files = source_files(packages)
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = name.replace(".", "/")
        for file in {f"{path}.py", f"{path}/__init__.py"} & files.keys() - reached:
            reached.add(file)
            package = name
            if not file.endswith("__init__.py"):
                package = name.rpartition(".")[0]
            waiting += _imported_names(files[file], package)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return {name: file for name, file in files.items() if name in reached or file.suffix != ".py"}


def _imported_names(file: Path, package: str) -> Iterator[str]:
    """Yield the dotted names that a file of `package` imports. Some may be names in a module."""
    with _parsing:
        tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = []
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1]
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def names_read(module: str) -> set[str] | None:
    """Return the attributes that a module's code reads, also by `getattr`; None where its code
    cannot be read.
    """
    try:
        code = Path(getattr(sys.modules[module], "__file__", "")).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return set(re.findall(r"""(?:\.|getattr\([^)]*["'])(\w+)""", code))


def files_below(directory: Path) -> dict[str, Path]:
    """Return the files in `directory` and below by their names relative to it, without hidden and
    compiled ones.
    """
    found: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [
            name for name in subfolders if name != "__pycache__" and not name.startswith(".")
        ]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                found[file.relative_to(directory).as_posix()] = file
    return found


def compute_library_digest() -> str:
    """Return a SHA-256 of the files of this package as they are now."""
    return compute_digest_of_files(source_files(["flyte_ddp"]))


def compute_digest_of_files(files: Mapping[str, Path]) -> str:
    """Return a SHA-256 of files and their names. If the files are too large to be code alone, only
    the Python files count.
    """
    if sum(file.stat().st_size for file in files.values()) > MAX_SIZE:
        files = {name: file for name, file in files.items() if file.suffix == ".py"}
    digest = hashlib.sha256()
    for name, file in files.items():
        digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
