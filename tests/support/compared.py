"""Histories and run cards of made-up runs that differ in one thing."""

from __future__ import annotations

import dataclasses
import json

from flyte_ddp.events import to_line
from flyte_ddp.observers.reports.compared_run import parse_run
from flyte_ddp.storage import redact_values
from tests.support import sample_run


def make_history(losses=(1.5, 0.7, 0.5), **changes):
    """The history of a run with these held-out losses, as its file."""
    known = {
        "recipe_version": "a" * 64,
        "commit": "ba9876543210",
        "image": "registry/team:7",
        "arguments": "--lr 0.1",
        "named_arguments": {"width": 2},
        "data_fingerprint": "e" * 64,
    }
    started = sample_run.started(len(losses), **known)
    for name, value in changes.items():
        if isinstance(value, dict):
            changes[name] = {**getattr(started, name), **value}
    events = [dataclasses.replace(started, **changes), sample_run.loaded()]
    sizes = changes.get("world_size", 2)
    for number, loss in enumerate(losses, 1):
        epoch = sample_run.epoch(number, sizes)
        phases = {"data": [0.001] * sizes, "forward": [0.002] * sizes}
        events.append(dataclasses.replace(epoch, test_loss=loss, rank_phase_seconds=phases))
    events.append(sample_run.finished(len(losses)))
    events = [dataclasses.replace(each, at=100.0 + at) for at, each in enumerate(events)]
    return "".join(to_line(redact_values(each)) for each in events).encode()


def make_card(contents):
    """The run card of a history, as its file."""
    return json.dumps(parse_run("", contents).card).encode()
