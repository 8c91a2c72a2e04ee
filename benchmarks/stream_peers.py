"""A rank of one system that reads shards: `python -m benchmarks.stream_peers SYSTEM DIRECTORY
BATCHES`.

Each system has the same samples in its own format, shuffles as many of them with each other, and
has one loader process. The interpreter needs webdataset, mosaicml-streaming and datasets.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

NUM_SAMPLES, NUM_SHARDS, SAMPLE_BYTES = 16_384, 128, 16_384
BATCH_SIZE, SHUFFLED, LANES = 256, 2048, 8
SPLIT = 24  # batches before a resume at another number of ranks
STATE = "state.json"  # of a system that goes on there; written where it stopped


def write(directory: Path) -> Iterator[Any]:
    """Write the samples in the format of each system."""
    import pyarrow.parquet
    import webdataset as wds
    from streaming import MDSWriter

    columns = {"number": "int", "bin": "bytes"}
    draw, size = np.random.default_rng(0), NUM_SAMPLES // NUM_SHARDS
    for name in ("tar", "parquet"):
        (directory / name).mkdir()
    with MDSWriter(
        out=f"{directory}/mds", columns=columns, size_limit=(size + 1) * SAMPLE_BYTES
    ) as mds:
        for shard in range(NUM_SHARDS):
            rows = [
                {"number": number, "bin": draw.bytes(SAMPLE_BYTES)}
                for number in range(shard * size, (shard + 1) * size)
            ]
            file = directory / "parquet" / f"{shard:04d}.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=size)
            with wds.TarWriter(f"{directory}/tar/{shard:04d}.tar") as tar:
                for row in rows:
                    mds.write(row)
                    key, number = f"{row['number']:06d}", str(row["number"])
                    tar.write({"__key__": key, "number": number, "bin": row["bin"]})
    yield from ()


def ours(directory: Path) -> Iterator[Any]:
    from flyte_ddp.data import Shards
    from flyte_ddp.rank.batches import EpochBatches

    first = BATCH_SIZE * SPLIT if (directory / STATE).exists() else 0
    data = Shards(
        "s3://bucket/tar",
        transform=to_sample,
        lanes=LANES,
        window=SHUFFLED // LANES,
        cache_dir=f"{directory}/ours",
    )
    for batch, _, _ in EpochBatches(data, BATCH_SIZE, 0, 0, 1, None, first=first):
        (directory / STATE).touch()
        yield batch


def mosaic(directory: Path) -> Iterator[Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    share = BATCH_SIZE // dist.get_world_size()
    data = StreamingDataset(
        remote="s3://bucket/mds",
        local=f"{directory}/mosaic",
        batch_size=share,
        shuffle=True,
        shuffle_block_size=SHUFFLED,
        num_canonical_nodes=1,
    )
    loader = StreamingDataLoader(data, batch_size=share, num_workers=1, collate_fn=collate)
    if (directory / STATE).exists():
        loader.load_state_dict(json.loads((directory / STATE).read_text()))
    try:
        yield from loader
    finally:
        if dist.get_rank() == 0:
            (directory / STATE).write_text(json.dumps(loader.state_dict()))


def webdataset(directory: Path) -> Iterator[Any]:
    import webdataset as wds

    data = wds.WebDataset(
        f"{os.environ['AWS_ENDPOINT_URL']}/bucket/tar/{{0000..{NUM_SHARDS - 1:04d}}}.tar",
        shardshuffle=NUM_SHARDS,
        nodesplitter=wds.split_by_node,
        workersplitter=wds.split_by_worker,
        seed=0,
    )
    return load(data.shuffle(SHUFFLED).map(to_sample))


def datasets(directory: Path) -> Iterator[Any]:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    files = [f"s3://bucket/parquet/{shard:04d}.parquet" for shard in range(NUM_SHARDS)]
    data = load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = data.shuffle(seed=0, buffer_size=SHUFFLED)
    return load(split_dataset_by_node(data, dist.get_rank(), dist.get_world_size()))


def load(data: Any) -> Iterator[Any]:
    size = BATCH_SIZE // dist.get_world_size()
    yield from DataLoader(data, batch_size=size, num_workers=1, collate_fn=collate)


def to_sample(fields: dict[str, Any]) -> tuple[int, Any]:
    return int(fields["number"]), torch.frombuffer(bytearray(fields["bin"]), dtype=torch.uint8)


def collate(rows: list[Any]) -> Any:
    samples = [to_sample(row) if isinstance(row, dict) else row for row in rows]
    return torch.tensor([number for number, _ in samples]), torch.stack(
        [each for _, each in samples]
    )


SYSTEMS = {each.__name__: each for each in (write, ours, mosaic, webdataset, datasets)}


def main() -> None:
    system, directory, num_batches = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    directory.mkdir(exist_ok=True)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    dist.barrier()
    started, numbers = time.perf_counter(), list[int]()
    batches = SYSTEMS[system](directory)
    for found, _ in itertools.islice(batches, num_batches or None):
        numbers += found.tolist()
    seconds = time.perf_counter() - started
    batches.close()
    (directory / f"{dist.get_world_size()}-{dist.get_rank()}").write_text(
        json.dumps([seconds, numbers])
    )


if __name__ == "__main__":
    main()
