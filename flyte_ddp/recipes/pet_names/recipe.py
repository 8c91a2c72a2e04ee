"""Recipe `pet_names`: the pet-name tutorial's letter-by-letter LSTM on whole names.

Every letter and every end of a name is a target exactly once, so that losses are nats per letter.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.resources
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flyte_ddp.errors import DataError
from flyte_ddp.events import Prediction
from flyte_ddp.recipes.arrays import ArrayRecipe
from flyte_ddp.recipes.contents import EMPTY, ENCODINGS, NO_UTF8, kind_of, report_left_out, unpack
from flyte_ddp.recipes.pet_names import ALPHABET, BLANK, END
from flyte_ddp.storage import read_file

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

IGNORED = 255  # value in the targets that marks a position without a target

# file that `prepare` writes: the distinct training names, one a line
TRAINING_NAMES = "training_names.txt"
# lower-case titles of the CSV column with the names; the first is the title in Seattle's register
NAME_COLUMNS = ("animal's name", "name")
DELIMITERS = ",;\t|"  # characters that may separate the columns of a CSV file
MAX_LINES = 20  # number of lines that one row of a CSV file may take
MAX_LENGTH = 40  # characters; the register's longest name has 37
MIN_NAMES = 20  # smallest number of distinct names
HELD_OUT_RATIO = 10  # number of distinct names per held-out name


class PetNames(ArrayRecipe):
    """A 4-layer LSTM, 128 wide, on whole names.

    Inputs and targets are rows of bytes, both (T,), where T is the longest name's length + 1. An
    input is `BLANK` and then the letters, padded with `BLANK`. A target is the letters and then
    `END`, padded with `IGNORED`.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "epochs": 20,
        "global_batch_size": 32,
        "learning_rate": 4e-3,
        "schedule": "one_cycle",
        "gradient_clip_norm": 1.0,
    }
    class_names: Sequence[str] = (
        "(nothing)",
        "(end)",
        *ALPHABET[2:-3],
        "(hyphen)",
        "(full stop)",
        "(space)",
    )

    def prepare_new_data(self, source: str, directory: Path) -> str:
        raise DataError(
            "recipe pet_names: expected a recipe that predicts samples, got one that generates: "
            "workflows/pet_names.py makes new names"
        )

    def prepare(self, source: str, directory: Path) -> str:
        """Write `train.npz` and `test.npz`, and the distinct training names to `TRAINING_NAMES`.

        A hash of the name decides which tenth of the distinct names is held out, so no training
        name is held out. Training keeps repeated names; a held-out name occurs once.

        Args:
            source: a path or URL of a CSV file with a column "Animal's Name" or "name", of a JSON
                list of strings, or of text with one name per line, packed with gzip or not; "" for
                the recipe's own list.
        """
        import numpy as np

        if source:
            raw = _read(source)
        else:
            bundled = importlib.resources.files(__package__).joinpath("names.txt")
            raw = bundled.read_text(encoding="utf-8")
        left_out: Counter[str] = Counter()
        names = _select_usable(_parse_names(raw, source, left_out), left_out)
        distinct = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
        where = source or "names.txt, the recipe's own list"
        others = report_left_out(left_out, "name")
        if len(distinct) < MIN_NAMES:
            raise DataError(
                f"data: expected at least {MIN_NAMES} distinct names of at most {MAX_LENGTH} "
                f"letters from a to z, hyphens, full stops and spaces, got {len(distinct)} usable "
                f"names in {where}{others}"
            )
        held_out = distinct[: len(distinct) // HELD_OUT_RATIO]
        training = set(distinct) - set(held_out)
        for file, chosen in (
            ("train.npz", [name for name in names if name in training]),
            ("test.npz", held_out),
        ):
            inputs, targets = whole_names(chosen)
            np.savez(directory / file, inputs=inputs, targets=targets)
        (directory / TRAINING_NAMES).write_text(
            "\n".join(sorted(training)) + "\n", encoding="utf-8"
        )
        return (
            f"pet names from {where}: {len(names):,} usable, {len(distinct):,} of them distinct, "
            f"{len(held_out):,} of these held out{others}"
        )

    def model(self) -> nn.Module:
        from flyte_ddp.recipes.pet_names.model import NameModel

        return NameModel()

    def inputs(self, batch: Tensor) -> Tensor:
        return batch

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of logits (B, t, 31) against targets (B, T), t <= T, summed over
        each row, (B,).

        The model leaves out columns that no name of the batch reaches. They have no targets.
        """
        from torch.nn import functional

        targets = targets[:, : outputs.shape[1]].long()
        losses = functional.cross_entropy(
            outputs.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return losses.view_as(targets).sum(dim=1)

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # No output has the index IGNORED.
        return (outputs.argmax(dim=2) == targets[:, : outputs.shape[1]]).sum(dim=1)

    def num_targets(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum(dim=1)

    def report_samples(self, batch: Tensor, outputs: Tensor, targets: Tensor) -> list[Prediction]:
        """Show for each name the letter in its middle, with the letters before it."""
        shown = []
        names = self.class_names
        for letters, logits, row in zip(batch.tolist(), outputs, targets, strict=True):
            places = (row != IGNORED).nonzero().flatten().tolist()
            place = places[len(places) // 2]
            scores = logits[place].float().softmax(dim=0)
            beginning = "".join(
                ALPHABET[letter] for letter in letters[: place + 1] if letter != BLANK
            )
            prediction = Prediction(
                truth=names[int(row[place])],
                guess=names[int(scores.argmax())],
                scores=dict(zip(names, scores.tolist(), strict=True)),
                text=f"{beginning.title()}…",
            )
            shown.append(prediction)
        return shown


def whole_names(names: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs and targets of `names`, both (N, longest + 1) bytes, as `PetNames` describes
    them.
    """
    import numpy as np

    length = max(map(len, names)) + 1
    inputs = np.full((len(names), length), BLANK, dtype=np.uint8)
    targets = np.full_like(inputs, IGNORED)
    for row, name in enumerate(names):
        letters = [ALPHABET.index(letter) for letter in name]
        inputs[row, 1 : len(name) + 1] = letters
        targets[row, : len(name) + 1] = [*letters, END]
    return inputs, targets


def _select_usable(raw: Sequence[str], left_out: Counter[str]) -> list[str]:
    """Return the names that the model's alphabet can spell, in lower case. Count the others in
    `left_out`, by the reason.
    """
    names = []
    for name in raw:
        name = name.strip().lower()
        if not name:
            left_out["empty"] += 1
        elif not re.fullmatch("[a-z. -]+", name):
            left_out["with other characters than a to z, hyphen, full stop and space"] += 1
        elif len(name) > MAX_LENGTH:
            left_out[f"longer than {MAX_LENGTH} characters"] += 1
        else:
            names.append(name)
    return names


def _read(source: str) -> str:
    """Return the text of the file at `source`, unpacked. A byte that is not UTF-8 makes only its
    own name unusable.
    """
    expected = "data: expected a CSV, JSON or text file with names"
    try:
        contents = unpack(read_file(source, "data"), source)
    except FileNotFoundError:
        raise DataError(f"{expected}, got {source}, which does not exist") from None
    kind = kind_of(contents)
    if kind not in (*ENCODINGS, EMPTY, NO_UTF8):
        raise DataError(f"{expected}, got {source}: {kind}")
    encoding = "utf-8"
    if kind in ENCODINGS:
        encoding = kind
    return contents.decode(encoding, errors="replace")


def _parse_names(text: str, source: str, left_out: Counter[str]) -> list[str]:
    """Return the names in `text`, and count damaged lines. The format, detected from the contents,
    is JSON, CSV or one name per line.
    """
    if text.lstrip()[:1] in ("[", "{"):
        return _parse_json(text, source)
    lines = [line for line in re.split("\r\n|\r|\n", text) if line]
    headers = {mark: next(csv.reader(lines[:1], delimiter=mark), []) for mark in DELIMITERS}
    for mark, columns in headers.items():
        header = [column.strip().lower() for column in columns]
        for name in NAME_COLUMNS:
            if name in header:
                return _parse_rows(lines[1:], mark, header, header.index(name), left_out)
    mark = max(headers, key=lambda mark: len(headers[mark]))
    if len(headers[mark]) > 1 and sum(mark in line for line in lines) > len(lines) / 2:
        raise DataError(
            f'data: expected a CSV file with a column "Animal\'s Name" or "name", got {source} '
            "with the columns "
            f"{', '.join(headers[mark])}"
        )
    return lines


def _parse_rows(
    lines: Sequence[str], delimiter: str, header: Sequence[str], column: int, left_out: Counter[str]
) -> list[str]:
    """Return one column of a CSV file. A line that cannot be read, for example because of a stray
    quotation mark, is counted and left out.

    Text in quotation marks may continue in the lines that follow, except a name.
    """
    names, start = [], 0
    while start < len(lines):
        for end in range(start + 1, min(start + MAX_LINES, len(lines)) + 1):
            text = [f"{line}\n" for line in lines[start:end]]
            try:
                row = next(csv.reader(text, delimiter=delimiter, strict=True))
            except csv.Error:  # A quotation may end in the next line.
                continue
            name = (row[column : column + 1] or [""])[0]
            if not any(row[len(header) :]) and "\n" not in name:
                names.append(name)
                start = end
                break
        else:
            left_out["in a line that is no row of the table"] += 1
            start += 1
    return names


def _parse_json(text: str, source: str) -> list[str]:
    try:
        names: list[str] = json.loads(text)
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
        reason = "it has other values"
    except ValueError as error:
        reason = str(error)
    raise DataError(f"data: expected a JSON list of strings, got {source}: {reason}")
