"""New names from a trained state of the pet-name recipes, all at once as a batch.

Names are drawn in chunks of fixed size, and every chunk's random numbers follow from the seed and the chunk's number
alone. So it does not matter who draws a chunk, or when: `draw_chunk` may run anywhere, and `pick_new` takes the chunks
in their order. Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.forward import evaluating
from flyte_ddp.recipes.pet_names.model import NameModel, State
from flyte_ddp.recipes.pet_names.recipe import ALPHABET, BLANK, END

CHUNK = 1792  # names drawn as one batch: a thousand new ones usually come of one, and a few rows cost as much as many
MOST_LETTERS = 30  # of a name
MOST_DRAWS = 50  # per name wanted, and at least so many chunks, before giving up
FEWEST_CHUNKS = 2


class TooFewNames(RuntimeError):
    """Not as many new names came up as were asked for. `names` has those that did."""

    def __init__(self, message: str, names: list[str]) -> None:
        super().__init__(message)
        self.names = names


def generate_names(
    model: NameModel,
    count: int,
    temperature: float = 1.0,
    seed: int = 0,
    prefix: str = "",
    known: Collection[str] = (),
    max_length: int = MOST_LETTERS,
) -> list[str]:
    """`count` different names in title case, none of them in `known`; the same for the same arguments.

    Args:
        model: on the device that is to do the work.
        temperature: > 0; below 1 names are more usual than those learnt from, above 1 less.
        seed: >= 0.
        prefix: what every name begins with, in any case.
        known: names not to repeat, usually those trained on, in any case.
        max_length: characters, from 1 to `MOST_LETTERS`. Longer names are dropped, not cut.

    Raises:
        ConfigError: an argument is out of range, or `prefix` has characters that the model does not know.
        TooFewNames: the model does not have so many new names in it, in a bounded number of draws.
    """
    _check(count, temperature, seed, prefix, max_length)
    num_chunks = max(FEWEST_CHUNKS, math.ceil(MOST_DRAWS * count / CHUNK))
    chunks = (draw_chunk(model, chunk, temperature, seed, prefix, max_length) for chunk in range(num_chunks))
    names = pick_new(chunks, count, known)
    if len(names) < count:
        raise TooFewNames(
            f"only {len(names):,} of {count:,} new names came up in {num_chunks * CHUNK:,} draws; ask for fewer, or "
            f"change temperature ({temperature}), prefix ({prefix!r}) or max_length ({max_length})",
            names,
        )
    return names


def load_model(state: Mapping[str, Any]) -> NameModel:
    """The model of a state dict as a run of `pet_names` or `pet_name_windows` leaves it, on the CPU.

    Raises:
        ConfigError: it is the state of something else.
    """
    model = NameModel()
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model_state: this is not a pet-name model: {error}; accepted is the state of recipe pet_names or "
            "pet_name_windows"
        ) from error
    return model


def draw_chunk(model: NameModel, chunk: int, temperature: float, seed: int, prefix: str, max_length: int) -> list[str]:
    """The names of chunk number `chunk`, in lower case and in the order of their draws; repeats and old names too.

    The model is put in evaluation mode meanwhile, so one thread at a time may use it.
    """
    device = model.fc.weight.device
    draws = torch.from_numpy(np.random.default_rng([seed, chunk]).random((CHUNK, MOST_LETTERS + 1))).to(device)
    beginning = [ALPHABET.index(letter) for letter in prefix.lstrip().lower()]
    spelled = torch.full((CHUNK, max_length + 1), BLANK, dtype=torch.int64, device=device)
    spelled[:, : len(beginning)] = torch.tensor(beginning, device=device)
    growing = torch.arange(CHUNK, device=device)  # rows whose names have not ended
    with evaluating(model):
        state = None
        for letter in (BLANK, *beginning):  # what all names share is computed once
            logits, state = model.spell(torch.tensor([letter], device=device), state)
        logits, state = logits.expand(CHUNK, -1), tuple(part.expand(-1, CHUNK, -1) for part in state or ())
        for place in range(len(beginning), max_length + 1):
            letters = _drawn(logits, temperature, draws[growing, place])
            spelled[growing, place] = letters
            goes_on = letters != END
            growing, letters, state = growing[goes_on], letters[goes_on], _rows(state, goes_on)
            if not len(growing):
                break
            logits, state = model.spell(letters, state)
    rows = ("".join(ALPHABET[letter] for letter in row) for row in spelled.tolist())
    ended = [row.partition("+")[0] for row in rows if "+" in row]
    return [name for name in ended if name.strip() == name and any(letter.isalpha() for letter in name)]


def pick_new(chunks: Iterable[list[str]], count: int, known: Collection[str]) -> list[str]:
    """The first `count` names of `chunks`, in title case, that are new; fewer where the chunks have no more."""
    seen = {name.strip().lower() for name in known}
    names: list[str] = []
    for chunk in chunks:
        for name in chunk:
            if name not in seen:
                seen.add(name)
                names.append(name.title())
        if len(names) >= count:
            break
    return names[:count]


def _drawn(logits: Tensor, temperature: float, draws: Tensor) -> Tensor:
    """The letters (N,) that `draws`, uniform in [0, 1), pick by their probabilities; a blank is never one."""
    logits = logits.double() / temperature
    logits[:, BLANK] = -math.inf
    cumulated = logits.softmax(dim=1).cumsum(dim=1)
    drawn = torch.searchsorted(cumulated, draws[:, None] * cumulated[:, -1:], right=True)
    return drawn[:, 0].clamp_(max=len(ALPHABET) - 1)  # a draw next to 1 may be rounded up to it


def _rows(state: State, kept: Tensor) -> State:
    return tuple(part[:, kept] for part in state)


def _check(count: int, temperature: float, seed: int, prefix: str, max_length: int) -> None:
    beginning = prefix.lstrip().lower()
    unknown = sorted(set(beginning) - set(ALPHABET[2:]))
    for name, value, holds, accepted in (
        ("count", count, count >= 1, "a whole number of at least 1"),
        ("temperature", temperature, 0 < temperature < math.inf, "a finite number above 0"),
        ("seed", seed, seed >= 0, "a whole number of at least 0"),
        ("max_length", max_length, 1 <= max_length <= MOST_LETTERS, f"a whole number from 1 to {MOST_LETTERS}"),
        ("prefix", prefix, not unknown, "letters from a to z, hyphen, full stop and space"),
        ("prefix", prefix, len(beginning) < max_length, f"fewer characters than max_length, which is {max_length}"),
    ):
        if not holds:
            raise ConfigError(f"{name}: {value!r} is out of range; accepted is {accepted}")
