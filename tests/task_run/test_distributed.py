from __future__ import annotations

from types import SimpleNamespace

import pytest

from flyte_ddp.launch.distributed import Distributed
from flyte_ddp.launch.run import function_program
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.task_run.distributed import run_function


@pytest.mark.parametrize(
    ("lost_options", "expected"),
    [
        ([], []),
        (
            ["pod_template", "secrets"],
            [
                "train: these options of the task do not reach the pods of its ranks, which have "
                "their own in cluster.kubernetes of Distributed: pod_template, secrets"
            ],
        ),
    ],
)
def test_options_that_do_not_reach_the_ranks_are_named(lost_options, expected):
    said = []

    class Ended(Exception):
        pass

    def end(*arguments, **fields):
        raise Ended

    run = SimpleNamespace(report=Report("train"), receivers=[], say=said.append, run=end)
    config = Distributed()
    program = function_program(lambda: None, (), {})
    with pytest.raises(Ended):
        run_function(run, config, program, config.gang(), lost_options)
    assert said == expected
