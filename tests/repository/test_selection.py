"""Which tests pytest collects: those that need a service or a device only if they are named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import OUTSIDE, pytest_ignore_collect

GPU = str(OUTSIDE / "gpu")


@pytest.mark.parametrize(
    ("named", "is_ignored"),
    [
        ([], True),
        ([str(OUTSIDE.parent)], True),
        ([str(OUTSIDE / "flyte")], True),
        ([GPU], None),
        ([f"{GPU}/test_gpu.py::test_one"], None),
        ([str(OUTSIDE)], None),
    ],
)
def test_a_folder_of_outside_is_collected_only_if_the_command_line_names_it(named, is_ignored):
    config = SimpleNamespace(args=named)
    assert pytest_ignore_collect(OUTSIDE / "gpu/test_gpu.py", config) is is_ignored
    assert pytest_ignore_collect(OUTSIDE.parent / "launch/test_place.py", config) is None
