"""The workflow that generates names, as its users call it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from flytekit.types.file import FlyteFile

from flyte_ddp.flyte.inputs import InputError
from tests.recipes.test_generate import new_model
from tests.support.commands import run_command
from tests.support.foreign_states import FOREIGN, given_state
from workflows.pet_names import generate_names_wf

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def state_file(tmp_path_factory):
    """The state of a model that has learnt no more than that names are short."""
    file = tmp_path_factory.mktemp("names") / "model_state.pt"
    torch.save(new_model().state_dict(), file)
    return file


def generated(state_file, **inputs):
    return generate_names_wf(model_state=FlyteFile(str(state_file)), **inputs)


def names_of_pyflyte_run(*arguments):
    """Return the list that `pyflyte run` prints last."""
    command = ["pyflyte", "run", "workflows/pet_names.py", *arguments]
    code, output, errors = run_command(*command, cwd=REPOSITORY, WANDB_MODE="disabled")
    assert code == 0, output + errors
    return ast.literal_eval(re.findall(r"\[[^\]]*\]", output.replace("\n", " "))[-1])


def test_names_of_the_users_list_are_not_repeated(state_file, tmp_path):
    taken = generated(state_file, count=40, seed=7)
    own = tmp_path / "own.txt"
    own.write_text("\n".join(taken))
    again = generated(state_file, count=40, seed=7, data=FlyteFile(str(own)))
    # A tenth of the list is held out, as in training: those may come up again.
    assert len(set(taken) & set(again)) <= 4
    assert generated(state_file, count=40, seed=8) != taken


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"count": 0}, "count: expected a whole number of at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: expected a finite number above 0, got -1.0"),
        ({"prefix": "Zoë"}, "prefix: expected letters from a to z"),
        ({"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        (
            {"max_length": 31},
            "max_length: expected a whole number of at least 1 and of at most 30, got 31",
        ),
        ({"count": 5, "prefix": "b", "max_length": 1}, "prefix: expected fewer characters"),
        ({"count": 100, "max_length": 1}, "count: expected 100 new names, got "),
        ({"data": FlyteFile(__file__)}, "usable names"),
    ],
)
def test_bad_input_is_refused_in_one_line(state_file, inputs, expected):
    with pytest.raises(InputError) as caught:
        generated(state_file, **inputs)
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("contents", [b"junk", b"", {"conv1.weight": torch.zeros(3)}])
def test_a_file_that_is_no_names_model_is_refused_in_one_line(contents, tmp_path):
    file = tmp_path / "model_state.pt"
    file.write_bytes(contents) if isinstance(contents, bytes) else torch.save(contents, file)
    with pytest.raises(
        InputError,
        match="^model_state: expected .* of recipe pet_names, got .+",
    ):
        generated(file)


@pytest.mark.parametrize("form", ["script", "pickle"])
def test_a_state_that_another_program_has_saved_generates_the_same_names(
    form, state_file, tmp_path
):
    given = tmp_path / "given.pt"
    given.write_bytes(FOREIGN[form](torch.load(state_file)))
    assert generated(given, count=3) == generated(state_file, count=3)


def test_several_states_in_one_file_are_refused_in_one_line(state_file, tmp_path):
    state = torch.load(state_file)
    given = tmp_path / "given.pt"
    given.write_bytes(given_state({"model": state, "ema": state}))
    with pytest.raises(InputError, match=r"^model_state: expected one state dict, got several"):
        generated(given)


def test_one_pyflyte_run_generates_names(state_file):
    names = names_of_pyflyte_run(
        "generate_names_wf", "--model_state", state_file, "--count", "5", "--seed", "7"
    )
    assert names == generated(state_file, count=5, seed=7)


@pytest.mark.slow
def test_one_pyflyte_run_trains_and_generates(tmp_path):
    flags = ["--config", '{"epochs": 1}', "--count", "7", "--prefix", "Mo", "--output", tmp_path]
    names = names_of_pyflyte_run("train_and_generate_names_wf", *flags)
    assert len(names) == 7
    assert all(name.startswith("Mo") for name in names)
