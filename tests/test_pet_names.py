import gzip
import json
import re
import zipfile

import numpy as np
import pytest
import torch

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.pet_names import ALPHABET, BLANK
from flyte_ddp.recipes.pet_names.recipe import IGNORED, TRAINING_NAMES, WINDOW, whole_names, windows
from flyte_ddp.recipes.prepare import describe_data, prepare_data
from tests.support.runs import new_run

WHOLE = "flyte_ddp.recipes.pet_names.recipe.PetNames"
WINDOWS = "flyte_ddp.recipes.pet_names.recipe.PetNameWindows"
NAMES = [
    f"{first}{rest}" for first in "abcdef" for rest in ("da", "lly", "-o", ". rex", "u bo", "nnie")
]


def prepared(directory, source="", recipe=WHOLE):
    prepare_data(get_recipe(recipe), str(source), directory)
    return describe_data(directory)["description"]


def loaded(directory, recipe=WHOLE):
    return [dataset.tensors for dataset in get_recipe(recipe).datasets(directory)]


def spelled(row):
    return "".join(ALPHABET[letter] for letter in row if letter != IGNORED)


def written(directory, name, text):
    file = directory / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


def test_alphabet_has_the_tutorials_31_characters():
    assert len(ALPHABET) == len(set(ALPHABET)) == 31
    assert len(get_recipe(WHOLE).class_names) == 31


def test_every_letter_and_every_end_of_a_whole_name_is_a_target_once():
    inputs, targets = whole_names(["bo", "mr. rex", "bo"])
    assert [spelled(row) for row in inputs] == ["*bo*****", "*mr. rex", "*bo*****"]
    assert [spelled(row) for row in targets] == ["bo+", "mr. rex+", "bo+"]
    assert inputs.dtype == targets.dtype == np.uint8


@pytest.mark.parametrize(
    "names", [["bo"], ["mr. whiskers", "bo", "t.j."], ["a", "abcdefgh", "abcdefghi"]]
)
def test_windows_equal_all_prefixes_of_each_name(names):
    expected = [
        ("*" * (WINDOW + 1) + (name + "+")[:end])[-WINDOW - 1 :]
        for name in names
        for end in range(1, len(name) + 2)
    ]
    inputs, targets = windows(names)
    assert [spelled(row) for row in inputs] == [row[:-1] for row in expected]
    assert [spelled(row) for row in targets] == [row[1:] for row in expected]


def test_loss_is_the_sum_over_the_names_own_letters():
    recipe = get_recipe(WHOLE)
    inputs, targets = map(torch.from_numpy, whole_names(["bo", "abigail", "rex"]))
    torch.manual_seed(0)
    model = recipe.model().eval()
    together = model(recipe.inputs(inputs))
    for index, name in enumerate(["bo", "abigail", "rex"]):
        row, letters = map(torch.from_numpy, whole_names([name]))
        log_probabilities = model.logits(model.lstm(torch.eye(31)[row.long()])[0]).log_softmax(
            dim=2
        )[0]
        expected = -log_probabilities[range(len(name) + 1), letters[0].long()].sum()
        right = (log_probabilities.argmax(dim=1) == letters[0]).sum()
        torch.testing.assert_close(recipe.losses(together, targets)[index], expected)
        assert recipe.num_correct(together, targets)[index] == right
    assert recipe.num_targets(targets).tolist() == [3, 8, 4]


def test_short_batch_may_be_computed_on_fewer_columns():
    recipe = get_recipe(WHOLE)
    inputs, targets = map(torch.from_numpy, whole_names(["bo", "rex", "mr. whiskers"]))
    model = recipe.model().eval()
    whole, short = model(inputs), model(inputs[:2])
    assert short.shape[1] == 4
    torch.testing.assert_close(recipe.losses(short, targets[:2]), recipe.losses(whole, targets)[:2])


@pytest.mark.parametrize("recipe", [WHOLE, WINDOWS])
def test_held_out_targets_are_each_letter_once_in_both_forms(tmp_path, recipe):
    prepared(tmp_path, written(tmp_path.parent, "names.txt", "\n".join(NAMES)), recipe)
    _, (_, targets) = loaded(tmp_path, recipe)
    held_out = set(NAMES) - set((tmp_path / TRAINING_NAMES).read_text().splitlines())
    assert int(get_recipe(recipe).num_targets(targets).sum()) == sum(
        len(name) + 1 for name in held_out
    )
    letters = targets[targets != IGNORED]
    assert sorted(spelled(letters.tolist())) == sorted("".join(name + "+" for name in held_out))


