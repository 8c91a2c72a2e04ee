"""`flyte-ddp shards`: write images in folders, text, or Parquet files, in a random order."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from flyte_ddp.config.fields import Limits, check, finite_number, read_object, whole_number
from flyte_ddp.config.options import make_parser
from flyte_ddp.data.write import find_parquet, write_parquet
from flyte_ddp.errors import StorageUnavailable, in_one_line
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.image_folder.shards import write_images
from flyte_ddp.recipes.text.windows import write_windows
from flyte_ddp.storage.failures import is_full

MAX_SHARD_MIB = 2048  # of which two are in memory; MDS ends at 4 GiB
OPTIONS = (
    (
        "source",
        "directory or URL of images, as of recipe image_folder, of text, or of Parquet files",
        None,
    ),
    ("destination", "empty directory or prefix", None),
    ("--seed", "of the order (default 0)", 0),
    ("--shard-mib", "size of a shard (default 64)", 64),
    (
        "--held-out",
        "share of the images, where there is no folder of held-out ones (default 0.2)",
        0.2,
    ),
    (
        "--unreadable",
        "fail or skip: an image that cannot be read ends the command, or is left out (default "
        "fail)",
        "fail",
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
    text = (
        "write images in a folder for each class to tar files, text to windows of tokens, or the "
        "rows of Parquet files to others, in a random order; the same command writes what is "
        "missing"
    )
    options = make_parser("shards", text, OPTIONS).parse_args(arguments)
    check("--unreadable", options.unreadable, str, Limits(choices=("fail", "skip")))
    shard_bytes = whole_number("--shard-mib", options.shard_mib, 1, MAX_SHARD_MIB) << 20
    held_out = finite_number("--held-out", options.held_out, above=0, below=1)
    to = options.destination, options.seed, shard_bytes
    try:
        if options.text:
            recipe = get_recipe("text", read_object("--text", options.text))
            return write_windows(recipe, options.source, *to)
        if files := find_parquet(options.source):
            return write_parquet(files, *to)
        return write_images(options.source, *to, held_out, options.unreadable == "skip")
    except OSError as error:
        if not is_full(error):
            raise
        what = f"TMPDIR: {tempfile.gettempdir()} is full: {in_one_line(error)}"
        raise StorageUnavailable(what, True) from None
