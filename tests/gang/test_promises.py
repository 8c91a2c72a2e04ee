"""What README's "When something dies" and docs/reliability.md promise: for a recipe and for a
function, on this machine and on two nodes of a Dask cluster. The same test, four times.
"""

from __future__ import annotations

import dataclasses
import time

import cloudpickle
import pytest
import torch

from flyte_ddp import events
from flyte_ddp.config import resolve
from flyte_ddp.config.training import Needs
from flyte_ddp.errors import RankFailure, TrainingStopped
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import FunctionCall
from flyte_ddp.recipes import get_recipe
from tests.support.dask_runs import LOCAL, At, events_of, eventually
from tests.support.errors import raises_one_line
from tests.support.promises import NUM_STEPS, count
from tests.support.runs import fork_functions, new_run

RECIPE = "tests.support.promises.Steady"
STALL_TIMEOUT = 6.0  # seconds


class Cell:
    """A program at a place. Its runs share one place for checkpoints."""

    def __init__(self, program, place, client, directory):
        self.program, self.place, self.client, self.directory = program, place, client, directory
        (directory / "faults").mkdir()
        self.runs = 0

    @property
    def is_function(self):
        return self.program == "function"

    def order(self, *faults):
        for fault in faults:
            (self.directory / "faults" / fault).touch()

    def run(self, max_restarts=3, at_steps=(), stop=None, faults=True, **config):
        """Run to the end, and return the value of the function, or the weights of the recipe."""
        directory = str(self.directory / "faults") if faults else ""
        if self.is_function:
            call = cloudpickle.dumps(FunctionCall(count, (directory,)))
            program = Program("count", call, ("tests",), needs=Needs(STALL_TIMEOUT))
        else:
            options = {
                "recipe_options": {"faults": directory},
                "checkpoint_interval": 2,
                "stall_timeout": STALL_TIMEOUT,
                **config,
            }
            program = recipe_program(RECIPE, resolve(get_recipe(RECIPE, {}).defaults, options))
        place = LocalPlace(2, max_restarts)
        if self.place == "dask":
            place = DaskPlace(self.client, dataclasses.replace(LOCAL, max_restarts=max_restarts))
        self.seen = new_run(self.directory, RECIPE)
        data = None if self.is_function else (lambda: str(self.seen.data()))
        job = Job(program, str(self.directory / "checkpoints"), time.time())
        listeners = [self.seen, *(At(*pair) for pair in at_steps)]
        state = driver.run(job, place, data, listeners, self.seen.relay, stop)
        self.seen.result = state
        return cloudpickle.loads(state.finished.value) if self.is_function else self.seen.state()

    @property
    def num_attempts(self):
        return len(events_of(self.seen, events.AttemptStarted))

    @property
    def resumed_steps(self):
        """The steps from which attempts went on."""
        return [event.step for event in events_of(self.seen, events.CheckpointLoaded) if event.step]


def cells(*slow, long=()):
    """Parametrize a test with all four cells. `make test` leaves out the `slow` and the `long`
    cells, because the other cells run the same code.
    """

    def marks(cell):
        if cell in slow:
            return [pytest.mark.slow]
        return [pytest.mark.long] * (cell in long)

    return pytest.mark.parametrize(
        "cell",
        [
            pytest.param(
                (program, place),
                id=f"{program}-{place}",
                marks=marks(f"{program}-{place}"),
            )
            for place in ("local", "dask")
            for program in ("recipe", "function")
        ],
        indirect=True,
    )


