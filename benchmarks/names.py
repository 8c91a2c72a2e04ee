"""The ways to spell names that are compared, each in a process of its own: `python -m benchmarks.names ours`.

All have the same weights, which have learnt no more than that names are short, and leave out names that came up before.
`tutorial` is written as the pet-name tutorial describes its generator: a name after the other, and for every letter a
forward pass over the window of letters before it, with a draw in Python. `ours_windows` is ours with that window.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flyte_ddp.recipes.pet_names.model import NameModel

COUNT = 1_000
MOST_LETTERS = 30
LEAST_SECONDS = 3.0  # of each side: a thousand names of ours are done before a machine's speed has settled


def ours(count: int) -> list[str]:
    from flyte_ddp.recipes.pet_names.generate import generate_names

    return generate_names(new_model(window=0), count)


def ours_windows(count: int) -> list[str]:
    from flyte_ddp.recipes.pet_names.generate import generate_names
    from flyte_ddp.recipes.pet_names.recipe import WINDOW

    return generate_names(new_model(WINDOW), count)


def tutorial(count: int) -> list[str]:
    import torch

    from flyte_ddp.recipes.pet_names.recipe import ALPHABET, BLANK, END, WINDOW

    random.seed(0)
    model = new_model(WINDOW).eval()
    names: list[str] = []
    with torch.no_grad():
        while len(names) < count:
            window, letters = [BLANK] * WINDOW, ""
            while len(letters) <= MOST_LETTERS:
                logits = model(torch.tensor([window]))[0, -1]
                logits[BLANK] = -float("inf")
                letter = random.choices(range(len(ALPHABET)), logits.softmax(dim=0).tolist())[0]
                if letter == END:
                    break
                letters += ALPHABET[letter]
                window = [*window[1:], letter]
            name = letters.strip().title()
            if 0 < len(letters) <= MOST_LETTERS and name not in names:
                names.append(name)
    return names


def new_model(window: int) -> NameModel:
    """The recipes' model with fresh weights, the same for any window, and names of four letters or so."""
    import torch

    from flyte_ddp.recipes.pet_names.model import NameModel
    from flyte_ddp.recipes.pet_names.recipe import END

    torch.manual_seed(0)
    model = NameModel(window)
    with torch.no_grad():
        model.fc.bias[END] += 2
    return model


VARIANTS = {variant.__name__: variant for variant in (ours, ours_windows, tutorial)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args()
    spell = VARIANTS[arguments.variant]
    spell(1)  # what only the first name costs, such as imports, is not a matter of how it is spelt
    started = time.time()
    num_names, seconds = 0, 0.0
    while seconds < LEAST_SECONDS:
        num_names += len(spell(arguments.count))
        seconds = time.time() - started
    print(json.dumps({"first_step_at": started, "names_per_second": num_names / seconds}), flush=True)
