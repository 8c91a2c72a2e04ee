"""Facts about the contents of shards. Ranks, nodes and resumed runs compare them.

Files on a disk have a checksum, because a copy has another time of change and another inode. Files
in a store have versions. Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flyte_ddp.data.index import ShardIndex
from flyte_ddp.data.source import CONCURRENT_READS, Source

# Names of facts. A fact that only one side knows is not compared: earlier versions of this package
# recorded none, and another store has other versions.
CONTENTS = "contents of the shards"
VERSIONS = "versions of the shards in"
BLOCK = 4096  # bytes
MAX_BLOCKS = 4096  # blocks of all shards together, 16 MiB


def describe_contents(source: Source, index: ShardIndex) -> dict[str, str]:
    """Return the facts of the shards' contents, by their names."""
    names = [name.decode() for name in index.names.tolist()]
    paths = [path for path in map(source.local_path, names) if path]
    versions = index.versions.tolist()
    found = {}
    if paths:
        versions = []
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
    """Return a checksum of the contents of files. If the files are small, all bytes are read.

    Of larger files `MAX_BLOCKS` blocks are read, the same number from each file, evenly spread from
    its beginning to its end. If there are more than `MAX_BLOCKS` files, one block is read from each
    of `MAX_BLOCKS` files.
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
                ends = (0, size - BLOCK)
                if num_blocks <= 1:
                    ends = (size // 2, size // 2)  # a single block is in the middle
                begins = np.linspace(*ends, num_blocks).astype(int)
            for begin in begins.tolist():
                digest.update(os.pread(file.fileno(), BLOCK, begin))
    except FileNotFoundError:  # the reader of the file reports it
        digest.update(b"none")
    return digest.digest()
