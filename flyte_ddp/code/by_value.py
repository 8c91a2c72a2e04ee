"""Classes and functions that travel by value: of a notebook, a REPL, a script or a function.

Imports no torch.

Other processes cannot import them. So cloudpickle carries them, and a checksum of their code and of
the values they refer to is their version. Classes and functions of modules travel by name. The
receiver imports them from the files as they are then.
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import io
import pkgutil
import sys
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp.code.main_module import NAMES
from flyte_ddp.code.source_code import (
    compute_digest_of_files,
    find_packages,
    imported_files,
    is_installed,
)
from flyte_ddp.errors import ConfigError, in_one_line

# attributes of a class that are not its source, or name the place of its source
NOT_SOURCE = ("__dict__", "__doc__", "__module__", "__weakref__", "_abc_impl")

HEAP_TYPE = 1 << 9  # the flag of a class that is no part of Python's own code


def pickle(value: object, of: Any, field: str) -> bytes:
    """Return `value`, which carries the class or function `of`, in a form that cloudpickle loads.

    Raises:
        ConfigError: `value` cannot be pickled. The message begins with `field`.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, find_packages(of), isinstance(of, type)).dump(value)
    except Exception as error:  # any error is possible: `__reduce__` is the user's
        name = getattr(of, "__qualname__", repr(of))
        raise ConfigError(
            f"{field}: expected one that can be pickled, got {name}: {in_one_line(error)}"
        ) from error
    return file.getvalue()


def dumps(value: object) -> bytes:
    """Return `value` pickled as by `cloudpickle.dumps`. `value` may refer to modules that
    cloudpickle cannot pickle. Raises an error of any kind if `value` cannot be pickled.
    """
    file = io.BytesIO()
    _ModulePickler(file).dump(value)
    return file.getvalue()


class _ModulePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles modules of any type by name.

    cloudpickle does so for Python's own module type alone. `torch.distributed.config` has another
    type. cloudpickle pickles it with any function that mentions `dist` and an attribute `config`.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
            name = getattr(value, "__name__", None)
            if name in sys.modules:
                return importlib.import_module, (name,)
        return super().reducer_override(value)


class _Pickler(_ModulePickler):
    """Pickles classes and functions of `packages` by name, also where they were imported before an
    edit.

    With `is_anew`, classes load as new classes even in this process. Without it, objects that come
    back have the classes with which they were sent.
    """

    def __init__(self, file: io.BytesIO, packages: Collection[str], is_anew: bool) -> None:
        super().__init__(file)
        self._packages = packages
        self._is_anew = is_anew

    def reducer_override(self, value: Any) -> Any:
        is_code = isinstance(value, (type, types.FunctionType))
        if is_code and _package(value) in self._packages and not is_by_value(value):
            return pkgutil.resolve_name, (f"{value.__module__}:{value.__qualname__}",)
        reduced = super().reducer_override(value)
        is_class = isinstance(value, type) and reduced is not NotImplemented
        if self._is_anew and is_class and len(reduced) > 2:
            make, arguments, (attributes, slots), *rest = reduced
            attributes["__qualname__"] = value.__qualname__
            # With the class's id, it would load as the class that this process has.
            return make, (*arguments[:-2], None, None), (attributes, slots), *rest
        return reduced


def is_by_value(value: Any) -> bool:
    """Return whether no module contains the class or function `value` under its name."""
    if isinstance(value, type) and not value.__flags__ & HEAP_TYPE:
        return False
    if value.__module__ in (None, *NAMES) or "<" in value.__qualname__:
        return True
    module = sys.modules.get(value.__module__)  # None after an edit
    return module is not None and not hasattr(module, value.__qualname__.partition(".")[0])


def _wraps(value: Any) -> bool:
    """Return whether a function wraps another function and has its name."""
    if not hasattr(value, "__wrapped__"):
        return False
    try:
        return pkgutil.resolve_name(f"{value.__module__}:{value.__qualname__}") is not value
    except (ImportError, AttributeError):
        return True


