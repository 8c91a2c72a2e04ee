"""Shards of documents. Each token has a number of its own: 1,000 times the document's number, and
its place.
"""

from __future__ import annotations

import numpy

from flyte_ddp.data import Packed, Shards
from tests.support.image_store import write_tree
from tests.support.shards import json_lines, parquet

LENGTH = 32


def draw_lengths(count, seed=0, length=LENGTH):
    """Lognormal lengths with a median of an eighth of a row."""
    drawn = numpy.random.default_rng(seed).lognormal(numpy.log(length / 8), 1.0, count)
    return numpy.maximum(1, drawn.astype(numpy.int64))


def make_document(number, length, is_chat=False):
    tokens = [1000 * number + place for place in range(length)]
    if not is_chat:
        return {"tokens": tokens}
    labels = [-100 if place % 7 < 3 else token for place, token in enumerate(tokens)]
    return {"tokens": tokens, "labels": labels}


def make_documents(lengths, is_chat=False):
    return [make_document(number, length, is_chat) for number, length in enumerate(lengths)]


def write_documents(documents, directory, num_shards=4, write=json_lines):
    suffix = ".parquet" if write is parquet else ".jsonl"
    parts = numpy.array_split(numpy.arange(len(documents)), num_shards)
    tree = {}
    for shard, part in enumerate(parts):
        tree[f"{shard:04d}{suffix}"] = write([documents[number] for number in part])
    return str(write_tree(tree, directory))


def make_packed(documents, directory, length=LENGTH, num_shards=4, lanes=None, **options):
    shards = Shards(write_documents(documents, directory, num_shards), lanes=lanes)
    data = Packed(shards, length, **options)
    data.prepare()
    return data
