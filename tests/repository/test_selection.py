"""Which tests pytest collects: those that need a service or a device only if they are named. Which
files `make test-long` finds. What happens at a limit of time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests import conftest
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


def test_no_test_begins_after_the_limit_and_the_last_line_counts_those(monkeypatch):
    conftest.pytest_runtest_setup()
    monkeypatch.setattr(conftest, "UNTIL", time.time() - 1)
    with pytest.raises(pytest.skip.Exception) as skipped:
        conftest.pytest_runtest_setup()
    lines = []
    reports = [SimpleNamespace(longrepr=("file", 1, f"Skipped: {skipped.value}"))] * 2
    other = SimpleNamespace(longrepr=("file", 1, "Skipped: no GPU"))
    reporter = SimpleNamespace(
        stats={"skipped": [*reports, other], "passed": [1, 2, 3]}, write_line=lines.append
    )
    conftest.pytest_terminal_summary(reporter)
    assert lines == ["!!! 2 tests NOT run beside 3: no time was left for it !!!"]
    lines.clear()
    reporter.stats["skipped"] = [other]
    conftest.pytest_terminal_summary(reporter)
    assert lines == []


def test_with_a_limit_files_come_in_another_order_each_time_and_stay_whole(monkeypatch):
    names = [f"{file}::{test}" for file in "abcdefgh" for test in (1, 2)]
    orders = set()
    for until in (1e12, 1e12 + 1, 1e12 + 2):
        monkeypatch.setattr(conftest, "UNTIL", until)
        for _ in range(2):
            items = [
                SimpleNamespace(
                    path=each[0], name=each, nodeid=each, get_closest_marker=lambda name: None
                )
                for each in names
            ]
            conftest.pytest_collection_modifyitems(items)
            order = tuple(each.name for each in items)
            orders.add(order)
            assert [each[0] for each in order[::2]] == [each[0] for each in order[1::2]]
            assert sorted(order) == names
    assert len(orders) == 3


BLOCKS = """
import os, pytest

@pytest.mark.parametrize("block", [f"{page}.md:{line}" for line in (5, 20, 9) for page in "abc"])
def test_block(block):
    page, line = block.split(":")
    with open(f"{page}.txt", "a") as file:
        file.write(f"{os.getpid()} {line} ")
"""


def test_the_blocks_of_a_page_run_in_one_process_and_in_their_order(tmp_path):
    """A block may need what those before it made."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler")
    (tmp_path / "test_blocks.py").write_text(BLOCKS)
    options = ["-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(OUTSIDE.parents[1]), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert "9 passed" in done.stdout
    for page in "abc":
        found = (tmp_path / f"{page}.md.txt").read_text().split()
        assert len(set(found[::2])) == 1
        assert found[1::2] == ["5", "20", "9"]
