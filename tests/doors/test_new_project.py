"""The library as a wheel with its core dependencies alone, and the projects that it makes."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flyte_ddp.config.extras import EXTRAS
from flyte_ddp.project import new as projects
from flyte_ddp.project.new import PARTS, choose_files
from tests.support.checkout import REPOSITORY, install_wheel, own_environment

if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


# Packages that core dependencies bring, as a whole or, of OpenTelemetry, in part.
BROUGHT = {"adlfs", "gcsfs", "opentelemetry"}

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="tomllib reads pyproject.toml, which is the same for all Pythons",
)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A directory of installed packages that has the wheel."""
    place = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=120
    )
    return place


@pytest.fixture(scope="module")
def core(installed, tmp_path_factory):
    """A directory with the wheel, its core dependencies and what they need, and no other
    package.
    """
    place = tmp_path_factory.mktemp("core")
    link(place, with_dependencies(PROJECT["dependencies"]), installed)
    return place


def link(place, distributions, installed):
    """Put distributions, and what `installed` has, into `place`."""
    for name in distributions:
        for file in metadata.distribution(name).files or []:
            top, path = file.parts[0], Path(str(file.locate()))
            if top != ".." and path.exists() and not (place / top).exists():
                (place / top).symlink_to(
                    path.parents[len(file.parts) - 2] if len(file.parts) > 1 else path
                )
    for each in installed.iterdir():
        (place / each.name).symlink_to(each)


