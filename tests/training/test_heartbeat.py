"""Long operations report progress, hangs do not, and all ranks stop after the same step."""

from __future__ import annotations

import time

import torch

from flyte_ddp.training import main as rank_main
from flyte_ddp.training.main import beat_while_compiling, keep_beating


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_operation_that_takes_too_long_counts_as_a_stall(monkeypatch):
    monkeypatch.setattr(rank_main, "BEAT_INTERVAL", 0.01)
    monkeypatch.setattr(rank_main, "MAX_OPERATION_SECONDS", 0.05)
    beats = []
    with keep_beating(lambda: beats.append(time.monotonic())):
        wait_for(lambda: time.monotonic() > beats[-1] + 0.4)


def test_a_cold_compilation_reports_progress(monkeypatch):
    monkeypatch.setattr(rank_main, "BEAT_INTERVAL", 0.01)
    beats = []
    beat_while_compiling(lambda: beats.append(time.monotonic()))
    assert beats == []

    def slow_backend(graph, inputs):
        wait_for(lambda: len(beats) > 3)
        return graph.forward

    torch.compile(lambda inputs: inputs + 1, backend=slow_backend)(torch.zeros(2))
    num_beats = len(beats)
    time.sleep(0.1)

    assert len(beats) == num_beats