def test_windows_train_on_all_eight_letters_as_the_tutorial_does(tmp_path):
    prepared(tmp_path, recipe=WINDOWS)
    (_, targets), _ = loaded(tmp_path, WINDOWS)
    assert (get_recipe(WINDOWS).num_targets(targets) == WINDOW).all()


def test_no_held_out_name_is_trained_on_and_training_keeps_frequencies(tmp_path):
    source = written(
        tmp_path.parent, "often.txt", "\n".join(NAMES * 3 + [name.upper() for name in NAMES])
    )
    prepared(tmp_path, source)
    (_, train), (_, test) = loaded(tmp_path)
    training = [spelled(row)[:-1] for row in train]
    held_out = [spelled(row)[:-1] for row in test]
    assert len(held_out) == len(set(held_out)) == len(NAMES) // 10
    assert set(training).isdisjoint(held_out)
    assert set(training) | set(held_out) == set(NAMES)
    assert all(training.count(name) == 4 for name in set(training))
    assert (tmp_path / TRAINING_NAMES).read_text().split("\n") == [*sorted(set(training)), ""]


def test_split_does_not_depend_on_the_order_of_the_names(tmp_path):
    held_out = []
    for place, names in (("a", NAMES), ("b", NAMES[::-1] + NAMES[:7])):
        (tmp_path / place).mkdir()
        prepared(tmp_path / place, written(tmp_path, f"{place}.txt", "\n".join(names)))
        _, (_, test) = loaded(tmp_path / place)
        held_out.append(sorted(map(spelled, test)))
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("names.txt", "\n".join(NAMES)),
        ("names", "\r\n".join(NAMES)),
        ("names.txt.gz", "\n".join(NAMES)),
        ("names.json", json.dumps(NAMES)),
        (
            "names.csv",
            "License,Animal's Name,Breed\n"
            + "\n".join(f'1,"{name}","Dachshund, Mix"' for name in NAMES),
        ),
        ("register.csv.gz", "\ufeffAnimal's Name\n" + "\n".join(NAMES)),
        ("register", "id,NAME\n" + "\n".join(f"1,{name}" for name in NAMES)),
    ],
)
def test_names_are_read_from_csv_json_and_text(tmp_path, file, text):
    source = written(tmp_path.parent, file, text)
    description = prepared(tmp_path, source)
    assert description == (
        f"pet names from {source}: 36 usable, 36 of them distinct, 3 of these held out"
    )


def test_names_are_read_from_any_file_system(tmp_path):
    with zipfile.ZipFile(tmp_path.parent / "names.zip", "w") as archive:
        archive.writestr("names.txt", "\n".join(NAMES))
    (tmp_path / "data").mkdir()
    assert "36 usable" in prepared(
        tmp_path / "data", f"zip://names.txt::{tmp_path.parent}/names.zip"
    )


def test_description_counts_the_names_left_out(tmp_path):
    others = ["Chloé", "R2D2", "  ", "x" * 41, "O'Malley"]
    text = "Animal's Name,Breed\n" + "\n".join(
        f"{name},Cat" for name in [*NAMES, *NAMES[:4], *others]
    )
    assert prepared(tmp_path, written(tmp_path.parent, "some.csv", text)).endswith(
        ": 40 usable, 36 of them distinct, 3 of these held out; 5 names left out: "
        "3 with other characters than a to z, hyphen, full stop and space, 1 empty, 1 longer than "
        "40 characters"
    )


def test_bundled_names_are_usable_distinct_and_enough(tmp_path):
    found = re.search(
        (
            r"own list: ([\d,]+) usable, ([\d,]+) of them distinct, ([\d,]+) of "
            r"these"
        ),
        prepared(tmp_path),
    )
    usable, distinct, held_out = (int(number.replace(",", "")) for number in found.groups())
    assert usable == distinct > 400
    assert held_out == distinct // 10
    assert "left out" not in prepared(tmp_path)


