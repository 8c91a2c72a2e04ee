"""The code, the image and the version of a registration: flytekit's own commands, without a
Flyte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SHIPPED = ("flyte_ddp", "tasks", "workflows", "recipes", "settings.toml")
BESIDE = (
    "pyproject.toml",
    "requirements.txt",
    ".dockerignore",
)  # files to build the image with; flytekit adds the last one
RUN = [
    "run",
    "--remote",
    "--copy",
    "all",
    "workflows/single_node.py",
    "single_node_training_wf",
    "--recipe",
    "recipes.wine.Wine",
]

# Runs each of flytekit's commands in a process of its own, forked after the slow imports. What
# would reach a Flyte, the upload and the registration, is written down instead.
PROGRAM = """
import json, os, shutil, sys
from flytekit.clis.sdk_in_container.pyflyte import main
from flytekit.remote import FlyteRemote
from flytekit.tools.script_mode import hash_file

def upload(self, file, *_, **__):
    shutil.copy(file, record["archive"])
    return hash_file(file)[0], "s3://code/" + file.name

def register(self, entity, settings, version, *_, **__):
    images = settings.image_config
    record.update(version=version, image=images.default_image.full)
    raise SystemExit(0)

FlyteRemote.upload_file = upload
FlyteRemote.raw_register = register
FlyteRemote.register_workflow = register
cases, directory = json.loads(sys.argv[1]), sys.argv[2]
for name, (arguments, environment) in cases.items():
    if os.fork():
        os.wait()
        continue
    os.environ.update(environment)
    arguments = [argument.replace("DIRECTORY", directory) for argument in arguments]
    record = {"archive": f"{directory}/{name}.tar.gz"}
    sys.argv = ["pyflyte", *arguments]
    sys.stderr = sys.stdout = open(f"{directory}/{name}.log", "w")
    try:
        main(arguments, prog_name="pyflyte")
    except BaseException as error:
        record["ended"] = str(error)
    finally:
        json.dump(record, open(f"{directory}/{name}.json", "w"))
        sys.stdout.flush()
        os._exit(0)
