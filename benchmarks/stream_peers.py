"""A rank of one system that reads shards: `python -m benchmarks.stream_peers SYSTEM DIRECTORY
BATCHES`.

Each system has the same samples in its own format, shuffles as many of them with each other, and
has one loader process. The interpreter needs webdataset, mosaicml-streaming, datasets, litdata,
lancedb and grain. LanceDB and litData keep their samples on the disk, and Grain reads any indexable
source, here the samples' numbers, so only the exactness of these three is compared.

The global batch is the same at each number of ranks, as MosaicML Streaming, litData and LanceDB ask
for where a run resumes at another number.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

NUM_SAMPLES, NUM_SHARDS, SAMPLE_BYTES = 16_384, 128, 16_384
# The batch size is divisible by 1, 2 and 3 ranks, as MosaicML Streaming's and litData's pages ask,
# and by SPLITS, as LanceDB's page asks.
BATCH_SIZE, SPLITS = 252, 6
SHUFFLED, LANES = 2048, 8
SPLIT = 24  # batches before a resume at another number of ranks
STATE = "state.json"  # state of a system that resumes; each rank writes it where it stopped


def write(directory: Path) -> Iterator[Any]:
    """Write the samples in the format of each system."""
    import pyarrow.parquet
    import webdataset as wds
    from lancedb import connect
    from litdata.streaming import Cache
    from streaming import MDSWriter

    columns = {"number": "int", "bin": "bytes"}
    draw, size = np.random.default_rng(0), NUM_SAMPLES // NUM_SHARDS
    chunks, tables = Cache(f"{directory}/litdata", chunk_size=size), []
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
                    chunks[row["number"]] = row
            tables.append(pyarrow.Table.from_pylist(rows))
    connect(f"{directory}/lance").create_table("samples", pyarrow.concat_tables(tables))
    chunks.done()
    chunks.merge()
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
    try:
        for batch, _, _ in EpochBatches(data, BATCH_SIZE, 0, 0, 1, None, first=first):
            yield batch
    finally:
        (directory / STATE).touch()


def mosaic(directory: Path) -> Iterator[Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(
        remote="s3://bucket/mds",
        local=f"{directory}/mosaic",
        batch_size=share_of_batch(),
        shuffle=True,
        shuffle_block_size=SHUFFLED,
        num_canonical_nodes=1,
    )
    loader = StreamingDataLoader(
        data, batch_size=share_of_batch(), num_workers=1, collate_fn=collate
    )
    return go_on(directory, loader, loader)


def litdata(directory: Path) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(f"{directory.parent}/litdata", shuffle=True, drop_last=False)
    loader = StreamingDataLoader(
        data, batch_size=share_of_batch(), num_workers=1, collate_fn=collate
    )
    return go_on(directory, loader, loader)


def lancedb(directory: Path) -> Iterator[Any]:
    import lancedb as lance
    from lancedb.streaming import StreamingDataset

    table = lance.connect(f"{directory.parent}/lance").open_table("samples")
    data = StreamingDataset(
        table,
        num_splits=SPLITS,
        shuffle_seed=0,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    batches = DataLoader(data, batch_size=share_of_batch(), collate_fn=collate)
    return go_on(directory, batches, data, StreamingDataset.merge_state_dicts)


def grain(directory: Path) -> Iterator[Any]:
    import grain.experimental
    from grain.sharding import ShardOptions

    data = grain.MapDataset.source(range(NUM_SAMPLES)).seed(0).shuffle()
    shard = ShardOptions(dist.get_rank(), dist.get_world_size())
    batches = iter(grain.experimental.ElasticIterator(data, BATCH_SIZE, shard))
    source = SimpleNamespace(load_state_dict=batches.set_state, state_dict=batches.get_state)
    pairs = ((torch.as_tensor(numbers), None) for numbers in batches)
    return go_on(directory, pairs, source)


def first_state(states: list[Any]) -> Any:
    """Return the state of rank 0, which serves all ranks."""
    return states[0]


def own_state(states: list[Any]) -> Any:
    """Return the state of the rank with this rank's number in the run before."""
    return states[dist.get_rank()]


def go_on(
    directory: Path, batches: Any, source: Any, choose: Callable[[list[Any]], Any] = first_state
) -> Iterator[Any]:
    """Yield the batches that follow the states of `source` in the ranks of an earlier run.

    Args:
        choose: builds the state that this rank loads from the states of all ranks.
    """
    files = sorted(directory.glob(f"{STATE}-*"))
    if files:
        source.load_state_dict(choose([json.loads(file.read_text()) for file in files]))
    try:
        yield from batches
    finally:
        (directory / f"{STATE}-{dist.get_rank()}").write_text(json.dumps(source.state_dict()))


def webdataset(directory: Path) -> Iterator[Any]:
    import webdataset as wds

    data = wds.WebDataset(
        f"{os.environ['AWS_ENDPOINT_URL']}/bucket/tar/{{0000..{NUM_SHARDS - 1:04d}}}.tar",
        shardshuffle=NUM_SHARDS,
        nodesplitter=wds.split_by_node,
        workersplitter=wds.split_by_worker,
        seed=0,
    )
    data = data.shuffle(SHUFFLED).map(to_sample)
    yield from DataLoader(data, batch_size=share_of_batch(), num_workers=1, collate_fn=collate)


def datasets(directory: Path) -> Iterator[Any]:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = [f"s3://bucket/parquet/{shard:04d}.parquet" for shard in range(NUM_SHARDS)]
    data = load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = data.shuffle(seed=0, buffer_size=SHUFFLED)
    data = split_dataset_by_node(data, dist.get_rank(), dist.get_world_size())
    loader = StatefulDataLoader(
        data, batch_size=share_of_batch(), num_workers=1, collate_fn=collate
    )
    return go_on(directory, loader, loader, own_state)


def share_of_batch() -> int:
    """Return this rank's part of the global batch.

    Raises:
        AssertionError: the ranks' parts would not make up the global batch.
    """
    share, rest = divmod(BATCH_SIZE, dist.get_world_size())
    assert rest == 0, f"{BATCH_SIZE} samples, {dist.get_world_size()} ranks"
    return share


def to_sample(fields: dict[str, Any]) -> tuple[int, Any]:
    return int(fields["number"]), torch.frombuffer(bytearray(fields["bin"]), dtype=torch.uint8)


def collate(rows: list[Any]) -> Any:
    samples = [to_sample(row) if isinstance(row, dict) else row for row in rows]
    return torch.tensor([number for number, _ in samples]), torch.stack(
        [each for _, each in samples]
    )


SYSTEMS = {
    each.__name__: each
    for each in (write, ours, mosaic, webdataset, datasets, litdata, lancedb, grain)
}


def main() -> None:
    system, directory, num_batches = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    directory.mkdir(exist_ok=True)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    dist.barrier()
    started, numbers, times = time.perf_counter(), list[int](), list[float]()
    batches = SYSTEMS[system](directory)
    for found, _ in itertools.islice(batches, num_batches or None):
        numbers += found.tolist()
        times.append(time.perf_counter() - started)
    dist.barrier()  # A rank that begins late must not take the new state for its own.
    batches.close()
    (directory / f"{dist.get_world_size()}-{dist.get_rank()}").write_text(
        json.dumps([times, numbers])
    )


if __name__ == "__main__":
    main()
