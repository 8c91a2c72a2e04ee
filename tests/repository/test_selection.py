"""Which tests pytest collects: those that need a service or a device only if they are named. Which
files `make test-long` finds.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import OUTSIDE, pytest_collection_modifyitems, pytest_ignore_collect

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


def test_a_long_test_in_a_file_that_make_test_long_does_not_find_is_refused(tmp_path):
    """Its mark may come from another file, such as a list of parameters."""
    (tmp_path / "test_found.py").write_text("@pytest.mark.long\ndef test_one(): ...\n")
    (tmp_path / "test_missed.py").write_text("@SLOWEST\ndef test_one(): ...\n")

    def make_item(file, *marks):
        return SimpleNamespace(
            path=tmp_path / file, get_closest_marker=lambda name: name in marks or None
        )

    pytest_collection_modifyitems(
        [make_item("test_found.py", "long"), make_item("test_missed.py", "gpu")]
    )
    with pytest.raises(pytest.UsageError, match=r"got none in \S+/test_missed\.py$"):
        pytest_collection_modifyitems(
            [make_item("test_found.py", "long"), make_item("test_missed.py", "long")]
        )
