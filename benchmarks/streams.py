"""The cost of the order of shards, and its worth: `python -m benchmarks.streams`.

Counts, times and memory need no store. The last row trains a small model on digits in shards, which
were written in a random order or class by class, and on the same samples shuffled whole.

`--peers PYTHON` compares an epoch from a slow S3 server with other systems. PYTHON is the
interpreter of an environment with webdataset, mosaicml-streaming, datasets, litdata, lancedb and
grain beside what is required here.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import s3fs
import torch
from moto.server import ThreadedMotoServer
from pyarrow.parquet import write_table
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks.stream_peers import NUM_SAMPLES, SAMPLE_BYTES, SPLIT
from flyte_ddp import session
from flyte_ddp.data import Shards, readers
from flyte_ddp.data.order import EpochOrder
from flyte_ddp.data.source import CONCURRENT_READS
from flyte_ddp.data.write import encode_mds
from flyte_ddp.rank.plan import EpochPlan, Share

EPOCHS, BATCH_SIZE, NUM_SHARDS, NUM_SEEDS = 10, 32, 140, 16
SAMPLE, SHARD = 1 << 16, 1 << 21  # bytes; data for the measurement of memory
# the store's latency in seconds, bandwidth in bytes a second, and bytes per part
LATENCY, BANDWIDTH, PART = 0.02, 50e6, 1 << 16
STORE = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "key",
    "AWS_DEFAULT_REGION": "us-east-1",
}
FORMATS = "tar", "jsonl", "mds", "parquet"
served: Counter[str] = Counter()  # bytes of the store's answers, by method
MEMORY_INTERVAL = 0.5  # seconds between two looks at the memory of ranks
PROCESS = 48 << 20  # bytes of a process without samples, index and places


def main() -> int:
    torch.set_num_threads(1)
    parts: list[Callable[[], Iterator[tuple[str, str]]]]
    parts = [measure_order, measure_resume, measure_bytes, measure_parts, measure_bounds]
    parts += [measure_loss]
    if sys.argv[1:2] == ["--peers"]:
        parts = [functools.partial(measure_peers, sys.argv[2])]
    for measure in parts:
        for name, value in measure():
            print(f"| {name} | {value} |", flush=True)
    return 0


def measure_order() -> Iterator[tuple[str, str]]:
    sizes = np.random.default_rng(0).integers(500, 1500, 10**6)
    tracemalloc.start()
    started = time.perf_counter()
    EpochOrder(sizes, seed=0, epoch=0, lanes=64, window=4096).batch(0, 4096)
    seconds = time.perf_counter() - started
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    yield (
        "order of an epoch of 10^6 shards, with its first batch",
        f"{seconds:.2f} s, {peak:.0f} MiB",
    )


def measure_resume() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as place:
        np.savez(
            f"{place}/flyte_ddp_index.npz",
            names=np.array([b"shard-%06d.tar" % each for each in range(10**4)]),
            samples=np.full(10**4, 20_000),
            sizes=np.full(10**4, 64 << 20),
            versions=np.zeros(10**4, "S1"),
        )
        started = time.perf_counter()
        shards = Shards(place)
        plan = EpochPlan(len(shards), 256, 0, 3, Share(0, 4), first=10**8, stream=shards)
        samples = next(plan.batches())
        seconds = time.perf_counter() - started
        count = len(set((samples[:64].numpy() // 20_000).tolist()))
        yield (
            "start at sample 10^8 of 10^4 shards, to the first samples",
            f"{seconds:.2f} s, of {count} shards of a rank of 4",
        )


def measure_bytes() -> Iterator[tuple[str, str]]:
    order = EpochOrder(np.full(1000, 180), seed=0, epoch=1, lanes=48, window=2**18 // 48)
    for num_ranks in (2, 3, 4, 5):
        needed: list[set[int]] = [set() for _ in range(num_ranks)]
        for first in range(0, order.num_samples, 96):
            parts = np.array_split(order.batch(first, 96), num_ranks)
            for shards, part in zip(needed, parts, strict=True):
                shards.update((part // 180).tolist())
        most = max(map(len, needed)) * num_ranks / 1000
        yield f"bytes of the busiest of {num_ranks} ranks / their equal part", f"{most:.2f}"


def measure_parts() -> Iterator[tuple[str, str]]:
    """Read from the middle of windows on, on one of two ranks, by whole shards and by parts."""
    with tempfile.TemporaryDirectory(prefix="streams-") as name, slow_store() as url:
        os.environ.update(STORE, AWS_ENDPOINT_URL=url)
        files = s3fs.S3FileSystem()
        files.mkdir("parts")
        write_formats(Path(name))
        for kind in FORMATS:
            files.put(f"{name}/{kind}", f"parts/{kind}", recursive=True)
            Shards(f"s3://parts/{kind}").prepare()
            found = []
            for part_bytes in (1 << 40, SHARD // 8):  # A part is a sixteenth of 64 MiB by default.
                readers.PART_BYTES = part_bytes
                data = Shards(
                    f"s3://parts/{kind}",
                    lanes=8,
                    window=48,
                    cache_dir=f"{name}/{part_bytes}-{kind}",
                )
                before, count = served["GET"], 0
                middle = len(data) // 2
                plan = EpochPlan(len(data), 64, 0, 0, Share(0, 2), first=middle, stream=data)
                for batch in plan.batches():
                    count += sum(1 for sample in plan.share.cut(batch).tolist() if data[sample])
                read = data._index.num_bytes / len(data) * count
                found.append(f"{(served['GET'] - before) / read:.2f}")
            yield f"{kind}, bytes fetched after a resume, by shards; by parts", "; ".join(found)


def write_formats(place: Path) -> None:
    """Write the same samples in each of `FORMATS`."""
    for kind in FORMATS:
        (place / kind).mkdir()
    for shard in range(24):
        rows = np.random.default_rng(shard).integers(
            0, 256, (2 * SHARD // SAMPLE, SAMPLE), np.uint8
        )
        files = {kind: place / kind / f"{shard:04d}.{kind}" for kind in FORMATS}
        files["mds"].write_bytes(encode_mds(rows, "bin"))
        contents = [row.tobytes() for row in rows]
        files["jsonl"].write_text(
            "\n".join(json.dumps({"bin": base64.b64encode(each).decode()}) for each in contents)
        )
        write_table(pyarrow.table({"bin": contents}), files["parquet"], row_group_size=4)
        with tarfile.open(files["tar"], "w") as tar:
            for number, each in enumerate(contents):
                member = tarfile.TarInfo(f"{number:06d}.bin")
                member.size = SAMPLE
                tar.addfile(member, io.BytesIO(each))


def measure_bounds() -> Iterator[tuple[str, str]]:
    """Read shards of 256 MiB. Raises AssertionError if memory or cache are above their bounds."""
    with tempfile.TemporaryDirectory() as name:
        for number in range(128):
            Path(name, f"{number:04d}.own").write_bytes(bytes([number]) * SHARD)
        window, workers, cache = 64, 2, Path(name, "cache")
        limit = 2 * (8 + 1) * (window * SAMPLE + 2 * SHARD)
        data = Shards(
            name, reader=read_parts, window=window, cache_dir=str(cache), cache_gib=limit / 2**30
        )
        data.prepare()
        process, batch = psutil.Process(), 64
        before, used, held = process.memory_full_info().pss, 0, 0
        for _ in session.batches(data, batch, 0, num_workers=workers):
            found = [each.memory_full_info().pss for each in (process, *process.children())]
            used = max(used, sum(found) - before)
            with contextlib.suppress(FileNotFoundError):  # The file has just left the cache.
                held = max(held, sum(each.stat().st_size for each in cache.iterdir()))
    for what, most, bound in (
        ("memory", used, (1 + workers) * PROCESS + 2 * (workers + 1) * batch * SAMPLE),
        ("cache", held, limit + (1 + workers) * CONCURRENT_READS * SHARD),
    ):
        yield f"{what} of a rank / its bound", f"{most / 2**20:.0f} / {bound / 2**20:.0f} MiB"
        assert most <= bound, f"{what}: expected at most {bound} bytes, got {most}"


def read_parts(path: str) -> Iterator[dict[str, Any]]:
    for part in np.fromfile(path, np.uint8).reshape(-1, SAMPLE):
        yield {"bytes": part}


def measure_peers(python: str) -> Iterator[tuple[str, str]]:
    """Read the same samples with each system, by an interpreter that has them all."""
    systems = "ours", "mosaic", "webdataset", "datasets"
    with tempfile.TemporaryDirectory(prefix="streams-") as name, slow_store() as url:
        place = Path(name)
        os.environ.update(STORE, AWS_ENDPOINT_URL=url, S3_ENDPOINT_URL=url)
        run_ranks(python, 1, "write", place, 0)
        files = s3fs.S3FileSystem()
        files.mkdir("bucket")
        for kind in ("mds", "parquet", "tar"):
            files.put(f"{place}/{kind}", f"bucket/{kind}", recursive=True, ACL="public-read")
        Shards("s3://bucket/tar").prepare()
        for ranks in (1, 2):
            ours: list[float] = []
            for system in systems:
                before = served["GET"]
                found, memory = run_ranks(python, ranks, system, place / f"{system}-{ranks}", 0)
                fetched = (served["GET"] - before) / (NUM_SAMPLES * SAMPLE_BYTES)
                paces = measure_paces(found)
                ours = ours or paces
                values = [
                    f"{pace:,.0f} samples/s {when}, ours / it {own / pace:.2f}"
                    for when, pace, own in zip(
                        ("in all", "after a quarter"), paces, ours, strict=True
                    )
                ]
                values.append(f"first batch after {max(times[0] for times, _ in found):.2f} s")
                values.append(f"{fetched:.2f} of the samples' bytes fetched")
                values.append(f"{memory / ranks / 2**20:,.0f} MiB for each rank and its loader")
                values.append(count_wrong([found]))
                yield f"{system}, an epoch on {ranks} ranks", "; ".join(values)
        for system in (*systems, "litdata", "lancedb", "grain"):
            run = place / f"{system}-resumed"
            before = run_ranks(python, 3, system, run, SPLIT)[0]
            try:
                result = count_wrong([before, run_ranks(python, 2, system, run, 0)[0]])
            except subprocess.CalledProcessError:
                result = "2 ranks cannot resume, see the traceback"
            yield f"{system}, {SPLIT} batches on 3 ranks, the rest on 2", result


def measure_paces(ranks: list[Any]) -> list[float]:
    """Return the samples a second of an epoch, and of its last three quarters: without the start
    of each system.
    """
    count = sum(len(numbers) for _, numbers in ranks)
    all_of_it = max(times[-1] for times, _ in ranks)
    rest = max(times[-1] - times[len(times) // 4 - 1] for times, _ in ranks)
    return [count / all_of_it, 0.75 * count / rest]


def count_wrong(runs: list[Any]) -> str:
    """Return how many samples were lost or doubled by ranks that read an epoch."""
    numbers = [number for ranks in runs for _, found in ranks for number in found]
    lost = NUM_SAMPLES - len(set(numbers))
    return f"{lost} lost, {len(numbers) - len(set(numbers))} doubled"


def run_ranks(
    python: str, size: int, system: str, place: Path, num_batches: int
) -> tuple[list[Any], int]:
    """Return for each rank the seconds until each batch, and its samples; and the most memory that
    the ranks and their loader processes had together, in bytes.
    """
    launch = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    module = ["-m", "benchmarks.stream_peers", system, str(place), str(num_batches)]
    launcher = psutil.Popen(launch + module)
    most_bytes = 0
    while launcher.poll() is None:
        most_bytes = max(most_bytes, sum(map(count_bytes, launcher.children(recursive=True))))
        time.sleep(MEMORY_INTERVAL)
    if launcher.returncode:
        raise subprocess.CalledProcessError(launcher.returncode, module)
    return [json.loads(file.read_text()) for file in place.glob(f"{size}-*")], most_bytes


def count_bytes(process: psutil.Process) -> int:
    """Return the memory of a process, and its part of what it shares; 0 if it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


