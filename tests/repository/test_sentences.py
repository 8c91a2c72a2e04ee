"""The check of comments and comprehensions in `make lint`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / ".ci/sentences.py"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step = 1  # of the last save", "# of the last save"),
        ("names = {}  # by rank", "# by rank"),
        ("x = [[y for y in z] for z in w]", "a comprehension within a comprehension"),
        ("step = 1  # step of the last save", ""),
        ("# of a paragraph that goes on from the line before", ""),
        ("text = '# of a string'", ""),
        ("x = [y for y in z]  # names of the ranks", ""),
    ],
)
def test_a_comment_stands_alone_and_a_comprehension_contains_no_other(tmp_path, line, expected):
    (tmp_path / "module.py").write_text(f"{line}\n")
    command = [sys.executable, str(CHECK), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == bool(expected), done.stderr
    assert "ternaries per 1,000 statements: 0.0" in done.stdout
    assert ("module.py:1: " in done.stdout) == bool(expected)
    assert expected in done.stdout
