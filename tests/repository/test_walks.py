"""The walks in docs/architecture.md lead through functions that exist and call each other."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
STEP = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
ARROW = re.compile(r"`([\w/]+\.py): ([\w.]+)`\s+→(?=\s+`([\w/]+\.py): ([\w.]+)`)")
# the most files of each walk whose length is limited
MAX_FILES = {
    "A hyperparameter, from the command line to its use": 8,
    "A metric, from a rank to the page": 11,
    "A killed rank, and the restart": 15,
    "Predictions of new data": 8,
}
# the most files of other walks, whose text does not say how many they are, and functions of two
MORE_FILES = {
    "A killed rank's state, out and in again": 10,
    "SIGTERM on a worker, as a preemption sends it": 12,
}
MAX_FUNCTIONS = {"A schedule, to a promotion": 24, "`session.save` of a function": 11}
MAX_HOPS = 6  # between processes, of SIGTERM


def read_walks():
    page = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    text = page.partition("\n## Walks\n")[2].partition("\n## ")[0]
    walks = re.split(r"\n### (.+)\n", text)
    return dict(zip(walks[1::2], walks[2::2], strict=True))


WALKS = read_walks()


@functools.cache
def definitions(file):
    """Return (name, node) of each function and class of a file; methods also with their class."""
    found = []
    tree = ast.parse((REPOSITORY / "flyte_ddp" / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.append((node.name, node))
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, FUNCTIONS))
            found += [(f"{node.name}.{each.name}", each) for each in methods]
    return found


def names_in(node):
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


@pytest.mark.parametrize("walk", WALKS)
def test_each_function_of_a_walk_exists(walk):
    steps = STEP.findall(WALKS[walk])
    assert steps
    assert not [(file, name) for file, name in steps if name not in dict(definitions(file))]


@pytest.mark.parametrize("walk", WALKS)
def test_each_arrow_of_a_walk_is_a_call(walk):
    wrong = []
    for file, name, _, callee in ARROW.findall(WALKS[walk]):
        callers = [node for other, node in definitions(file) if other == name]
        called = {each for node in callers for each in names_in(node)}
        if callee.rpartition(".")[2] not in called:
            wrong.append(f"{file}: {name} does not name {callee}")
    assert not wrong


@pytest.mark.parametrize("walk", MAX_FILES)
def test_a_walk_has_few_files_as_many_as_its_text_says(walk):
    files = {file for file, _ in STEP.findall(WALKS[walk])}
    assert len(files) <= MAX_FILES[walk]
    assert int(re.search(r"(\d+) files", WALKS[walk])[1]) == len(files), sorted(files)


def test_the_other_walks_stay_short():
    for walk, most in MORE_FILES.items():
        assert len(dict(STEP.findall(WALKS[walk]))) <= most, walk
    for walk, most in MAX_FUNCTIONS.items():
        assert len(STEP.findall(WALKS[walk])) <= most, walk
    sigterm = WALKS["SIGTERM on a worker, as a preemption sends it"]
    assert len(re.findall(r"^\d+\. ", sigterm, re.MULTILINE)) <= MAX_HOPS