@contextlib.contextmanager
def slow_store() -> Iterator[str]:
    """Yield the URL of an S3 server that answers after `LATENCY`, with `BANDWIDTH` in all."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # The server would log each request.
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    assert moto._server is not None
    app, free_at = moto._server.app, 0.0

    def answer(environ: Any, start_response: Any) -> Iterator[bytes]:
        nonlocal free_at
        time.sleep(LATENCY if environ["REQUEST_METHOD"] in ("GET", "HEAD") else 0)
        contents = memoryview(b"".join(app(environ, start_response)))
        served[environ["REQUEST_METHOD"]] += len(contents)
        for first in range(0, len(contents), PART):
            free_at = max(time.monotonic(), free_at) + PART / BANDWIDTH
            time.sleep(max(0.0, free_at - time.monotonic()))
            yield contents[first : first + PART].tobytes()

    moto._server.app = answer
    try:
        yield "http://{}:{}".format(*moto.get_host_and_port())
    finally:
        moto.stop()


def measure_loss() -> Iterator[tuple[str, str]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    classes = torch.tensor(digits.target)
    chosen = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    train, held_out = chosen[:1400], chosen[1400:]
    data: dict[str, Any] = {"shuffled whole": TensorDataset(pixels[train], classes[train])}
    with tempfile.TemporaryDirectory() as name:
        for how, order in (("seeded", train), ("class by class", train[classes[train].argsort()])):
            place = Path(name, how)
            place.mkdir()
            for number, part in enumerate(order.tensor_split(NUM_SHARDS)):
                lines = [
                    json.dumps([pixels[each].tolist(), int(classes[each])])
                    for each in part.tolist()
                ]
                (place / f"{number:04d}.lines").write_text("\n".join(lines))
            data[how] = Shards(str(place), reader=read_lines, transform=to_sample, window=16)
            data[how].prepare()
        losses = {}
        for how, each in data.items():
            losses[how] = [
                train_model(each, seed, pixels[held_out], classes[held_out])
                for seed in range(NUM_SEEDS)
            ]
    whole = np.mean(losses.pop("shuffled whole"))
    for how, found in losses.items():
        ratio = np.mean(found) / whole
        yield f"held-out loss, shards {how} / shuffled whole ({whole:.3f})", f"{ratio:.3f}"


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    for line in Path(path).read_text().splitlines():
        yield dict(zip(("pixels", "digit"), json.loads(line), strict=True))


def to_sample(fields: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.tensor(fields["pixels"]), fields["digit"]


def train_model(data: Any, seed: int, pixels: torch.Tensor, classes: torch.Tensor) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for (batch, targets), weight in session.batches(data, BATCH_SIZE, epoch, seed=seed):
            optimizer.zero_grad()
            (weight * functional.cross_entropy(model(batch), targets)).backward()
            optimizer.step()
    with torch.no_grad():
        return float(functional.cross_entropy(model(pixels), classes))


if __name__ == "__main__":
    sys.exit(main())
