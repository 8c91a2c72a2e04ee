"""A data set of images in S3 for a function of your own, in place of dask-pytorch-ddp's
`S3ImageFolder`: directories are classes. `pip install boto3`.

    from examples.scripts.s3_images import S3Images

    data = S3Images("bucket", "flowers/train", transform=transform)
    for batch, weight in session.batches(data, 64, epoch, num_workers=4):
        ...

A recipe needs none: `image_folder` reads such a place, checks it, and keeps what it has read.
"""

import functools
import io
import os
from pathlib import PurePosixPath

import boto3
from botocore import UNSIGNED
from botocore.client import Config
from PIL import Image
from torch.utils.data import Dataset

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


@functools.cache
def s3_client(anon, process):
    """Return one client for each process: a connection must not be shared with a forked loader."""
    retries = {"mode": "standard", "max_attempts": 10}
    signed = {"signature_version": UNSIGNED} if anon else {}
    return boto3.client("s3", config=Config(retries=retries, **signed))


class S3Images(Dataset):
    """Images below `prefix` of a bucket, each with the number of its directory's name.

    Keys are listed once, in their order, which all ranks share. Samples are read when they are
    asked for, by the loaders of every rank.
    """

    def __init__(self, s3_bucket, s3_prefix, transform=None, target_transform=None, anon=False):
        self.bucket, self.anon = s3_bucket, anon
        self.transform, self.target_transform = transform, target_transform
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=s3_bucket, Prefix=s3_prefix.rstrip("/") + "/"
        )
        # a page of nothing has no "Contents"
        keys = (each["Key"] for page in pages for each in page.get("Contents", ()))
        self.keys = sorted(key for key in keys if PurePosixPath(key).suffix.lower() in SUFFIXES)
        if not self.keys:
            raise ValueError(
                f"s3_prefix: expected images below s3://{s3_bucket}/{s3_prefix}, got none"
            )
        self.classes = sorted({class_of(key) for key in self.keys})
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    @property
    def client(self):
        return s3_client(self.anon, os.getpid())

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        key = self.keys[index]
        contents = self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        image = Image.open(io.BytesIO(contents)).convert("RGB")
        target = self.class_to_idx[class_of(key)]
        if self.transform:
            image = self.transform(image)
        if self.target_transform:
            target = self.target_transform(target)
        return image, target


def class_of(key):
    return PurePosixPath(key).parent.name