@pytest.fixture
def cell(tmp_path, request, monkeypatch):
    program, place = request.param
    if place == "local":  # ranks of functions too are forked, which is faster
        fork_functions(monkeypatch)
    client = request.getfixturevalue("client") if place == "dask" else None
    return Cell(program, place, client, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """undisturbed(cell.program): what its run on this machine ends in."""
    found = {}

    def get(program):
        if program not in found:
            found[program] = Cell(program, "local", None, tmp_path_factory.mktemp(program)).run(
                faults=False
            )
        return found[program]

    return get


@cells("recipe-dask", "function-dask")
@pytest.mark.parametrize("fault", ["error", "away"])
@pytest.mark.long
def test_an_unexplained_exception_and_a_store_that_was_away_are_answered_by_a_restart(
    cell, fault, undisturbed
):
    cell.order(f"1-{fault}-9")
    result = cell.run(max_restarts=int(fault == "error"))  # the store's uses up none
    torch.testing.assert_close(result, undisturbed(cell.program), rtol=0, atol=0)
    assert cell.num_attempts == 2


@cells(long=("function-dask",))
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(cell, undisturbed):
    cell.order("1-kill-9")
    result = cell.run()
    torch.testing.assert_close(result, undisturbed(cell.program), rtol=0, atol=0)
    assert cell.num_attempts == 2
    assert cell.resumed_steps[-1] >= 2


@cells("recipe-dask", "function-dask")
def test_a_bug_ends_a_recipe_at_once_and_a_function_as_under_torchrun(cell):
    """The cells differ: `max_restarts` of a function means what torchrun means by it."""
    cell.order("1-bug-1-always")
    with pytest.raises(
        RankFailure,
        match=(
            r"rank 1 failed: TypeError: a bug that "
            r"repeats\nTraceback"
        ),
    ) as caught:
        cell.run(max_restarts=1)
    assert (caught.value.rank, caught.value.kind) == (1, "exception")
    assert cell.num_attempts == {"recipe": 1, "function": 2}[cell.program]


@cells("function-local", "recipe-dask", "function-dask")
def test_a_rank_that_hangs_is_found_with_all_stacks(cell, undisturbed):
    cell.order("1-hang-9")
    result = cell.run()
    torch.testing.assert_close(result, undisturbed(cell.program), rtol=0, atol=0)
    (ended,) = events_of(cell.seen, events.AttemptEnded)
    assert "no rank made progress for" in ended.reason
    assert any("in meet_fault" in line for line in cell.seen.lines)


@cells("recipe-dask", "function-dask")
def test_a_stop_keeps_every_step_and_the_same_place_resumes(cell, undisturbed):
    cell.order("0-kill-1000")  # never met: steps take their time until then
    stop = StopRequest()
    with pytest.raises(
        TrainingStopped,
        match=(
            r"^SIGTERM: the run was stopped at step (\d+)\. Its checkpoints "
            r"are in .*: the same run resumes there, at step \1$"
        ),
    ) as caught:
        cell.run(at_steps=[(5, lambda: stop.set("SIGTERM"))], stop=stop)
    assert caught.value.reason == "SIGTERM"
    last = max(event.step for event in events_of(cell.seen, events.Reported))
    result = cell.run()
    torch.testing.assert_close(result, undisturbed(cell.program), rtol=0, atol=0)
    assert cell.resumed_steps == [last]  # no step is done again
    assert 5 <= last < NUM_STEPS


@cells("recipe-dask", "function-dask")
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_used(cell, undisturbed):
    def damage():
        eventually(lambda: [*(cell.directory / "checkpoints").glob("step-*.pt")])
        newest = max((cell.directory / "checkpoints").glob("step-*.pt"))
        newest.write_bytes(newest.read_bytes()[:-9] + b"different")
        cell.order("1-kill-1")
        slow.unlink()

    # No rank has this number, so the run just takes its time until then.
    slow = cell.directory / "faults" / "9-kill-1"
    slow.touch()
    result = cell.run(at_steps=[(9, damage)], memory_interval=0)
    torch.testing.assert_close(result, undisturbed(cell.program), rtol=0, atol=0)
    assert cell.num_attempts == 2
    assert 2 <= cell.resumed_steps[-1] < NUM_STEPS


@cells("recipe-local", "recipe-dask", "function-dask")
def test_what_only_the_user_can_mend_ends_the_run_in_one_line(cell):
    cell.order("1-denied-1-always")
    with raises_one_line(
        RankFailure, match="StorageDenied: checkpoints: expected keys, got none"
    ) as caught:
        cell.run()
    assert caught.value.is_user_error
    assert cell.num_attempts == 1


@cells("function-local", "recipe-dask", "function-dask")
def test_restarts_that_are_used_up_end_the_run_with_the_ranks_failure(cell):
    cell.order("1-kill-1-always")
    with pytest.raises(
        RankFailure,
        match=(
            r"has used up its restarts \(max_restarts: 1\).*rank 1 "
            r"was killed"
        ),
    ) as caught:
        cell.run(max_restarts=1)
    assert (caught.value.rank, caught.value.kind) == (1, "signal")
    assert cell.num_attempts == 2
