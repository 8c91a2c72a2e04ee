"""The name generators that are compared, each in its own process: `python -m benchmarks.names ours`.

All use the same weights, which have only learnt that names are short, and skip repeated names. `tutorial` follows the
pet-name tutorial: one name after the other, and for every letter a forward pass over the window of letters before it
with a draw in Python. `ours_windows` is this package with that window.
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
MAX_LETTERS = 30
MIN_SECONDS = 3.0  # per side: this package draws 1,000 names before a machine's clock speed settles


def ours(count: int) -> list[str]:
    from flyte_ddp.recipes.pet_names.generate import generate_names

    return generate_names(new_model(window=0), count)


def ours_windows(count: int) -> list[str]:
    from flyte_ddp.recipes.pet_names.generate import generate_names
    from flyte_ddp.recipes.pet_names.recipe import WINDOW

    return generate_names(new_model(WINDOW), count)


def tutorial(count: int) -> list[str]:
    import torch

    from flyte_ddp.recipes.pet_names import ALPHABET, BLANK, END
    from flyte_ddp.recipes.pet_names.recipe import WINDOW

    random.seed(0)
    model = new_model(WINDOW).eval()
    names: list[str] = []
    with torch.no_grad():
        while len(names) < count:
            window, letters = [BLANK] * WINDOW, ""
            while len(letters) <= MAX_LETTERS:
                logits = model(torch.tensor([window]))[0, -1]
                logits[BLANK] = -float("inf")
                letter = random.choices(range(len(ALPHABET)), logits.softmax(dim=0).tolist())[0]
                if letter == END:
                    break
                letters += ALPHABET[letter]
                window = [*window[1:], letter]
            name = letters.strip().title()
            if 0 < len(letters) <= MAX_LETTERS and name not in names:
                names.append(name)
    return names


def new_model(window: int) -> NameModel:
    """Return the recipes' model with fresh weights, the same for any window; its names have about four letters."""
    import torch

    from flyte_ddp.recipes.pet_names import END
    from flyte_ddp.recipes.pet_names.model import NameModel

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
    generate = VARIANTS[arguments.variant]
    generate(1)  # exclude imports and other costs of the first name
    started = time.time()
    num_names, seconds = 0, 0.0
    while seconds < MIN_SECONDS:
        num_names += len(generate(arguments.count))
        seconds = time.time() - started
    print(json.dumps({"first_step_at": started, "names_per_second": num_names / seconds}), flush=True)
