"""`flyte-ddp shards`: write images in folders, text, or rows of tables, in a random order."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from flyte_ddp.config.fields import Limits, check, finite_number, read_object, whole_number
from flyte_ddp.config.options import make_parser
from flyte_ddp.data.source import Source
from flyte_ddp.data.tables import TABLES, write_as_parquet
from flyte_ddp.data.write import PARQUET, find_tables, write_parquet
from flyte_ddp.errors import ConfigError, DataError, StorageUnavailable, in_one_line
from flyte_ddp.recipes import Recipe, get_recipe
from flyte_ddp.recipes.image_folder.files import SUFFIXES
from flyte_ddp.recipes.image_folder.shards import write_images
from flyte_ddp.recipes.text.shards import write_text
from flyte_ddp.storage import SHORT_TIMEOUT, Storage
from flyte_ddp.storage.failures import is_full

HELD_OUT = 0.2  # share of the images that is held out
READER = (
    "read such files where they are, with a `reader` of `flyte_ddp.data.Shards`: "
    "docs/streams.md#arrays-and-other-files"
)
# advice about files that are not written to shards, by their suffixes
WAYS = {
    (".npy", ".npz", ".h5", ".hdf5", ".pt", ".safetensors", ".arrow", ".feather"): READER,
    (".tfrecord", ".json", ".xlsx", ".pkl"): READER,
    (".tar", ".tgz", ".mds"): "these are shards, which `flyte_ddp.data.Shards` reads as they are",
    (".txt", ".md"): "give --text '{}' for text",
}
ABOUT = (
    "write images in a folder for each class to tar files, text to windows or documents of tokens, "
    "or the rows of Parquet, CSV or JSON lines to Parquet, in a random order; the same command "
    "writes what is missing"
)
MAX_SHARD_MIB = 2048  # Two shards are in memory at once. The format MDS ends at 4 GiB.
NOT_GIVEN = float("nan")  # default that is compared by identity: a user's own nan is refused
OPTIONS = (
    (
        "source",
        "directory or URL of images, as of recipe image_folder, of text, or of Parquet, CSV or "
        "JSON lines",
        None,
    ),
    ("destination", "empty directory or prefix", None),
    ("--seed", "of the order (default 0)", 0),
    ("--shard-mib", "size of a shard (default 64)", 64),
    (
        "--held-out",
        "share that is held out: of images, where there is no folder of held-out ones (default "
        "0.2), of the documents of text (default 0.1), or of rows (default: none)",
        NOT_GIVEN,
    ),
    (
        "--unreadable",
        "of images; fail or skip: one that cannot be read ends the command, or is left out "
        "(default fail)",
        "",
    ),
    (
        "--text",
        "write text for recipe text, with these of its recipe_options, such as "
        "'{\"context\": 512}'",
        "",
    ),
)


def main(arguments: Sequence[str]) -> str:
    """Write the shards that are missing, and return a description of them all."""
    options = make_parser("shards", ABOUT, OPTIONS).parse_args(arguments)
    if options.unreadable:
        check("--unreadable", options.unreadable, str, Limits(choices=("fail", "skip")))
    shard_bytes = whole_number("--shard-mib", options.shard_mib, 1, MAX_SHARD_MIB) << 20
    share = None
    if options.held_out is not NOT_GIVEN:
        share = finite_number("--held-out", options.held_out, above=0, below=1)
    to = options.destination, options.seed, shard_bytes
    try:
        if options.text:
            _refuse_unreadable(options.unreadable, "text")
            return write_text(_text_recipe(options.text, share), options.source, *to)
        files = find_tables(options.source, (PARQUET,))
        if files:
            _refuse_unreadable(options.unreadable, "a table")
            return write_parquet(files, *to, share)
        files = find_tables(options.source, TABLES)
        if files and not any(name.lower().endswith(SUFFIXES) for name in files.find()):
            _refuse_unreadable(options.unreadable, "a table")
            with tempfile.TemporaryDirectory(prefix="tables-") as place:
                checksum = write_as_parquet(files, Path(place))
                return write_parquet(Source(place, files.timeout), *to, share, checksum)
        skips = options.unreadable == "skip"
        return write_images(options.source, *to, share or HELD_OUT, skips)
    except DataError:
        _name_way(options.source)
        raise
    except OSError as error:
        if not is_full(error):
            raise
        what = f"TMPDIR: {tempfile.gettempdir()} is full: {in_one_line(error)}"
        raise StorageUnavailable(what, True) from None


def _text_recipe(options: str, share: float | None) -> Recipe:
    """Return recipe text with these options and the share that is held out. Raises ConfigError if
    the options contain a share as well.
    """
    given = read_object("--text", options)
    if share is not None and "held_out" in given:
        raise ConfigError("--held-out: expected none beside held_out in --text, got both")
    if share is not None:
        given = {**given, "held_out": share}
    return get_recipe("text", given)


def _refuse_unreadable(value: str, kind: str) -> None:
    if value:
        raise ConfigError(
            f"--unreadable: expected none with {kind}, of which nothing is left out, got {value}"
        )


def _name_way(source: str) -> None:
    """Raise ConfigError with advice if `source` has only files that are not written to shards."""
    names = sorted(name or source for name in Storage(source, "source", SHORT_TIMEOUT).find())
    for suffixes, way in WAYS.items():
        found = [name for name in names if name.lower().endswith(suffixes)]
        is_flat = source in names or not any("/" in name for name in names)
        if found and len(found) == len(names) and is_flat:
            raise ConfigError(
                "source: expected images in folders, text, Parquet, CSV or JSON lines, got "
                f"{found[0]}: {way}"
            )