def _package(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


@dataclass(eq=False, repr=False)
class Checksum:
    """SHA-256 of values, and of the code of classes and functions that travel by value.

    Equal source and equal values give equal checksums, in every process with the same version of
    Python; pickled bytes differ each time. Comments, docstrings of classes and line numbers do not
    count.

    Attributes:
        modules: names of the modules that the values refer to, without installed modules outside
            `packages`. The files of these modules are part of the version.
    """

    packages: Collection[str]
    modules: set[str] = field(default_factory=set)
    # each value and its checksum, by the value's id; a value that is kept here keeps its id
    _known: dict[int, tuple[object, bytes]] = field(default_factory=dict)

    def of(self, value: object) -> bytes:
        """Return the checksum of `value`. Raises an error of any kind if `value` cannot be reduced
        to plain values.
        """
        if id(value) not in self._known:
            self._known[id(value)] = value, b"a cycle"
            digest = hashlib.sha256(f"{type(value).__module__}.{type(value).__qualname__}".encode())
            for part in self._parts(value):
                if not isinstance(part, bytes):
                    part = self.of(part)
                digest.update(part)
            self._known[id(value)] = value, digest.digest()
        return self._known[id(value)][1]

    def _parts(self, value: Any) -> list[Any]:
        """Return the values that make up `value`. Bytes go into the checksum as they are."""
        if isinstance(value, (str, bytes, int, float, complex, type(None), type(...))):
            return [repr(value).encode()]
        if isinstance(value, types.ModuleType):
            return [self._name(value.__name__)]
        if isinstance(value, (type, types.FunctionType, types.CodeType)):
            return self._parts_of_code(value)
        if isinstance(value, (set, frozenset)):
            return sorted(map(self.of, value))
        if isinstance(value, (list, tuple)):
            return list(value)
        torch = sys.modules.get("torch")
        if torch and isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return [str(value.dtype), tuple(value.shape), plain.numpy().tobytes()]
        return _reduce(value)

    def _parts_of_code(self, value: type | types.FunctionType | types.CodeType) -> list[Any]:
        if isinstance(value, types.CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
            return [value.co_code, names, value.co_consts]
        if not is_by_value(value) and not _wraps(value):
            return [self._name(value.__module__), value.__qualname__]
        if isinstance(value, types.FunctionType):
            return [
                value.__code__,
                value.__defaults__,
                value.__kwdefaults__,
                value.__closure__,
                vars(value),
                dict(self._globals(value)),
            ]
        own = {name: each for name, each in vars(value).items() if name not in NOT_SOURCE}
        return [value.__bases__, dict(sorted(own.items()))]

    def _name(self, module: str) -> str:
        package = module.partition(".")[0]
        if package in self.packages or not is_installed(package):
            self.modules.add(module)
        return module

    def _globals(self, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        """Yield the globals that a function's code reads, by their names in order."""
        codes, names = [function.__code__], set()
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            for each in dis.get_instructions(code):
                if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    names.add(each.argval)
                elif each.opname == "IMPORT_NAME":
                    self._name(each.argval)
        for name in sorted(names & function.__globals__.keys()):
            yield name, function.__globals__[name]


def code_version(carried: Any) -> str:
    """Return a SHA-256 of the code of a class, a function or another callable object. The checksum
    includes the values that the code refers to, and the files that the code imports.

    Raises an error of any kind if `carried` cannot be reduced to plain values.
    """
    packages = find_packages(carried)
    checksum = Checksum(packages)
    own_code = checksum.of(carried)
    packages |= {module.partition(".")[0] for module in checksum.modules}
    files: dict[str, Path] = {}
    for module in sorted(checksum.modules):
        files |= imported_files(module, packages)
    return hashlib.sha256(own_code + compute_digest_of_files(files).encode()).hexdigest()


def _reduce(value: Any) -> list[Any]:
    """Return the parts of any other value, as pickle takes it apart."""
    reduce = cloudpickle.Pickler.dispatch_table.get(type(value))
    if reduce:
        reduced = reduce(value)
    else:
        reduced = value.__reduce_ex__(4)
    if not isinstance(reduced, str):
        parts = []
        for each in reduced:
            if isinstance(each, Iterator):
                each = list(each)
            parts.append(each)
        return parts
    # a built-in function, or a wrapper around a function, such as a cache
    found = [reduced, getattr(value, "__module__", None)]
    if hasattr(value, "__wrapped__"):
        found.insert(1, value.__wrapped__)
    return found
