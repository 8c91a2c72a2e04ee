"""Measure images per second from a bucket, through two loader processes: `python -m benchmarks.images ours|per_image`.

The bucket is on moto's server in its own process, which delays every answer by `LATENCY`: a server on the same machine
answers sooner than any real store, and the data sets differ in what they do while they wait. The first pass over the
images starts the loader processes; the second is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LATENCY = 0.02  # seconds until the first byte: within a region S3 takes 10 to 30 ms
NUM_IMAGES = 256
IMAGE_SIZE = 224  # pixels of each side, some 20 kB as a JPEG
BATCH_SIZE = 32
NUM_WORKERS = 2
BUCKET, PREFIX = "images", "flowers"
CLASSES = ("anemone", "bluebell")


def ours(directory: Path) -> Callable[[], int]:
    """Read the recipe's data set as the training loop does."""
    import torch

    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.rank.data import open_samples
    from flyte_ddp.recipes import get_recipe
    from flyte_ddp.recipes.prepare import prepare_data
    from flyte_ddp.world import World

    recipe = get_recipe("image_folder", {"augment": False})
    prepare_data(recipe, f"s3://{BUCKET}/{PREFIX}", directory)
    train, _ = recipe.datasets(directory)
    world = World(0, 0, 1, torch.device("cpu"))
    (samples,) = open_samples([train], recipe, TrainingConfig(data_workers=NUM_WORKERS), world)
    indices = torch.arange(len(samples)).split(BATCH_SIZE)
    return lambda: sum(len(targets) for _, targets in samples.batches(indices, epoch=1))


def per_image(directory: Path) -> Callable[[], int]:
    """Read a data set that opens a client and a temporary file per image, as dask-pytorch-ddp does."""
    import boto3
    from torch.utils.data import DataLoader

    listed = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=PREFIX)
    dataset = ClientPerImage([entry["Key"] for page in listed for entry in page["Contents"]])
    loader: DataLoader[Any] = DataLoader(
        dataset, BATCH_SIZE, num_workers=NUM_WORKERS, persistent_workers=True, multiprocessing_context="spawn"
    )
    return lambda: sum(len(targets) for _, targets in loader)


class ClientPerImage:
    """Images of a bucket by their keys, each fetched by its own client."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, sample: int) -> Any:
        import boto3
        from PIL import Image
        from torchvision import transforms

        with tempfile.TemporaryFile() as file:
            boto3.resource("s3").Bucket(BUCKET).download_fileobj(self.keys[sample], file)
            file.seek(0)
            image = Image.open(file).convert("RGB")
        # The same steps as the recipe's, so that only the fetching differs.
        resized = transforms.CenterCrop(IMAGE_SIZE)(transforms.Resize(IMAGE_SIZE * 8 // 7)(image))
        return transforms.PILToTensor()(resized), CLASSES.index(self.keys[sample].split("/")[-2])


def serve(num_images: int) -> None:
    """Run the server: print its address and serve until killed."""
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # which keeps connections open, as S3 does

        def log_request(self, *values: object) -> None:
            pass

    def delayed(environ: Any, start_response: Any) -> Any:
        time.sleep(LATENCY)
        return application(environ, start_response)

    application = DomainDispatcherApplication(create_backend_app)
    backend = s3_backends["123456789012"]["aws"]
    backend.create_bucket(BUCKET, "us-east-1")
    for number in range(num_images):
        for split in ("train", "val") if number < len(CLASSES) else ("train",):
            name = f"{PREFIX}/{split}/{CLASSES[number % len(CLASSES)]}/{number:05d}.jpg"
            backend.put_object(BUCKET, name, _photograph(number))
    server = make_server("127.0.0.1", 0, delayed, threaded=True, request_handler=Quiet)
    print(json.dumps({"endpoint": f"http://127.0.0.1:{server.server_port}"}), flush=True)
    server.serve_forever()


def _photograph(number: int) -> bytes:
    """Return soft noise as a JPEG, about as large as a photograph with as many pixels."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(number).integers(0, 256, (IMAGE_SIZE // 4, IMAGE_SIZE // 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    return file.getvalue()


@contextlib.contextmanager
def _server(num_images: int) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.images", "serve", "--images", str(num_images)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["endpoint"]
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__)
    parser.add_argument("side", choices=("ours", "per_image", "serve"))
    parser.add_argument("--images", type=int, default=NUM_IMAGES, help="images in the bucket (%(default)s)")
    arguments = parser.parse_args()
    if arguments.side == "serve":
        serve(arguments.images)
    with _server(arguments.images) as endpoint, tempfile.TemporaryDirectory() as directory:
        os.environ.update(
            AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1"
        )
        read_all = {"ours": ours, "per_image": per_image}[arguments.side](Path(directory))
        read_all()
        warm_at = time.time()
        num_read = read_all()
        seconds = time.time() - warm_at
    print(json.dumps({"first_step_at": warm_at, "images_per_second": num_read / seconds}), flush=True)


if __name__ == "__main__":
    main()
