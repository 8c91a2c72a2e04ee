"""The run of a task: how errors reach Flyte, how a report ends, and who has W&B's
key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flytekit.bin.entrypoint import get_traceback_str
from flytekit.core.context_manager import ExecutionState
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.types.directory import FlyteDirectory
from torch._utils import ExceptionWrapper

from flyte_ddp import errors, flyte
from flyte_ddp.cluster import connect
from flyte_ddp.flyte.failures import TaskFailed, UserError, flyte_errors
from flyte_ddp.flyte.inputs import ClusterInput, InputError, TrainingOverrides
from flyte_ddp.flyte.task import open_task_run
from flyte_ddp.launch.protocol.failures import MAX_LINES, shorten_traceback
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.rank import entry
from flyte_ddp.rank.data import SeededDataset
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.task_run.process import launcher_log, tracker_keys
from tasks.study import train_at_world_sizes, train_sweep
from tasks.train import train_on_cluster, train_on_one_node
from tests.support import mistakes
from tests.support.task_context import executing

TINY = "tests.support.recipes.Tiny"
RANK_TRACEBACK = "Traceback (most recent call last):\n" + "\n".join(
    f'  File "model.py", line {line}' for line in range(90)
)


def rank_failure(cause: str, kind: str = "exception") -> errors.RankFailure:
    return errors.RankFailure(f"rank 1 failed: {cause}\n{RANK_TRACEBACK}\n{cause}", 1, kind, cause)


def shown_by_flyte(error: BaseException) -> tuple[BaseException, str]:
    """Return the exception that leaves a task in a pod for `error`, and its text in Flyte's
    console.
    """
    with executing(ExecutionState.Mode.TASK_EXECUTION):
        try:
            with flyte_errors():
                raise error
        except Exception as raised:
            try:
                raise FlyteUserRuntimeException(raised) from raised
            except FlyteUserRuntimeException as wrapped:
                return raised, get_traceback_str(wrapped)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.ConfigError("epochs: expected at least 1, got 0"), InputError),
        (errors.DataError("data: expected a directory, got 'x'"), InputError),
        (errors.StorageDenied("checkpoints: expected credentials, got none"), InputError),
        (
            errors.StorageUnavailable("s3://bucket did not answer for 600 s"),
            FlyteRecoverableException,
        ),
        (errors.ClusterError("the workers did not start"), FlyteRecoverableException),
        (errors.GangLost("the gang was lost 4 times"), FlyteRecoverableException),
        (
            errors.TrainingStopped("SIGTERM: the run was stopped at step 3"),
            FlyteRecoverableException,
        ),
        (
            errors.SweepFailed("no model was trained\nmodel 1: lost", may_succeed=True),
            FlyteRecoverableException,
        ),
        (
            errors.SweepFailed("no model was trained\nmodel 1: ValueError", may_succeed=False),
            InputError,
        ),
        (rank_failure("SIGKILL", "signal"), FlyteRecoverableException),
        (rank_failure("no progress", "stall"), FlyteRecoverableException),
        (rank_failure("StorageUnavailable: s3://bucket did not answer"), FlyteRecoverableException),
        (rank_failure("NonFiniteLoss: the loss is nan at step 3"), InputError),
        (rank_failure("StorageDenied: no credentials"), InputError),
        (rank_failure("ValueError: bad shape"), TaskFailed),
    ],
    ids=lambda value: (
        getattr(value, "cause", type(value).__name__) if isinstance(value, Exception) else ""
    ),
)
def test_flyte_shows_the_cause_and_one_traceback_on_one_screen(
    error: Exception, kind: type[Exception]
):
    raised, text = shown_by_flyte(error)
    assert type(raised).__mro__.count(kind) == 1
    assert text.count("Traceback (most recent call last)") <= 1
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert lines[0] == "Trace:"
    first = str(error).splitlines()[0].removeprefix("rank 1 failed: ").rpartition(": ")[2]
    assert first in lines[1], "the cause comes first"
    assert first in lines[lines.index("Message:") + 1]
    assert len(lines) <= MAX_LINES + 8
    assert "failures.py" not in text, "the frames of the driver explain nothing"


class Unprepared(mistakes.Line):
    def __init__(self, error):
        self.error = error

    def prepare(self, source, directory):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("label"), TaskFailed),
        (OSError(2, "No such file", "train.csv"), TaskFailed),
        (RuntimeError("over\ntwo lines"), TaskFailed),
        (FlyteRecoverableException("another time"), FlyteRecoverableException),
        (errors.DataError("data: expected a directory, got 'x'"), InputError),
    ],
)
def test_an_error_in_prepare_ends_with_the_recipes_own_frames(error, kind, tmp_path):
    with pytest.raises(kind) as caught, flyte_errors():
        prepare_data(Unprepared(error), "", tmp_path)
    lines = str(caught.value).splitlines()
    if kind is InputError:
        assert lines == [str(error)]
        return
    assert lines[0].endswith(f"prepare failed: {type(error).__name__}: {error}".splitlines()[0])
    assert lines[-1].endswith(str(error).splitlines()[-1])
    assert lines[1:3] == [
        "Traceback (most recent call last):",
        f'  File "{__file__}", line {Unprepared.prepare.__code__.co_firstlineno + 1}, in prepare',
    ]
    assert lines[3] == "    raise self.error"


def test_an_error_in_a_loader_process_ends_with_the_data_sets_own_frames():
    class Images:
        def __getitem__(self, index):
            raise LookupError("no image: 7.png")

    try:
        SeededDataset(Images(), 0).__getitems__([(1, 7)])
    except LookupError as error:
        # A loader's process has no user frames before this one.
        frames = error.__traceback__.tb_next
        wrapped = ExceptionWrapper((LookupError, error, frames), "in DataLoader worker process 0")
    with pytest.raises(LookupError) as caught:
        wrapped.reraise()
    described = entry.describe_error(caught.value)
    assert (described.name, described.message) == ("LookupError", "no image: 7.png")
    lines = shorten_traceback(described.trace).splitlines()
    assert lines == [
        "Traceback (most recent call last):",
        (
            f'  File "{__file__}", line {Images.__getitem__.__code__.co_firstlineno + 1}, in '
            "__getitem__"
        ),
        '    raise LookupError("no image: 7.png")',
        "LookupError: no image: 7.png",
    ]


def test_an_unexpected_error_keeps_its_own_traceback():
    raised, text = shown_by_flyte(KeyError("a bug of ours"))
    assert type(raised) is KeyError
    assert __file__ in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"data": None, "precision": "bf16"}, "got an unexpected keyword argument 'precision'"),
        ({}, "missing a required argument: 'data'"),
    ],
)
def test_a_task_that_another_version_declared_is_refused_with_its_argument(arguments, expected):
    with pytest.raises(UserError) as caught:
        flyte.train_on_one_node(recipe=TINY, config=config_of(TINY, {}), **arguments)
    end = "the task that calls it was declared for another version of flyte_ddp"
    assert str(caught.value) == f"train_on_one_node: {expected}; {end}"


def test_a_pod_without_its_recipe_says_how_to_register(monkeypatch):
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    with pytest.raises(errors.ConfigError, match="'absent' in this pod: register with --copy all$"):
        get_recipe("absent.Recipe")


def test_ctrl_c_stays_ctrl_c():
    with pytest.raises(KeyboardInterrupt), flyte_errors():
        raise errors.TrainingStopped("SIGINT: the run was stopped at step 3", "SIGINT")


def test_only_the_task_keeps_the_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "key-of-wandb")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "key-of-mlflow")
    monkeypatch.setenv("_FSEC_WANDB_API_KEY", "key-of-wandb")
    with (
        executing(),
        open_task_run(Report(), TINY, str(tmp_path)) as run,
    ):
        assert run.keys["WANDB_API_KEY"] == "key-of-wandb"
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.environ)"], capture_output=True, text=True
        )
        assert run.keys["MLFLOW_TRACKING_TOKEN"] == "key-of-mlflow"
        assert "key-of-" not in child.stdout
        assert "PATH" in child.stdout
    assert os.environ["WANDB_API_KEY"] == os.environ["_FSEC_WANDB_API_KEY"] == "key-of-wandb"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    prepare_data(get_recipe(TINY), "", directory)
    return FlyteDirectory(str(directory))


def test_tasks_of_one_process_give_back_its_keys_and_its_log_in_any_order(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    logger = logging.getLogger("flyte_ddp")
    before = logger.level, logger.propagate, list(logger.handlers)
    first, second = [], []
    with contextlib.ExitStack() as one, contextlib.ExitStack() as other:
        one.enter_context(launcher_log(first.append))
        one.enter_context(tracker_keys(hides=True))
        other.enter_context(launcher_log(second.append))
        keys = other.enter_context(tracker_keys(hides=True))
        logger.info("both run")
        one.close()
        logger.info("the second runs")
        assert keys["WANDB_API_KEY"]
        assert "WANDB_API_KEY" not in os.environ  # the second task's ranks inherit it

    assert (first, second) == ([], ["both run", "the second runs"])
    assert (logger.level, logger.propagate, logger.handlers) == before
    assert os.environ["WANDB_API_KEY"] == "k" * 40


@pytest.mark.long
def test_an_attempt_that_fails_keeps_its_history(data, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", "nan 0 3")
    config = config_of(TINY, {})
    with (
        executing(),
        pytest.raises(UserError, match="the loss is nan"),
    ):
        train_on_one_node.task_function(
            recipe=TINY,
            config=config,
            data=data,
            checkpoints=str(tmp_path / "c"),
            output=str(tmp_path / "out"),
        )
    (history,) = re.findall(
        r"/[^<>\s]*/history\.jsonl", (tmp_path / "out" / "report.html").read_text()
    )
    assert Path(history).is_file()


TASKS = {
    "train_on_cluster": (train_on_cluster, {"config": config_of(TINY, {})}),
    "train_sweep": (
        train_sweep,
        {"config": TrainingOverrides(), "trials": [{"learning_rate": 0.1}]},
    ),
    "train_at_world_sizes": (
        train_at_world_sizes,
        {"config": TrainingOverrides(), "trials": [{"world_size": 2}, {"world_size": 1}]},
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_report_ends_as_failed_if_the_cluster_does_not_start(name, data, tmp_path, monkeypatch):
    shown = []

    monkeypatch.setattr("flyte_ddp.flyte.task.open_deck", lambda: shown.append)
    monkeypatch.setenv("WANDB_MODE", "disabled")

    def fail(*arguments):
        raise errors.ClusterError("the workers did not start")

    monkeypatch.setattr(connect, "open_cluster", fail)
    run, inputs = TASKS[name]
    with pytest.raises(FlyteRecoverableException, match="the workers did not start"):
        run(
            recipe=TINY,
            data=data,
            cluster=ClusterInput(kind="local"),
            checkpoints=str(tmp_path),
            **inputs,
        )
    assert ">failed<" in shown[-1]
    assert "the workers did not start" in shown[-1]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_was_started_by_itself_creates_no_cluster_that_is_not_allowed(
    name, data, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(connect, "open_cluster", lambda *arguments: pytest.fail("it was opened"))
    run, inputs = TASKS[name]
    with pytest.raises(
        UserError,
        match=(
            r"cluster\.kubernetes\.image: expected none, .* got "
            r"'evil:1'"
        ),
    ):
        run(
            recipe=TINY,
            data=data,
            cluster=ClusterInput(kind="kubernetes", kubernetes={"image": "evil:1"}),
            checkpoints=str(tmp_path),
            **inputs,
        )
