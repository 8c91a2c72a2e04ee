import itertools
import random

import pytest
import torch

from flyte_ddp.recipes.pet_names import ALPHABET, BLANK, END
from flyte_ddp.recipes.pet_names.generate import (
    CHUNK,
    draw_chunk,
    generate_names,
)
from flyte_ddp.recipes.pet_names.model import NameModel


def new_model():
    """A model that has learnt no more than that names are short."""
    torch.manual_seed(0)
    model = NameModel()
    with torch.no_grad():
        model.fc.bias[END] += 2
    return model


def parrot(*letters):
    """A model that makes of its last letter only the one `letters` has after it; `letters` start
    with a blank.
    """
    model = new_model()
    logits = torch.full((31, 31), -1e3)
    for one, other in itertools.pairwise(letters):
        logits[ALPHABET.index(one), ALPHABET.index(other)] = 0.0
    model.next_letter = lambda letters, _: (logits[letters], (torch.zeros(1, len(letters), 1),))
    return model


def leaning(**weights):
    """A model for which each letter has a probability by `weights`, whatever came before."""
    model = new_model()
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.fill_(-30.0)
        for letter, weight in weights.items():
            model.fc.bias[END if letter == "end" else ALPHABET.index(letter)] = torch.tensor(
                weight
            ).log()
    return model


def drawn(model, temperature=1.0, max_length=30):
    return draw_chunk(model, torch.Generator().manual_seed(0), temperature, "", max_length)


def test_names_are_new_distinct_in_title_case_and_short_enough():
    model = new_model()
    known = [name.upper() for name in generate_names(model, 50)]
    names = generate_names(model, CHUNK, known=known)
    assert model.training  # The mode is as it was given.
    assert len(names) == len(set(names)) == CHUNK
    assert {name.lower() for name in names}.isdisjoint(name.lower() for name in known)
    for name in names:
        assert name == name.strip() == name.lower().title()
        assert 1 <= len(name) <= 30
        assert set(name.lower()) <= set(ALPHABET[2:])


def test_a_seed_gives_the_same_names_and_a_smaller_count_a_prefix():
    model = new_model()
    names = generate_names(model, 40, seed=3)
    random.seed(1)
    torch.manual_seed(9)
    assert generate_names(model, 40, seed=3) == names
    assert generate_names(model, 15, seed=3) == names[:15]
    assert generate_names(model, 40, seed=4) != names


def test_names_after_a_prefix_follow_from_its_letters():
    assert generate_names(parrot(*"*rex+"), 1, prefix="R") == ["Rex"]
    assert generate_names(parrot(*"*bexo+"), 1, prefix="be") == ["Bexo"]


def test_names_too_long_are_dropped_not_cut():
    model = leaning(a=0.5, b=0.2, end=0.3)
    short = drawn(model, max_length=6)
    assert max(map(len, short)) == 6
    assert short == [name for name in drawn(model) if len(name) <= 6]


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.8), (0.5, 0.9412), (2.0, 0.6667)])
def test_letters_have_the_models_frequencies_at_the_temperature(temperature, share):
    # A first letter is a or b as 4 to 1; to the power of 1 / temperature that is 16 to 1 or 2 to 1.
    names = drawn(leaning(a=0.4, b=0.1, end=0.5), temperature)
    found = sum(name[0] == "a" for name in names) / len(names)
    assert found == pytest.approx(share, abs=0.05)


def test_a_blank_is_never_drawn():
    model = leaning(a=0.1, b=0.1, end=0.1)
    with torch.no_grad():
        model.fc.bias[BLANK] = 20.0
    names = drawn(model)
    assert len(names) > CHUNK / 2
    assert set("".join(names)) == {"a", "b"}
