"""What the README shows is run, so that it stays true."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.runs import new_run

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_recipe_shown_in_the_readme_trains(tmp_path, monkeypatch):
    (source,) = re.findall(r"```python\n# (?:flowers\.py)\n(.+?)```", README, re.S)
    (tmp_path / "flowers.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    run = new_run(tmp_path, "flowers.Flowers").train(num_processes=2)
    assert run.result.epochs[-1].accuracy > 0.85


def test_every_file_that_the_readme_links_to_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parents[1] / link).exists(), link


def test_every_make_target_of_the_readme_is_in_the_makefile():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
