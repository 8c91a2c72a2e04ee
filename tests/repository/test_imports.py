"""Imports go one way, and a process does not import what it does not need: most of a start-up's
time is imports.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flyte_ddp.config.extras import EXTRAS

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("workflows", "tasks", "flyte_ddp")

# Layers from the top down. A module imports from its own layer and the layers below.
LAYERS = {
    "workflows": 12,
    "tasks": 11,
    "flyte_ddp.flyte2": 11,  # Only its user imports it.
    "flyte_ddp": 10,
    "flyte_ddp.task_run": 10,
    "flyte_ddp.project": 10,
    "flyte_ddp.studies": 10,
    "flyte_ddp.promotion": 10,
    "flyte_ddp.prediction": 10,
    "flyte_ddp.rehearsal": 10,
    "flyte_ddp.launch": 9,
    "flyte_ddp.launch.nodes": 8,
    "flyte_ddp.launch.control": 7,
    "flyte_ddp.launch.agent": 7,
    "flyte_ddp.integrations": 7,
    "flyte_ddp.training": 6,
    "flyte_ddp.session": 5,
    "flyte_ddp.rank": 5,
    "flyte_ddp.launch.protocol": 4,
    "flyte_ddp.checkpoints": 4,
    "flyte_ddp.world": 3,
    "flyte_ddp.observers": 2,
    "flyte_ddp.recipes": 2,
    "flyte_ddp.data": 2,
    "flyte_ddp.cluster": 2,
    "flyte_ddp.project.admission": 2,
    "flyte_ddp.process": 1,
    "flyte_ddp.process.threads": 0,
    "flyte_ddp.storage": 1,
    "flyte_ddp.code": 0,
    "flyte_ddp.config": 0,
    "flyte_ddp.events": 0,
    "flyte_ddp.errors": -1,
}
# Folders by the process in which their lines run. Of these folders, each one imports only the ones
# beside its name.
PICTURE = {
    "flyte_ddp.launch.control": ("flyte_ddp.launch.protocol",),  # the driver
    # The agent: there is one per machine.
    "flyte_ddp.launch.agent": ("flyte_ddp.launch.protocol",),
    "flyte_ddp.launch.protocol": (),
    "flyte_ddp.launch.nodes": (
        "flyte_ddp.launch.control",
        "flyte_ddp.launch.agent",
        "flyte_ddp.launch.protocol",
    ),
    "flyte_ddp.launch": ("flyte_ddp.launch",),
    "flyte_ddp.rank": ("flyte_ddp.launch.protocol", "flyte_ddp.session"),  # every rank
    "flyte_ddp.session": ("flyte_ddp.rank",),
    "flyte_ddp.training": ("flyte_ddp.rank", "flyte_ddp.session", "flyte_ddp.launch.protocol"),
}
# Modules that read, write, wait or start something. Requests to stop are set by signals.
DOES_IO = ("mmap", "multiprocessing", "shutil", "socket", "subprocess", "tempfile", "threading")
MAY_DO_IO = ("signals", "programs")
# Number of packages and files directly below flyte_ddp, tasks and workflows, and number of pairs
# where one imports the other.
MAX_ROOMS, MAX_ARROWS = 29, 194
# Kinds of programs: a recipe's training, its predictions, a call, a script, another program, a task
# of Flyte's.
PROGRAMS = ("_Training", "PredictionJob", "FunctionCall", "_Script", "_Command", "TaskCall")
# Modules that may import a library at all, by library.
HOMES = {
    "flytekit": ("tasks", "workflows", "flyte_ddp.flyte"),
    "flyte": ("flyte_ddp.flyte2",),
    "flytekitplugins": ("tasks", "workflows", "flyte_ddp.flyte"),
    "dask": (
        "flyte_ddp.launch",
        "flyte_ddp.cluster",
        "flyte_ddp.studies",
        "flyte_ddp.process.devices",
    ),
    "distributed": (
        "flyte_ddp.launch",
        "flyte_ddp.cluster",
        "flyte_ddp.studies",
        "flyte_ddp.prediction",
    ),
    "dask_kubernetes": ("flyte_ddp.cluster",),
    "kubernetes": ("flyte_ddp.cluster", "flyte_ddp.flyte.pods"),
    "kr8s": ("flyte_ddp.cluster",),
    "huggingface_hub": ("flyte_ddp.recipes.text.pretrained",),
    "transformers": (
        "flyte_ddp.integrations.transformers",
        "flyte_ddp.recipes.text.model",
        "flyte_ddp.recipes.text.pretrained",
    ),
    "lightning": ("flyte_ddp.integrations.lightning",),
    "mlflow": ("flyte_ddp.observers.mlflow",),
    "accelerate": ("flyte_ddp.integrations.accelerate",),
    "opentelemetry": ("flyte_ddp.observers.traces",),
    "optuna": ("flyte_ddp.studies.search",),
    "prometheus_client": ("flyte_ddp.observers.metrics",),
    "tokenizers": ("flyte_ddp.recipes.text.tokens",),
    "safetensors": ("flyte_ddp.storage.state_dict_file",),
    "wandb": ("flyte_ddp.observers",),
}
SLOW = (
    "tokenizers",
    "torch",
    "torchvision",
    "matplotlib",
    "wandb",
    "sklearn",
    "flytekit",
    "optuna",
    "pandas",
)
# Each of these modules belongs to one SDK of Flyte's.
FLYTE = ("flyte_ddp.flyte", "flyte_ddp.flytekit_plugin", "flyte_ddp.flyte2")
# Modules that run in a rank, or generate names or text, may import torch at the top. Modules that
# start a rank may not.
STARTS_RANKS = ("flyte_ddp.checkpoints.ownership",)
COMPUTES = (
    "flyte_ddp.checkpoints",
    "flyte_ddp.integrations",
    "flyte_ddp.prediction.model",
    "flyte_ddp.prediction.rank",
    "flyte_ddp.prediction.schema",
    "flyte_ddp.rank",
    "flyte_ddp.promotion.comparison",
    "flyte_ddp.rehearsal.estimate",
    "flyte_ddp.rehearsal.left",
    "flyte_ddp.rehearsal.replayed_step",
    "flyte_ddp.rehearsal.watch",
    "flyte_ddp.training",
    "flyte_ddp.world",
    *(
        f"flyte_ddp.recipes.{module}"
        for module in ("pet_names.generate", "pet_names.model", "text.model")
    ),
)


def _modules():
    """{dotted name: file} of the whole project."""
    found = {}
    for package in PACKAGES:
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            parts = file.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = _modules()


@functools.cache
def _imports(file):
    """(line, dotted name, whether it is inside a function) of everything that `file` imports."""
    return list(_find_imports(file))


def _find_imports(file):
    in_function = set()
    tree = ast.parse(file.read_text())
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            in_function |= {id(node) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in in_function
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative imports hide their layer"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                yield (
                    node.lineno,
                    dotted if dotted in MODULES else node.module,
                    id(node) in in_function,
                )


def _within(module, packages):
    return any(module == package or module.startswith(package + ".") for package in packages)


def _layer(module):
    package = max((name for name in LAYERS if _within(module, [name])), key=len)
    return LAYERS[package]


def _broken(rule):
    """A line for every import of the project for which `rule(module, imported, in_function)` has an
    objection.
    """
    lines = []
    for module, file in MODULES.items():
        for line, imported, in_function in _imports(file):
            if objection := rule(module, imported, in_function):
                lines.append(
                    f"{file.relative_to(REPOSITORY)}:{line} imports {imported}: {objection}"
                )
    return lines


def lower_layers_only(module, imported, in_function):
    if _within(imported, PACKAGES) and _layer(imported) > _layer(module):
        return f"{module} lies below it"
    return ""


def _folder(module):
    return max((name for name in PICTURE if _within(module, [name])), key=len, default="")


def process_of_the_folder(module, imported, in_function):
    own, other = _folder(module), _folder(imported)
    if not own or not other or own == other or _within(other, PICTURE[own]):
        return ""
    return f"{own} imports of the others only {PICTURE[own]}"


def values_without_io(module, imported, in_function):
    package, _, name = module.rpartition(".")
    is_bound = package == "flyte_ddp.launch.protocol" and name not in MAY_DO_IO
    return "protocol/ holds values" if is_bound and _within(imported, DOES_IO) else ""


@pytest.mark.long
def test_no_files_import_each_other_in_a_circle():
    """Neither at the top, nor inside functions, nor for type checkers alone."""
    arrows = {}
    for module, file in MODULES.items():
        arrows[module] = {found for _, found, _ in _imports(file) if found in MODULES}
    while leaves := {module for module, found in arrows.items() if not found & arrows.keys()}:
        arrows = {module: found for module, found in arrows.items() if module not in leaves}
    tops = True
    while tops:  # A module that only leads to a circle is no part of the circle.
        imported = set().union(*arrows.values()) if arrows else set()
        tops = arrows.keys() - imported
        arrows = {module: found for module, found in arrows.items() if module not in tops}
    assert {module: sorted(found & arrows.keys()) for module, found in arrows.items()} == {}


def test_rooms_and_the_arrows_between_them_stay_few():
    rooms = {_room(module) for module in MODULES}
    imports = [
        (module, imported) for module, file in MODULES.items() for _, imported, _ in _imports(file)
    ]
    arrows = {
        (_room(module), _room(imported)) for module, imported in imports if imported in MODULES
    }
    arrows = {(source, target) for source, target in arrows if source != target}

    assert (len(rooms) <= MAX_ROOMS, len(arrows) <= MAX_ARROWS) == (True, True), (
        len(rooms),
        len(arrows),
    )


def _room(module):
    depth = 2 if module.startswith("flyte_ddp.") else 1
    # the alias is no room of its own
    return ".".join(module.split(".")[:depth]).replace("flytekit_plugin", "flyte")


def test_no_code_asks_which_kind_a_program_is():
    """Programs differ only in the fields of `Program`, so that each promise is kept in one place
    for all of them.
    """
    defined, asked = set(), []
    for file in MODULES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                kinds = {ast.unparse(name).rpartition(".")[2] for name in ast.walk(node.args[1])}
                asked += [
                    f"{file.relative_to(REPOSITORY)}:{node.lineno}"
                    for _ in kinds.intersection(PROGRAMS)
                ]

    assert set(PROGRAMS) <= defined
    assert asked == []


def data_without_a_training(module, imported, in_function):
    is_config = imported in ("flyte_ddp.config", "flyte_ddp.config.training")
    return "data/ knows no training" if _within(module, ["flyte_ddp.data"]) and is_config else ""


def home_of_the_library(module, imported, in_function):
    homes = HOMES.get(imported.split(".")[0])
    return f"only {', '.join(homes)} may" if homes and not _within(module, homes) else ""


def test_every_library_that_is_imported_is_declared():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib reads pyproject.toml, which is the same for all Pythons")
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}
    extras = {
        each for extra in set(EXTRAS.values()) for each in project["optional-dependencies"][extra]
    }
    declared |= {canonicalize_name(Requirement(each).name) for each in extras}
    distributions = metadata.packages_distributions()

    def rule(module, imported, in_function):
        package = imported.split(".")[0]
        if module == f"flyte_ddp.integrations.{package}" or package == "flyte":
            return ""  # whoever imports this file has the framework
        if package in sys.stdlib_module_names or package in PACKAGES:
            return ""
        # Several distributions share a namespace, such as google's.
        names = {canonicalize_name(name) for name in distributions.get(package, [package])}
        return "" if names & declared else f"pyproject.toml declares none of {sorted(names)}"

    assert _broken(rule) == []


def wandb_inside_functions(module, imported, in_function):
    return (
        "it takes a second, so only functions import it"
        if _within(imported, ["wandb"]) and not in_function
        else ""
    )


@pytest.mark.parametrize(
    "rule",
    [
        lower_layers_only,
        process_of_the_folder,
        values_without_io,
        data_without_a_training,
        home_of_the_library,
        wandb_inside_functions,
    ],
    ids=lambda rule: rule.__name__,
)
def test_every_import_keeps_to_the_rules_of_the_rooms(rule):
    assert _broken(rule) == []


def test_agents_and_drivers_import_nothing_slow():
    modules = [
        name
        for name in MODULES
        if _within(name, ["flyte_ddp"])
        and not _within(name, FLYTE)
        and (_within(name, STARTS_RANKS) or not _within(name, COMPUTES))
    ]
    assert {
        "flyte_ddp.launch.control.driver",
        "flyte_ddp.recipes.mnist",
        "flyte_ddp.recipes.digits",
    } <= set(modules)
    program = f"""