def with_dependencies(requirements):
    """The names of distributions, and of all that they need in turn."""
    found, waiting = set(), [(Requirement(each), "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in found:
                found.add((name, extra))
                waiting += [(Requirement(each), extra) for each in metadata.requires(name) or []]
    return {name for name, _ in found}


def run(path, *arguments, cwd, status=0, **variables):
    """Run Python where `path` is all that is installed besides, until it ends with `status`, and
    return what it printed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "WANDB_MODE": "disabled",
        **variables,
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    return output


def flyte_ddp(installed, *arguments, cwd, status=0):
    program = str(installed / "bin/flyte-ddp")
    return run([installed], program, *map(str, arguments), cwd=cwd, status=status)


@pytest.fixture(scope="module")
def project(installed, tmp_path_factory):
    place = tmp_path_factory.mktemp("made") / "my-project"
    output = flyte_ddp(installed, "new", place, cwd=place.parent)
    made = f"made {place} with flyte-ddp {PROJECT['version']}"
    assert output == f"{made}\ntry: cd {place} && make train\n"
    return place


def test_the_wheel_is_the_library_alone_and_typed(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"flyte_ddp"}
    assert "flyte_ddp/py.typed" in names
    assert not [
        name
        for name in names
        if "__pycache__" in name
        or ("/test_" in name and not re.search("share/flyte-ddp/(flyte2/)?tests/", name))
    ]


@pytest.mark.long
def test_what_is_missing_is_named_with_the_command_that_installs_it(core, tmp_path):
    """Every module can be imported without the extras; what needs one says so in a line."""
    program = f"""
import importlib, importlib.util, pkgutil, re, sys
import flyte_ddp
assert flyte_ddp.__file__.startswith({str(core)!r}), flyte_ddp.__file__
present = [name for name in {sorted(EXTRAS.keys() - BROUGHT)!r} if importlib.util.find_spec(name)]
assert not present, present
for module in pkgutil.walk_packages(flyte_ddp.__path__, "flyte_ddp."):
    if not re.search("__main__$|[.](integrations|flyte2)[.]", module.name):  # which import their framework
        importlib.import_module(module.name)

from flyte_ddp import Regression
from flyte_ddp.observers.reports.drawing import Panel
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.text.corpus import Corpus
from flyte_ddp.studies.search import Search, build_trials
from pathlib import Path

here = Path({str(tmp_path)!r})
(here / "text.parquet").write_bytes(b"PAR1")
for act in (
    lambda: get_recipe("digits", {{}}).prepare("", here),
    lambda: get_recipe("text", {{}}).prepare("", here),
    lambda: list(Corpus(str(here)).pieces()),
    lambda: Regression().metrics(),
    Search,
    lambda: build_trials("digits", {{}}, [{{}}]),
):
    try:
        act()
    except ValueError as error:
        print(error)
print(*Report().draw([Panel("a", "b", "c")]))
"""  # noqa: E501
    output = run([core], "-S", "-c", program, cwd=tmp_path)
    assert output.replace(str(tmp_path), "HERE").splitlines() == [
        (
            "data: scikit-learn carries the digits: expected the package sklearn: pip install "
            "'flyte-ddp[digits]'"
        ),
        "recipe text: expected the package tokenizers: pip install 'flyte-ddp[text]'",
        "data: HERE/text.parquet: expected the package pyarrow: pip install 'flyte-ddp[streams]'",
        (
            "the metrics of Regression: expected the package torchmetrics: pip install "
            "'flyte-ddp[metrics]'"
        ),
        "a sweep or a scaling study: expected the package pandas: pip install 'flyte-ddp[sweep]'",
        "a sweep or a scaling study: expected the package pandas: pip install 'flyte-ddp[sweep]'",
        "<p>plots: expected the package matplotlib: pip install &#39;flyte-ddp[reports]&#39;</p>",
    ]


def test_a_recipe_whose_package_is_missing_is_one_line_with_what_installs_it(core, tmp_path):
    for package, expected in (
        ("sklearn.datasets", "expected the package sklearn: pip install 'flyte-ddp[digits]'"),
        (
            "librosa",
            (
                "expected the package librosa: pip install it, in a project by a line in "
                "pyproject.toml"
            ),
        ),
    ):
        (tmp_path / "mine.py").write_text(f"import {package}\n")
        program = "from flyte_ddp.recipes import get_recipe\nget_recipe('mine.Mine', {})"
        output = run([core, tmp_path], "-S", "-c", program, cwd=tmp_path, status=1)
        place = f"{tmp_path / 'mine.py'}:1: "
        assert output.splitlines()[-1].endswith(
            f"recipe: 'mine.Mine' cannot be imported: {place}{expected}"
        )


@pytest.mark.slow
def test_a_project_without_extras_registers(installed, core, tmp_path):
    """Such as the one of an image with fewer packages than the settings and the inputs ask for."""
    project = tmp_path / "project"
    flyte_ddp(installed, "new", project, "--with", "sweep,retrain", cwd=tmp_path)
    settings = {
        "IMAGE": "registry.example.com/mine:7",
        "RETRAIN_INPUTS": '{"recipe": "digits"}',
        "TRACKING": "mlflow",
        "MLFLOW_TRACKING_URI": "http://localhost:9",
    }
    command = ("-S", "-m", "flytekit.clis.sdk_in_container.pyflyte", "register", "--dry-run")
    command += ("--image", settings["IMAGE"], "--version", "7", "--copy", "none", "workflows")
    output = run([core, project], *command, cwd=project, **settings)
    assert "Launch Plan: retrain" in output


@pytest.mark.long
def test_a_function_trains_with_the_core_dependencies_alone(core, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\n"
        "from flyte_ddp import session\n"
        "dist.init_process_group('gloo')\n"
        "session.report(step=1, loss=0.5)\n"
        "session.save({'step': 1}, 1)\n"
        "print('rank', dist.get_rank(), 'of', dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
    )
    command = [
        "-m",
        "flyte_ddp",
        "run",
        "--nproc-per-node",
        "2",
        "--report",
        "report.html",
        "train.py",
    ]
    output = run([core], "-S", *command, cwd=tmp_path)
    assert {"[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"} <= set(output.splitlines())
    page = (tmp_path / "report.html").read_text()
    assert "flyte-ddp[reports]" in page
    assert ">finished<" in page


@pytest.mark.long
def test_the_plugin_loads_nothing_that_it_does_not_use(core, tmp_path):
    program = """
import sys
import flyte_ddp.flytekit_plugin
print([name for name in ("torch", "distributed", "wandb", "kubernetes", "kr8s", "matplotlib") if name in sys.modules])
"""  # noqa: E501
    assert run([core], "-S", "-c", program, cwd=tmp_path) == "[]\n"


def test_the_extras_are_those_of_the_messages():
    extras = PROJECT["optional-dependencies"]
    distributions = {
        "huggingface_hub": "huggingface-hub",
        "mlflow": "mlflow-skinny",
        "opentelemetry": "opentelemetry-sdk",
        "sklearn": "scikit-learn",
    }
    assert set(EXTRAS.values()) < extras.keys()
    for package, extra in EXTRAS.items():
        assert distributions.get(package, package) in extras[extra]
    (everything,) = (Requirement(each) for each in extras["all"])
    assert everything.extras == extras.keys() - {"all", "dev", "bench"}
    page = (REPOSITORY / "docs/install.md").read_text()
    assert all(f"`{extra}`" in page for extra in extras.keys() - {"dev", "bench"})


def test_a_new_project_is_a_few_short_files(project, wheel):
    files = [file for file in project.rglob("*") if file.is_file()]
    assert [file.name for file in (project / "wheels").iterdir()] == [wheel.name]
    own = [file for file in files if file.suffix != ".whl" and file.name != "requirements.txt"]
    assert len(own) <= 14, own
    assert f"It has {len(own)} short files" in (REPOSITORY / "docs/install.md").read_text()
    assert sum(len(file.read_text().splitlines()) for file in own) <= 400
    for name in ("tasks/train.py", "workflows/multi_node.py"):
        assert (project / name).read_bytes() == (REPOSITORY / name).read_bytes()


def test_parts_are_added_at_once_or_later_and_touch_no_file_of_the_users(
    installed, wheel, tmp_path
):
    made = ("new", "one", "--with", "sweep,script", "--wheel", wheel)
    flyte_ddp(installed, *made, cwd=tmp_path)
    (tmp_path / "one/settings.toml").write_text("recipes = []\n")
    assert flyte_ddp(installed, "new", "one", "--with", "scaling,retrain", cwd=tmp_path) == (
        "added tasks/study.py\nadded workflows/scaling.py\nadded tasks/retrain.py\n"
        "added workflows/retrain.py\n"
    )
    assert (tmp_path / "one/settings.toml").read_text() == "recipes = []\n"
    (tmp_path / "one/tasks/generate.py").write_text("mine\n")
    assert flyte_ddp(installed, "new", "one", "--with", "text", cwd=tmp_path, status=2) == (
        "error: --with: expected no file of your own at tasks/generate.py, got one\n"
    )
    assert (tmp_path / "one/tasks/generate.py").read_text() == "mine\n"


@pytest.mark.parametrize("is_function", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_any_combination_of_parts_imports_what_the_project_has(
    tmp_path, monkeypatch, is_function, is_new
):
    """A part that is added later finds the modules of the new project."""
    all_files = projects.project_files()
    monkeypatch.setattr(projects, "project_files", lambda: dict(all_files))
    there = {}
    if not is_new:
        there = choose_files(tmp_path, (), is_function, flyte=1, is_new=True)
        for name, content in there.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    for number in range(len(PARTS) + 1):
        for parts in itertools.combinations(PARTS, number):
            files = choose_files(tmp_path, parts, is_function, flyte=1, is_new=is_new)
            modules = {name for name in {**there, **files} if name.endswith(".py")}
            for name in modules:
                tree = ast.parse({**there, **files}[name])
                for node in ast.walk(tree):
                    if isinstance(node, ast.ImportFrom) and node.module.startswith(
                        ("tasks", "workflows", "recipes")
                    ):
                        needed = node.module.replace(".", "/") + ".py"
                        assert needed in modules, (parts, name, node.module)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(), tuple(PARTS)], ids=["alone", "with all parts"])
@pytest.mark.parametrize("options", [(), ("--function",)], ids=["recipe", "function"])
def test_each_kind_of_project_trains_in_its_test_and_registers(
    installed, wheel, tmp_path, options, parts
):
    made = ("new", "it", *options, "--wheel", wheel)
    flyte_ddp(installed, *made, *(["--with", ",".join(parts)] if parts else []), cwd=tmp_path)
    project = tmp_path / "it"
    run([installed], "-m", "pytest", "-q", "tests", cwd=project)
    command = ("-m", "flytekit.clis.sdk_in_container.pyflyte", "register", "--dry-run")
    command += ("--image", "registry.example.com/mine:7", "--version", "7", "--copy", "none")
    output = run([installed, project], *command, "workflows", cwd=project)
    for part in parts:
        for file in (each for each in PARTS[part] if each.startswith("workflows/")):
            assert file.removesuffix(".py").replace("/", ".") in output


@pytest.mark.long
def test_a_project_trains_from_anywhere_and_bad_settings_fail_the_run_alone(
    project, installed, tmp_path
):
    copy = tmp_path / "project"
    shutil.copytree(project, copy)
    command = ("-m", "flytekit.clis.sdk_in_container.pyflyte", "run")
    command += (str(copy / "workflows/single_node.py"), "single_node_training_wf")
    command += ("--recipe", "recipes.wine.Wine", "--config", '{"epochs": 1}')
    output = run([installed], *command, cwd=tmp_path)
    assert "model state" in output
    settings = copy / "settings.toml"
    for text, expected in (
        ("gpu = 1\n" + settings.read_text(), "(did you mean gpus?), got 'gpu'"),
        ("recipes = [", "settings.toml: expected TOML, got "),
        ("", "settings.toml: expected one with `recipes` in the project's directory"),
    ):
        settings.write_text(text)
        output = run([installed], *command, cwd=tmp_path, status=2)
        assert expected in " ".join(re.sub(r"[│╭╰─╮╯]", " ", output).split())
        assert "Traceback" not in output
        run([installed, copy], "-c", "import workflows.single_node", cwd=tmp_path)


def test_a_project_of_another_kind_has_none_of_its_settings_read(installed, tmp_path):
    """Its author's pods are its own code: without a settings.toml of ours, only what a launch
    chooses is limited.
    """
    (tmp_path / "tasks").mkdir()
    (tmp_path / "settings.toml").write_text("[default]\nrecipes = 3\n")
    program = """
from flyte_ddp.project.admission import load_allowed
from flyte_ddp.code.source_code import find_project, recipe_packages
print(find_project(), recipe_packages(), load_allowed().images)
"""
    assert run([installed, tmp_path], "-c", program, cwd=tmp_path) == "None [] ('*',)\n"


def test_the_commands_of_a_project_are_those_of_its_readme(project):
    def make(*arguments):
        done = subprocess.run(
            ["make", *arguments], cwd=project, capture_output=True, text=True, check=True
        )
        return done.stdout

    for command in ("setup", "train", "test", "image", "register"):
        assert f"make {command} " in make("help")
    assert "--require-hashes -r requirements.txt" in make("-n", "setup")
    assert "podman build --build-arg IMAGE=$image -t $image ." in make(
        "-n", "image", "BUILDER=podman build"
    )


@pytest.mark.parametrize("is_installed", [True, False])
def test_deploy_prints_what_a_namespace_needs(installed, tmp_path, is_installed):
    options = ("deploy", "--namespace", "team", "--image", "host:5000/mine:7@sha256:00")
    path, command = ([installed], str(installed / "bin/flyte-ddp"))
    if not is_installed:
        path, command = ([REPOSITORY], "-mflyte_ddp")
    output = run(path, command, *options, cwd=tmp_path)
    found = {
        (each["kind"], each["metadata"].get("namespace")) for each in yaml.safe_load_all(output)
    }
    assert {("NetworkPolicy", "team"), ("PodTemplate", "team"), ("ServiceAccount", "team")} <= found
    assert not [kind for kind, _ in found if kind == "Namespace"]
    assert "host:5000/mine'" in output
    assert "NAMESPACE" not in output


@pytest.mark.slow
def test_an_empty_environment_becomes_a_project_that_trains_and_passes_its_test(wheel, tmp_path):
    """By the commands of docs/install.md and of the project's README alone."""
    environment = {**own_environment(), "WANDB_MODE": "disabled"}

    def call(*command, cwd=tmp_path):
        done = subprocess.run(
            [*map(str, command)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    call(install_wheel(tmp_path, wheel) / "flyte-ddp", "new", "my-project", "--wheel", wheel)
    project = tmp_path / "my-project"
    make = ("make", f"PYTHON={sys.executable}")
    packages = project / "pyproject.toml"
    packages.write_text(
        packages.read_text().replace("dependencies = []", 'dependencies = ["humanize"]')
    )
    (project / "recipes/wine.py").write_text(
        "import humanize\n" + (project / "recipes/wine.py").read_text()
    )
    trained = call(*make, "train", 'CONFIG={"epochs": 2}', cwd=project)
    assert "wine, 2 ranks" in trained.lower()
    assert "model state" in trained
    assert "1 passed" in call(*make, "test", cwd=project)
    dry_run = ("register", "DRY_RUN=1", "SANDBOX=1", "IMAGE=registry.example.com/my-project:1")
    assert "single_node_training_wf" in call(*make, *dry_run, cwd=project)


def test_a_wrong_call_is_one_line_and_changes_nothing(installed, wheel, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    for arguments, expected in (
        (
            ["new", "full"],
            "error: new: expected a directory that is empty or not there, or a project and --with, "
            "got 'full'\n",
        ),
        (
            ["new", "other", "--with", "sweeps"],
            "error: --with: expected some of names, predict, retrain, scaling, script, sweep, "
            "text, got 'sweeps' (did you mean sweep?)\n",
        ),
        (
            ["new", "other", "--wheel", "away.whl"],
            f"error: --wheel: expected the file of flyte-ddp {PROJECT['version']}, which the "
            "project's image installs, got 'away.whl'; "
            f"pip download --no-deps flyte-ddp=={PROJECT['version']} fetches it\n",
        ),
    ):
        assert flyte_ddp(installed, *arguments, cwd=tmp_path, status=2) == expected
    (tmp_path / "file").touch()
    (tmp_path / "two/workflows").mkdir(parents=True)
    (tmp_path / "two/settings.toml").touch()
    (tmp_path / "two/workflows/flyte2.py").touch()
    new_alone = "expected a new project, got 'two', which is there"
    for arguments, expected in (
        (["new", "other", "--flyte", "3"], "--flyte: expected 1 or 2, got 3"),
        (["new", "file"], "new: expected a directory, got 'file': Not a directory"),
        (["new", "file/other"], "new: expected a directory, got 'file/other': Not a directory"),
        (["new", "two", "--with", "sweep"], "--flyte 2: expected no --with and no --function"),
        (["new", "full", "--with", "sweep"], "new: expected a directory that is empty or not"),
    ):
        assert flyte_ddp(installed, *arguments, cwd=tmp_path, status=2).startswith(
            f"error: {expected}"
        )
    (tmp_path / "two/workflows/flyte2.py").unlink()
    for option in (["--function"], ["--wheel", wheel]):
        output = flyte_ddp(
            installed, "new", "two", "--with", "sweep", *option, cwd=tmp_path, status=2
        )
        assert output == f"error: {option[0]}: {new_alone}\n"
    assert sorted(file.name for file in tmp_path.rglob("*")) == sorted(
        ["full", "notes.txt", "file", "two", "settings.toml", "workflows"]
    )
    away = ("-m", "flyte_ddp", "new", "other", "--wheel", "away.whl")
    output = run([REPOSITORY], *away, cwd=tmp_path, status=2)
    assert output.endswith("got 'away.whl'; make wheel builds it\n")


def test_a_project_is_made_in_an_empty_clone_and_its_path_is_quoted(installed, wheel, tmp_path):
    clone = tmp_path / "a clone; of it"
    subprocess.run(["git", "init", "--quiet", str(clone)], check=True)
    output = flyte_ddp(installed, "new", clone, "--wheel", wheel, cwd=tmp_path)
    assert output.splitlines()[-1] == f"try: cd '{clone}' && make train"
    assert (clone / "settings.toml").is_file()


def test_what_a_part_only_imports_may_be_of_the_user(installed, wheel, tmp_path):
    flyte_ddp(installed, "new", "it", "--wheel", wheel, cwd=tmp_path)
    (tmp_path / "it/tasks/train.py").write_text("mine\n")
    output = flyte_ddp(installed, "new", "it", "--with", "sweep", cwd=tmp_path)
    assert output == "added tasks/study.py\nadded workflows/sweep.py\n"
    assert (tmp_path / "it/tasks/train.py").read_text() == "mine\n"


def test_a_checkout_makes_the_project_that_its_wheel_makes(project, wheel, tmp_path):
    command = ("-m", "flyte_ddp", "new", "my-project", "--wheel", str(wheel))
    run([REPOSITORY], *command, cwd=tmp_path)

    def files_of(top):
        found = [file for file in top.rglob("*") if file.is_file()]
        return {file.relative_to(top): file.read_bytes() for file in found}

    assert files_of(tmp_path / "my-project") == files_of(project)