"""

IMAGE = "registry.example.com/flyte-ddp:7"
SANDBOX = {"SANDBOX": "1", "IMAGE": IMAGE}
CASES = {
    "run": (RUN, SANDBOX),
    "register": (["register", "--copy", "all", "workflows"], SANDBOX),
    "gpus": (RUN, {"GPUS": "4", "IMAGE": IMAGE}),
    "wandb": (RUN, {**SANDBOX, "WANDB_MODE": "disabled"}),
    "image": (RUN, {**SANDBOX, "IMAGE": f"{IMAGE}8"}),
    "register_gpus": (["register", "--copy", "all", "workflows"], {"GPUS": "4", "IMAGE": IMAGE}),
    "bad": (RUN, {"SANDBOX": "perhaps"}),
    "register_bad": (["register", "--copy", "all", "workflows"], {"GPUS": "many"}),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The repository with a user's own recipes: one file, and a package of two files. One of the
    two imports the other.
    """
    root = tmp_path_factory.mktemp("checkout") / "flyte-ddp"
    root.mkdir()
    for name in (*SHIPPED, *BESIDE):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(
                REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(REPOSITORY / name, root)
    shutil.copy(REPOSITORY / "examples/recipes/wine.py", root / "recipes")
    package = root / "vineyard"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text("HIDDEN = 32\n")
    (package / "recipe.py").write_text(
        "from recipes.wine import Wine\nfrom vineyard.net import HIDDEN\n\n\nclass "
        "Red(Wine):\n   "
        " hidden = HIDDEN\n"
    )
    settings = root / "settings.toml"
    settings.write_text(
        settings.read_text().replace('recipes = ["recipes"]', 'recipes = ["recipes", "vineyard"]')
    )
    with open(root / ".dockerignore", "a") as file:
        file.write("!vineyard\n")
    (root / "keys.csv").write_text("a secret that lies here")
    (root / "tests").mkdir()
    (root / "tests" / "test_it.py").touch()
    return root


def run_cases(cases, checkout, directory):
    ours = ("SANDBOX", "GPUS", "GPU_TYPE", "NOTIFY_EMAILS", "RETRAIN_INPUTS", "IMAGE", "PYTHONPATH")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("WANDB_")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases), directory],
        cwd=checkout,
        env={**environment, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    records = {}
    for name in cases:
        records[name] = json.loads((directory / f"{name}.json").read_text())
        records[name]["log"] = " ".join(
            re.sub(r"[│╭╰─╮╯\n]", " ", (directory / f"{name}.log").read_text()).split()
        )
    return records


@pytest.fixture(scope="module")
def registered(checkout, tmp_path_factory):
    directory = tmp_path_factory.mktemp("registered")
    return run_cases(CASES, checkout, directory)


def files_in(archive):
    with tarfile.open(archive) as tar:
        return {member.name for member in tar if member.isfile()}


def expected_files(checkout):
    names = (*SHIPPED, *BESIDE, "vineyard")
    found = {
        file.relative_to(checkout)
        for name in names
        for file in [checkout / name, *(checkout / name).rglob("*")]
    }
    return {
        file.as_posix()
        for file in found
        if (checkout / file).is_file() and "__pycache__" not in file.parts
    }


@pytest.mark.long
@pytest.mark.parametrize("way", ["run", "register"])
def test_a_registration_ships_all_of_the_code_and_the_users_recipes(registered, checkout, way):
    record = registered[way]
    assert "version" in record, record
    shipped = files_in(record["archive"])
    assert shipped == expected_files(checkout)
    assert {
        "vineyard/net.py",
        "recipes/wine.py",
        "flyte_ddp/training/main.py",
        "flyte_ddp/recipes/pet_names/names.txt",
    } <= shipped


def test_the_image_has_the_same_code():
    """The image copies what .dockerignore lets through, which is what `--copy all` ships."""
    assert "\nCOPY . /opt/flyte-ddp/\n" in (REPOSITORY / "Dockerfile").read_text()


@pytest.mark.long
def test_workers_and_ranks_get_the_recipe_and_every_package_of_recipes(checkout, tmp_path):
    program = (
        "import sys; from flyte_ddp.config import TrainingConfig; "
        "from flyte_ddp.launch.recipe_program import recipe_program; "
        "from flyte_ddp.launch.nodes.dask.data import packed_code as p; "
        "sys.stdout.buffer.write(p(recipe_program(sys.argv[1], TrainingConfig())))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    packed = subprocess.run(
        [sys.executable, "-c", program, "recipes.wine.Wine"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        check=True,
    ).stdout
    with zipfile.ZipFile(BytesIO(packed)) as archive:
        archive.extractall(tmp_path)
    found = {
        file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()
    }
    ours = ("flyte_ddp/", "recipes/", "vineyard/")
    assert found == {name for name in expected_files(checkout) if name.startswith(ours)}


@pytest.mark.long
def test_the_same_code_with_other_settings_is_another_version(registered):
    versions = {registered[name]["version"] for name in ("run", "gpus", "wandb", "image")}
    assert len(versions) == 4
    assert registered["register"]["version"] != registered["register_gpus"]["version"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("bad", "SANDBOX: expected 0, 1, false or true, got 'perhaps'"),
        ("register_bad", "GPUS: expected a whole number of at least 0, got 'many'"),
    ],
)
def test_bad_settings_end_a_registration_in_one_line(registered, way, expected):
    record = registered[way]
    assert "version" not in record
    assert expected in record["log"]
    assert "Traceback" not in record["log"]


def test_a_change_of_what_a_recipe_imports_is_another_version_of_the_data(tmp_path, monkeypatch):
    """So it is for the cache of a training and for "unchanged": both compare what the prepared data
    note.
    """
    from flyte_ddp.recipes import get_recipe
    from flyte_ddp.recipes.prepare import describe_data, prepare_data, recipe_version

    package = tmp_path / "orchard"
    (package / "nets").mkdir(parents=True)
    for file in ("__init__.py", "nets/__init__.py", "neighbour.py", "nets/neighbour.py"):
        (package / file).touch()
    (package / "nets" / "wide.py").write_text("from . import sizes\n")
    (package / "nets" / "sizes.py").write_text("WIDTH = 3\n")
    (package / "words.txt").write_text("apple")
    (package / "recipe.py").write_text(
        "from tests.support.recipes import Tiny\n\n\nclass Apples(Tiny):\n"
        "    def prepare(self, source, directory):\n"
        "        from orchard.nets.wide import sizes\n\n        return 'apples'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    versions = []
    for number, changed in enumerate(["", "neighbour.py", "nets/neighbour.py"]):
        if changed:
            (package / changed).write_text("raise SystemExit\n")
        (tmp_path / str(number)).mkdir()
        prepare_data(get_recipe("orchard.recipe.Apples"), "", tmp_path / str(number))
        versions.append(describe_data(tmp_path / str(number))["recipe_version"])
    assert len(set(versions)) == 1
    for changed in (
        "recipe.py",
        "__init__.py",
        "nets/__init__.py",
        "nets/wide.py",
        "nets/sizes.py",
        "words.txt",
    ):
        with open(package / changed, "a") as file:
            file.write("\n# changed\n")
        versions.append(recipe_version("orchard.recipe"))
    assert len(set(versions)) == 7
