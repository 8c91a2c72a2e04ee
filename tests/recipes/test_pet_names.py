"""Recipe pet_names: its letters, its split, and the files that it reads."""

from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest
import torch

from flyte_ddp.errors import DataError
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.pet_names import ALPHABET, BLANK
from flyte_ddp.recipes.pet_names.recipe import IGNORED, TRAINING_NAMES, whole_names
from flyte_ddp.recipes.prepare import describe_data, prepare_data

NAMES = [
    f"{first}{rest}" for first in "abcdef" for rest in ("da", "lly", "-o", ". rex", "u bo", "nnie")
]


def prepared(directory, source=""):
    directory.mkdir(exist_ok=True)
    prepare_data(get_recipe("pet_names"), str(source), directory)
    return describe_data(directory)["description"]


def spelled(row):
    return "".join(ALPHABET[letter] for letter in row if letter != IGNORED)


def written(directory, name, contents):
    file = directory / name
    file.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    return file


def test_every_letter_and_every_end_of_a_whole_name_is_a_target_once():
    inputs, targets = whole_names(["bo", "mr. rex", "bo"])
    assert [spelled(row) for row in inputs] == ["*bo*****", "*mr. rex", "*bo*****"]
    assert [spelled(row) for row in targets] == ["bo+", "mr. rex+", "bo+"]
    assert inputs.dtype == targets.dtype == np.uint8


def test_loss_is_the_sum_over_the_names_own_letters_on_as_many_columns_as_are_needed():
    recipe = get_recipe("pet_names")
    inputs, targets = map(torch.from_numpy, whole_names(["bo", "abigail", "rex"]))
    model = recipe.model().eval()
    together = model(recipe.inputs(inputs[:, :8]))
    for index, name in enumerate(["bo", "abigail", "rex"]):
        row, letters = map(torch.from_numpy, whole_names([name]))
        log_probabilities = model.fc(model.lstm(torch.eye(31)[row.long()])[0]).log_softmax(dim=2)[0]
        expected = -log_probabilities[range(len(name) + 1), letters[0].long()].sum()
        right = (log_probabilities.argmax(dim=1) == letters[0]).sum()
        torch.testing.assert_close(recipe.losses(together, targets)[index], expected)
        assert recipe.num_correct(together, targets)[index] == right
    assert recipe.num_targets(targets).tolist() == [3, 8, 4]
    short = model(inputs[[0, 2]])
    assert short.shape[1] == 4
    torch.testing.assert_close(
        recipe.losses(short, targets[[0, 2]]), recipe.losses(together, targets)[[0, 2]]
    )


def test_the_split_is_one_of_distinct_names_and_training_keeps_frequencies(tmp_path):
    held_out = []
    for place, names in (
        ("a", [*NAMES * 3, *(name.upper() for name in NAMES)]),
        ("b", NAMES[::-1]),
    ):
        prepared(tmp_path / place, written(tmp_path, f"{place}.txt", "\n".join(names)))
        train_data, test_data = get_recipe("pet_names").datasets(tmp_path / place)
        training = [spelled(row)[:-1] for row in train_data.tensors[1]]
        test = [spelled(row)[:-1] for row in test_data.tensors[1]]
        assert len(test) == len(set(test)) == len(NAMES) // 10
        assert set(training).isdisjoint(test)
        assert set(training) | set(test) == set(NAMES)
        assert all(training.count(name) == len(names) // 36 for name in set(training))
        listed = (tmp_path / place / TRAINING_NAMES).read_text().split("\n")
        assert listed == [*sorted(set(training)), ""]
        held_out.append(sorted(test))
    assert held_out[0] == held_out[1]


def test_names_that_are_left_out_are_counted(tmp_path):
    others = ["Chloé", "R2D2", "  ", "x" * 41, "O'Malley"]
    text = "id,NAME\n" + "\n".join(f"1,{name}" for name in [*NAMES, *NAMES[:4], "y" * 40, *others])
    assert prepared(tmp_path / "data", written(tmp_path, "some.csv", text)).endswith(
        ": 41 usable, 37 of them distinct, 3 of these held out; 5 names left out: "
        "3 with other characters than a to z, hyphen, full stop and space, 1 empty, 1 longer than "
        "40 characters"
    )


def test_bundled_names_are_usable_distinct_and_enough(tmp_path):
    usable, distinct, held_out = re.findall(r"\d[\d,]*(?= )", prepared(tmp_path))
    assert (usable, held_out) == (distinct, "150")


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ("rex\nbo\nrex\n", "expected at least 20 distinct names .* got 2 usable names in"),
        ("[1, 2", "expected a JSON list of strings, got .*: Expecting"),
        (json.dumps({"names": []}), "expected a JSON list of strings, got .*: it has other"),
        (json.dumps(["rex", None]), "expected a JSON list of strings, got .*: it has other"),
        (gzip.compress(bytes(range(256)), mtime=0)[:100], "is damaged"),
        (None, "which does not exist"),
    ],
)
def test_unusable_data_is_refused_with_the_expected_form(tmp_path, contents, expected):
    source = tmp_path / "names"
    if contents is not None:
        written(tmp_path, "names", contents)
    with pytest.raises(DataError, match=f"^data: .*{expected}") as caught:
        prepared(tmp_path / "data", source)
    assert str(source) in str(caught.value)


def test_prediction_shows_a_beginning_and_the_letter_after_it():
    recipe = get_recipe("pet_names")
    inputs, targets = map(torch.from_numpy, whole_names(["abigail", "bo"]))
    shown = recipe.report_samples(inputs, recipe.model()(inputs), targets)
    assert [(each.text, each.truth) for each in shown] == [("Abig…", "a"), ("B…", "o")]
    for each in shown:
        assert each.guess == max(each.scores, key=each.scores.get)
        assert sum(each.scores.values()) == pytest.approx(1)


def test_spelling_letter_by_letter_equals_reading_at_once():
    model = get_recipe("pet_names").model().eval()
    inputs, _ = map(torch.from_numpy, whole_names(["mr. whiskers"]))
    state = None
    for place, letter in enumerate([BLANK, *(ALPHABET.index(each) for each in "mr. whiskers")]):
        logits, state = model.next_letter(torch.tensor([letter]), state)
        torch.testing.assert_close(logits[0], model(inputs)[0][place])