import importlib, sys
for module in {modules!r}:
    before = set(sys.modules)
    importlib.import_module(module)
    slow = sorted(set({SLOW!r}) & (set(sys.modules) - before))
    if slow:
        print(module, "imports", *slow)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )

    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "", "")


def test_agents_drivers_and_the_ranks_of_functions_import_no_recipe():
    program = """
import sys
import flyte_ddp.launch.agent.main
import flyte_ddp.launch.control.driver
import flyte_ddp.rank.entry
print(*(name for name in sys.modules if name.startswith("flyte_ddp.recipes")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "\n")


def test_public_names_are_exported_and_imported_on_first_use():
    program = """
import sys
import flyte_ddp
assert not [name for name in sys.modules if name.startswith("flyte_ddp.")], "import flyte_ddp imports more"
from flyte_ddp import DataError, Recipe, load_champion
assert issubclass(DataError, ValueError) and Recipe.prepare and callable(load_champion)
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )

    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "", "")


def test_tasks_pass_each_input_on_by_its_name():
    """A local variable must not become an argument."""
    bodies = {
        (file.name, function.name): function
        for folder in ("tasks", "workflows")
        for file in (REPOSITORY / folder).glob("*.py")
        for function in ast.parse(file.read_text()).body
        if isinstance(function, ast.FunctionDef)
    }
    assert len(bodies) > 15
    for place, function in bodies.items():
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assert "locals" not in used, place
        assert {each.arg for each in function.args.args} <= used, place
