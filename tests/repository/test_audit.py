"""The pinned packages: complete, with hashes, in the right file; `make audit` passes only if it
could ask about all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[2]
UNKNOWN = "zipp  Dependency not found on PyPI and could not be audited: zipp (4.1.2)"


def make(directory, target, *variables, **programs):
    """Run make in a copy of what it reads, with stand-ins for programs in `directory`."""
    for name, script in programs.items():
        (directory / name.replace("_", "-")).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name.replace("_", "-")).chmod(0o755)
    for file in (*REPOSITORY.glob("*.mk"), *REPOSITORY.glob("requirements*.txt")):
        (directory / file.name).write_text(file.read_text())
    for name in ("Makefile", "pyproject.toml"):
        (directory / name).write_text((REPOSITORY / name).read_text())
    return subprocess.run(
        ["make", target, "IMAGE=x:1", *variables],
        cwd=directory,
        env={"PATH": f"{directory}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("output", "status", "passes", "shown"),
    [
        ("No known vulnerabilities found", 0, True, ""),
        (f"No known vulnerabilities found\n{UNKNOWN}", 0, False, "pip-audit: 1 of "),
        (
            f"Found 1 known vulnerability in 1 package\njinja2 1.0 CVE-2\n{UNKNOWN}",
            1,
            False,
            "jinja2 1.0 CVE-2",
        ),
        ("requests.exceptions.ConnectionError: no network", 1, False, "no network"),
    ],
)
def test_an_audit_that_could_not_ask_fails_like_one_that_found_something(
    tmp_path, output, status, passes, shown
):
    (tmp_path / "tested").touch()
    variables = (f"BIN={tmp_path}", "INSTALLED=", f"TESTED={tmp_path / 'tested'}", "UV=/bin/true")
    script = f"cat <<END\n{output}\nEND\nexit {status}"
    done = make(tmp_path, "audit", *variables, pip_audit=script)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert shown in done.stdout


def pins(name):
    """Return {name==version: its hashes} of a file of pins."""
    text = re.sub(r" \\\n\s+", " ", (REPOSITORY / name).read_text())
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    found = {}
    for line in filter(None, lines):
        match = re.fullmatch(
            (
                r"([\w.-]+==[^ ]+)(?: ; [^-]+?)?((?: "
                r"--hash=sha256:[0-9a-f]{64})+)"
            ),
            line,
        )
        assert match, f"{name}: {line[:200]}"
        found[match[1]] = match[2].split()
    return found


def names(requirements):
    return {re.split(r"[=\[]", each)[0] for each in requirements}


def test_every_pin_has_its_hashes_and_the_image_gets_no_tool_of_development():
    runtime, development = pins("requirements.txt"), pins("requirements-dev.txt")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {Requirement(each).name for each in project["dependencies"]} <= names(runtime)
    extras = {
        Requirement(each).name
        for extra in project["optional-dependencies"].values()
        for each in extra
    }
    assert extras <= names(runtime) | names(development) | {project["name"]}
    assert not names(runtime) & {"pytest", "mypy", "ruff", "moto", "lightning", "pip-audit"}
    # for other platforms only in the one: the same versions
    for name in names(runtime) & names(development):
        assert {each for each in development if names([each]) == {name}} <= runtime.keys(), name


def test_the_image_installs_nothing_without_a_hash():
    text = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install [^\n;&]*", text)
    assert len(installs) == 3
    assert all("--require-hashes" in each for each in installs)
    assert set(re.findall(r"-r /pins/([^\s;]+)", text)) == {
        "uv.txt",
        "requirements.txt",
        "gpu.txt",
    }
    project = (REPOSITORY / "examples/project/Dockerfile").read_text().replace("\\\n", " ")
    shared = project.partition("COPY pyproject.toml")[0].partition("AS base\n")[2]
    assert shared in re.sub(r"\n+(#.*\n)+|\n+", "\n", text)  # The two images share these layers.
    (select,) = re.findall(r"awk '(.*?)' requirements.txt", text)
    gpu = subprocess.run(
        ["awk", select, str(REPOSITORY / "requirements.txt")],
        capture_output=True,
        text=True,
        check=True,
    )
    chosen = names(re.findall(r"^[a-z0-9][^ ]*", gpu.stdout, re.MULTILINE))
    assert {"torch", "torchvision", "triton", "nvidia-nccl-cu13"} <= chosen
    assert "flytekit" not in chosen
    assert gpu.stdout.count("--hash") > len(chosen)


@pytest.mark.parametrize(
    ("machine", "passes"),
    [("Linux aarch64", True), ("Darwin arm64", True), ("Darwin x86_64", False)],
)
def test_setup_is_refused_in_a_line_where_torch_has_no_wheels(tmp_path, machine, passes):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/lib/python3.11/site-packages").mkdir(parents=True)
    done = make(tmp_path, "setup", uname=f"echo {machine}", uv="exit 0")
    assert (done.returncode == 0) == passes == (tmp_path / ".venv/.installed").exists(), (
        done.stdout + done.stderr
    )
    assert passes or (
        "setup: expected Linux, or macOS on Apple silicon, which torch has wheels "
        f"for, got {machine}"
    ) in (done.stderr)