@pytest.mark.parametrize(
    ("file", "contents", "expected"),
    [
        (
            "few.txt",
            "rex\nbo\nrex\n",
            "expected at least 20 distinct names .* got 2 usable names in",
        ),
        ("none.txt", "", "got 0 usable names in"),
        ("register.csv", "id,pet\n1,rex\n", "with the columns id, pet"),
        ("empty.csv", "", "got 0 usable names in"),
        ("names.json", "[1, 2", "expected a JSON list of strings, got"),
        ("object.json", '{"names": []}', "expected a JSON list of strings, got a JSON dict"),
        ("mixed.json", '["rex", null]', "expected only strings in .*, got None as element 1"),
        (
            "picture.txt",
            b"\x89PNG\r\n\x1a\n\xff",
            "expected a CSV, JSON or text file with names, got .*: image",
        ),
        (
            "half.csv.gz",
            gzip.compress(b"Animal's Name\n" + bytes(range(256)), mtime=0)[:100],
            "is damaged",
        ),
        ("missing.csv", None, "which does not exist"),
    ],
)
def test_unusable_data_is_refused_with_the_expected_form(tmp_path, file, contents, expected):
    source = tmp_path / file
    if contents is not None:
        source.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=f"^data: .*{expected}") as caught:
        prepared(tmp_path / "data", source)
    assert str(source) in str(caught.value)


def test_an_unknown_protocol_is_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=(
            r"expected a path or a URL that fsspec knows, got "
            r"'nowhere://names.csv'"
        ),
    ):
        prepared(tmp_path, "nowhere://names.csv")


@pytest.mark.parametrize("recipe", [WHOLE, WINDOWS])
def test_prediction_shows_a_beginning_and_the_letter_after_it(tmp_path, recipe):
    recipe = get_recipe(recipe)
    inputs, targets = map(torch.from_numpy, recipe.encoded(["abigail", "bo"], held_out=True))
    shown = recipe.predictions(inputs, recipe.model()(recipe.inputs(inputs)), targets)
    seen = [(prediction.text, prediction.truth) for prediction in shown]
    if len(inputs) == 2:
        assert seen == [("Abig…", "a"), ("B…", "o")]
    else:
        assert seen[:3] == [("…", "a"), ("A…", "b"), ("Ab…", "i")]
        assert seen[-1] == ("Bo…", "(end)")
    for prediction in shown:
        assert prediction.guess == max(prediction.scores, key=prediction.scores.get)
        assert sum(prediction.scores.values()) == pytest.approx(1)


@pytest.mark.parametrize("recipe", [WHOLE, WINDOWS])
def test_the_state_holds_the_alphabet_and_loads_without_the_recipe(tmp_path, recipe):
    model = get_recipe(recipe).model()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = get_recipe(WHOLE).model()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.window == model.window == (WINDOW if recipe == WINDOWS else 0)


@pytest.mark.parametrize("recipe", [WHOLE, WINDOWS])
def test_spelling_letter_by_letter_equals_reading_at_once(recipe):
    recipe = get_recipe(recipe)
    model = recipe.model().eval()
    name = "mr. whiskers"
    inputs, _ = map(torch.from_numpy, recipe.encoded([name], held_out=True))
    at_once = model(inputs)[:, -1] if model.window else model(inputs)[0]
    state = None
    for place, letter in enumerate([BLANK, *(ALPHABET.index(letter) for letter in name)]):
        logits, state = model.next_letter(torch.tensor([letter]), state)
        torch.testing.assert_close(logits[0], at_once[place])


def test_two_ranks_measure_what_one_rank_measures(tmp_path):
    source = written(tmp_path, "names.txt", "\n".join(NAMES))
    results = []
    for num_processes in (1, 2):
        run = new_run(tmp_path / str(num_processes), WHOLE)
        config = {"epochs": 2, "global_batch_size": 8, "optimizer": "sgd", "learning_rate": 1e-9}
        results.append(run.train(num_processes, source=str(source), **config).result.epochs[-1])
    one, two = results
    # Untrained, it guesses: the mean over all targets is near that of 31 equal chances, whatever a
    # batch holds.
    assert one.test_loss == pytest.approx(np.log(31), abs=0.1)
    assert two.test_loss == pytest.approx(one.test_loss, rel=1e-5)
    assert two.metrics["accuracy"] == pytest.approx(one.metrics["accuracy"])
    assert two.train_loss == pytest.approx(one.train_loss, rel=1e-2)  # dropout differs
