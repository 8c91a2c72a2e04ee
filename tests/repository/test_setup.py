"""What `make setup` puts into `.venv` beside the pinned packages: the library of the checkout, and
its command, from any directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.repository.test_audit import make

REPOSITORY = Path(__file__).parents[2]
# A checkout takes a wheel of any version.
WHEEL = "flyte_ddp-7.1-py3-none-any.whl"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout after `make setup`. A stand-in for uv makes an environment with the packages of
    this one.
    """
    directory = tmp_path_factory.mktemp("checkouts") / "checkout"
    directory.mkdir()
    for name in ("flyte_ddp", "recipes", "examples", "deploy", "tasks", "workflows"):
        shutil.copytree(
            REPOSITORY / name, directory / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(REPOSITORY / "settings.toml", directory)
    (directory / "recipes/own.py").write_text("here = 'the checkout'\n")
    venv.create(directory / ".venv", symlinks=True)
    (packages,) = (directory / ".venv/lib").glob("python3*/site-packages")
    installed = [entry for entry in sys.path if entry.endswith("site-packages")]
    (packages / "installed.pth").write_text("\n".join(installed))
    done = make(directory, "setup", uv="exit 0")
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def elsewhere(tmp_path):
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    return directory


def call(*command, cwd, status=0):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


WHERE = "import os, flyte_ddp; print(os.path.realpath(flyte_ddp.__path__[0]))"


def test_the_library_of_the_checkout_is_imported_from_any_directory(checkout, elsewhere):
    python = checkout / ".venv/bin/python"
    (elsewhere / "script.py").write_text(WHERE)
    expected = f"{checkout / 'flyte_ddp'}\n"
    assert call(python, "-c", WHERE, cwd=elsewhere) == expected
    assert call(python, elsewhere / "script.py", cwd=checkout) == expected


def test_the_command_runs_from_any_directory_and_through_a_link(checkout, elsewhere):
    (elsewhere / "link").symlink_to(checkout / ".venv/bin/flyte-ddp")
    expected = call(checkout / ".venv/bin/flyte-ddp", "--help", cwd=checkout)
    assert "train a recipe" in expected
    assert call(checkout / ".venv/bin/flyte-ddp", "--help", cwd=elsewhere) == expected
    assert call(elsewhere / "link", "--help", cwd="/") == expected
    (elsewhere / WHEEL).touch()
    made = call(
        *(checkout / ".venv/bin/flyte-ddp", "new", "project", "--wheel", WHEEL), cwd=elsewhere
    )
    assert "flyte-ddp 7.1" in made


def test_the_recipes_of_the_checkout_take_no_others_place(checkout, elsewhere):
    python = checkout / ".venv/bin/python"
    program = "from recipes import own; print(own.here)"
    assert call(python, "-c", program, cwd=checkout) == "the checkout\n"
    # The folder has no __init__, so any other package has precedence.
    (elsewhere / "recipes").mkdir()
    (elsewhere / "recipes/own.py").write_text("here = 'the user'\n")
    assert call(python, "-c", program, cwd=elsewhere) == "the user\n"
    program = "from flyte_ddp.code.source_code import find_project; print(find_project())"
    assert call(python, "-c", program, cwd=elsewhere) == "None\n"


def test_another_checkout_before_the_environments_and_an_installed_wheel_win(checkout, elsewhere):
    python = checkout / ".venv/bin/python"
    (elsewhere / "flyte_ddp").mkdir()
    (elsewhere / "flyte_ddp/__init__.py").touch()
    expected = f"{elsewhere / 'flyte_ddp'}\n"
    assert call(python, "-c", WHERE, cwd=elsewhere) == expected
    assert call("env", f"PYTHONPATH={elsewhere}", python, "-c", WHERE, cwd="/") == expected
    (packages,) = (checkout / ".venv/lib").glob("python3*/site-packages")
    (packages / "flyte_ddp").symlink_to(elsewhere / "flyte_ddp")
    try:
        assert call(python, "-c", WHERE, cwd="/") == expected
    finally:
        (packages / "flyte_ddp").unlink()


def test_a_moved_checkout_has_its_own_library(checkout, elsewhere):
    copy = elsewhere / "moved"
    shutil.copytree(checkout, copy, symlinks=True)
    found = call(copy / ".venv/bin/python", "-c", WHERE, cwd="/")
    assert found == f"{copy / 'flyte_ddp'}\n"


@pytest.mark.long
def test_ranks_train_a_recipe_of_a_directory_without_a_checkout(checkout, elsewhere):
    (elsewhere / "recipes").mkdir()
    text = (REPOSITORY / "examples/recipes/wine.py").read_text()
    (elsewhere / "recipes/wine.py").write_text(text)
    program = checkout / ".venv/bin/flyte-ddp"
    call(program, "train", "recipes.wine.Wine", "--epochs", "1", cwd=elsewhere)
    assert (elsewhere / "runs/Wine/model_state.pt").exists()
