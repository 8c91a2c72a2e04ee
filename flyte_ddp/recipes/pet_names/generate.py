"""Generate new names with a trained model of recipe `pet_names`, in batches. Imports torch.

Names are drawn in chunks of fixed size, so that a smaller count returns a prefix of a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from flyte_ddp.config.fields import Limits, check
from flyte_ddp.errors import ConfigError, in_one_line
from flyte_ddp.recipes.pet_names import ALPHABET, BLANK, END
from flyte_ddp.recipes.pet_names.model import NameModel

# Names drawn as one batch, usually with a thousand new names. A few rows cost as much as many.
CHUNK = 1792
MAX_LETTERS = 30  # largest length of a generated name
MAX_DRAWS = 50  # number of draws per wanted name before generation fails
MIN_CHUNKS = 2  # smallest limit on the number of chunks, however few names are wanted


def generate_names(
    model: NameModel,
    count: int,
    temperature: float = 1.0,
    seed: int = 0,
    prefix: str = "",
    known: Collection[str] = (),
    max_length: int = MAX_LETTERS,
) -> list[str]:
    """Return `count` different names in title case, none of them in `known`. The same arguments
    return the same names.

    Args:
        model: a model on the device that computes.
        temperature: > 0; below 1 the names are more common than the training names, above 1 less
            common.
        seed: >= 0.
        prefix: the beginning of every name, in any case.
        known: names not to repeat, usually the training names, in any case.
        max_length: characters, from 1 to `MAX_LETTERS`. Longer names are dropped, not cut.

    Raises:
        ConfigError: an argument is out of range, `prefix` has characters that the model does not
            know, or a bounded number of draws did not give so many new names.
    """
    check("count", count, int, Limits(minimum=1))
    check("temperature", temperature, float, Limits(above=0))
    check("seed", seed, int, Limits(minimum=0))
    check("max_length", max_length, int, Limits(minimum=1, maximum=MAX_LETTERS))
    expected = "letters from a to z, hyphen, full stop and space"
    check("prefix", prefix, str, Limits(pattern=r"\s*[A-Za-z. -]*", example=expected))
    if len(prefix.lstrip()) >= max_length:
        raise ConfigError(
            "prefix: expected fewer characters than max_length, which is "
            f"{max_length}, got {prefix!r}"
        )
    num_chunks = max(MIN_CHUNKS, math.ceil(MAX_DRAWS * count / CHUNK))
    generator = torch.Generator(model.fc.weight.device).manual_seed(seed)
    seen = {name.strip().lower() for name in known}
    names: list[str] = []
    for _ in range(num_chunks):
        drawn = draw_chunk(model, generator, temperature, prefix, max_length)
        names += [name.title() for name in dict.fromkeys(drawn) if name not in seen]
        seen.update(drawn)
        if len(names) >= count:
            return names[:count]
    raise ConfigError(
        f"count: expected {count:,} new names, got {len(names):,} in {num_chunks * CHUNK:,} "
        f"draws; ask for fewer, or change temperature ({temperature}), prefix ({prefix!r}) or "
        f"max_length ({max_length})"
    )


def load_model(state: Mapping[str, Any]) -> NameModel:
    """Return the model, on the CPU, of a state of recipe `pet_names`. Raises ConfigError for the
    state of another model.
    """
    model = NameModel()
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, KeyError) as error:
        raise ConfigError(
            "model_state: expected the state of recipe pet_names, got another model's: "
            f"{in_one_line(error)}"
        ) from error
    return model


def draw_chunk(
    model: NameModel,
    generator: torch.Generator,
    temperature: float,
    prefix: str,
    max_length: int,
) -> list[str]:
    """Return up to `CHUNK` names in lower case, with repeats and old names. Names that do not end
    are left out.

    The model is in evaluation mode meanwhile, so only one thread at a time may use it.
    """
    device = generator.device
    beginning = [ALPHABET.index(letter) for letter in prefix.lstrip().lower()]
    spelled = torch.full((CHUNK, max_length + 1), BLANK, dtype=torch.int64, device=device)
    spelled[:, : len(beginning)] = torch.tensor(beginning, device=device)
    growing = torch.arange(CHUNK, device=device)  # rows whose names have not ended
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits, state = model.next_letter(torch.tensor([BLANK], device=device), None)
        for letter in beginning:  # All names begin with these letters.
            logits, state = model.next_letter(torch.tensor([letter], device=device), state)
        logits = logits.expand(CHUNK, -1)
        state = tuple(part.expand(-1, CHUNK, -1).contiguous() for part in state)
        for place in range(len(beginning), max_length + 1):
            scaled = logits.double() / temperature
            scaled[:, BLANK] = -math.inf
            letters = torch.multinomial(scaled.softmax(dim=1), 1, generator=generator)[:, 0]
            spelled[growing, place] = letters
            goes_on = letters != END
            growing, letters = growing[goes_on], letters[goes_on]
            state = tuple(part[:, goes_on] for part in state)
            if not len(growing):
                break
            logits, state = model.next_letter(letters, state)
    model.train(was_training)
    return _list_names(spelled)


def _list_names(spelled: torch.Tensor) -> list[str]:
    """Return the names that end, have a letter, and have no blanks at their ends."""
    names = []
    for row in spelled.tolist():
        name, ending, _ = "".join(ALPHABET[letter] for letter in row).partition("+")
        has_letter = any(letter.isalpha() for letter in name)
        if ending and has_letter and name.strip() == name:
            names.append(name)
    return names
