"""Texts that are larger than the memory of the process that prepares them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from flyte_ddp.recipes.text.token_files import HELD_OUT_FILE as HELD_OUT
from flyte_ddp.recipes.text.token_files import TRAIN_FILE as TRAIN
from tests.support.runs import REPOSITORY

PREPARE = """
import resource, sys
from pathlib import Path
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.text import token_files

token_files.BPE_SAMPLE = 4 << 20  # to save time
source, directory, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
recipe = get_recipe("text", {"tokens": sys.argv[4], "separator": sys.argv[5], "vocabulary": 1024})
prepare_data(get_recipe("text"), "", Path(sys.argv[6]))  # imports what is needed before the limit counts
resource.setrlimit(resource.RLIMIT_DATA, (limit + int(Path("/proc/self/statm").read_text().split()[5]) * 4096,) * 2)
prepare_data(recipe, source, directory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "separator", "megabytes", "limit"),
    [("bytes", "", 200, 32), ("bpe", "\n\n", 100, 96)],
)
def test_text_of_any_size_is_prepared_in_bounded_memory(
    tmp_path, tokens, separator, megabytes, limit
):
    """The limit applies to the process's own memory. Mapped files do not count, because the kernel
    takes their memory back.
    """
    random = np.random.default_rng(0)
    vocabulary = np.array([f"word{number:x}" for number in range(20_000)])
    with open(tmp_path / "large.txt", "w") as file:
        while file.tell() < megabytes << 20:
            words = vocabulary[np.minimum(random.zipf(1.3, 200_000), 20_000) - 1]
            file.write("\n\n".join(" ".join(part) for part in np.array_split(words, 500)) + "\n\n")
    for name in ("data", "small"):
        (tmp_path / name).mkdir()
    arguments = (
        tmp_path / "large.txt",
        tmp_path / "data",
        limit << 20,
        tokens,
        separator,
        tmp_path / "small",
    )
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if tokens == "bytes":
        sizes = [(tmp_path / "data" / name).stat().st_size for name in (TRAIN, HELD_OUT)]
        assert sum(sizes) >= (megabytes << 20) * 0.98
        assert 0.08 < sizes[1] / sum(sizes) < 0.12
