"""`make audit` passes only if pip-audit could ask about every pin and found nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
UNKNOWN = "zipp  Dependency not found on PyPI and could not be audited: zipp (4.1.2)"


@pytest.mark.parametrize(
    ("output", "status", "passes", "shown"),
    [
        ("No known vulnerabilities found", 0, True, ""),
        (f"No known vulnerabilities found\n{UNKNOWN}", 0, False, "pip-audit: 1 of "),
        (f"Found 1 known vulnerability in 1 package\njinja2 1.0 CVE-2\n{UNKNOWN}", 1, False, "jinja2 1.0 CVE-2"),
        ("requests.exceptions.ConnectionError: no network", 1, False, "no network"),
    ],
)
def test_an_audit_that_could_not_ask_fails_like_one_that_found_something(tmp_path, output, status, passes, shown):
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\ncat <<END\n{output}\nEND\nexit {status}\n")
    program.chmod(0o755)
    (tmp_path / "installed").touch()
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text((REPOSITORY / name).read_text())
    command = ["make", "audit", f"BIN={tmp_path}", f"INSTALLED={tmp_path / 'installed'}", "UV=/bin/true", "IMAGE=x:1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert shown in done.stdout
