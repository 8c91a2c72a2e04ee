"""What tells the contents of shards from others, for ranks, nodes and resumed runs to compare.

Of files on a disk a checksum, because a copy has another time of change and another inode; of a
store its versions. No torch.
"""

from __future__ import annotations

import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flyte_ddp.data.index import ShardIndex
from flyte_ddp.data.source import CONCURRENT_READS, Source

# Names of facts. One that only one side knows is not compared: a version before this one has none,
# and versions in another store are others.
CONTENTS = "contents of the shards"
VERSIONS = "versions of the shards in"
BLOCK = 4096  # bytes
MAX_BLOCKS = 4096  # 16 MiB, that are read of all shards together


def describe_contents(source: Source, index: ShardIndex) -> dict[str, str]:
    """Return the facts of the shards' contents, by their names."""
    names = [name.decode() for name in index.names.tolist()]
    paths = [path for path in map(source.local_path, names) if path]
    versions = [] if paths else index.versions.tolist()
    found = {}
    if paths:
        found[CONTENTS] = compute_checksum(paths)
    if any(versions):
        checksum = hashlib.sha256(repr(versions).encode()).hexdigest()[:16]
        found[f"{VERSIONS} {source.join('') or 'the list'}"] = checksum
    return found


def is_comparable(name: str, expected: object, got: object) -> bool:
    """Return whether the fact with this name can be compared."""
    is_known = expected is not None and got is not None
    return is_known or not (name.endswith(CONTENTS) or VERSIONS in name)


def compute_checksum(paths: list[str]) -> str:
    """Return a checksum of the contents of files: of all bytes where they are few.

    Of larger ones `MAX_BLOCKS` are read, as many of each file, evenly spread from its beginning to
    its end; of more than `MAX_BLOCKS` files one block of each of so many.
    """
    chosen = np.linspace(0, len(paths) - 1, min(len(paths), MAX_BLOCKS)).round().astype(int)
    read = functools.partial(_digest_blocks, num_blocks=MAX_BLOCKS // len(chosen))
    with ThreadPoolExecutor(CONCURRENT_READS) as threads:
        digests = threads.map(read, [paths[number] for number in chosen])
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def _digest_blocks(path: str, num_blocks: int) -> bytes:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(str(size).encode())
            begins = np.arange(0, size, BLOCK)
            if len(begins) > num_blocks:
                # one alone is in the middle
                ends = (0, size - BLOCK) if num_blocks > 1 else (size // 2, size // 2)
                begins = np.linspace(*ends, num_blocks).astype(int)
            for begin in begins.tolist():
                digest.update(os.pread(file.fileno(), BLOCK, begin))
    except FileNotFoundError:  # which its reader names
        digest.update(b"none")
    return digest.digest()
