"""Real runs are compared: each change is named, and nothing else."""

from __future__ import annotations

import pytest

from flyte_ddp.events import NOT_IN_HISTORY, to_line
from flyte_ddp.observers.reports.compared_run import find_changes, parse_run
from flyte_ddp.project.admission import IMAGE_VARIABLE
from tests.support.runs import new_run


@pytest.mark.long
def test_the_history_of_a_run_names_what_was_changed(tmp_path, monkeypatch):
    def train(name, image="registry/team:7", **changes):
        monkeypatch.setenv(IMAGE_VARIABLE, image)
        run = new_run(tmp_path / name).train(**changes)
        lines = [to_line(event) for event in run.events if not isinstance(event, NOT_IN_HISTORY)]
        return parse_run(name, "".join(lines).encode())

    first = train("first")
    for change, expected in (
        ({}, []),
        ({"learning_rate": 0.03}, ["config: learning_rate"]),
        ({"num_processes": 1}, ["ranks: world_sizes"]),
        ({"source": "1"}, ["data: description", "data: fingerprint"]),
        ({"image": "registry/team:8"}, ["origin: image"]),
    ):
        other = train("-".join(["run", *change]), **change)
        assert list(find_changes(first, other)) == expected
        assert other.seconds["steps: data"] > 0
        assert ("loss", "epoch") in other.curves
