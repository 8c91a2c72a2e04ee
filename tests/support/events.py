"""Events as plain values, to cross from a process of a test to the test."""

from __future__ import annotations

import dataclasses

from flyte_ddp.events.history import KINDS, restore_value


def to_dict(event):
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def from_dict(values):
    kind, *names = values  # `to_dict` has the kind first
    return restore_value({name: values[name] for name in names}, KINDS[values[kind]])
