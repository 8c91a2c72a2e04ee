"""A training as a program, for tests that take its standard streams away: `python -m
tests.support.lost_streams`.

Its arguments are what it trains, recipe or function, and a directory, where it leaves what came of
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path


def work(number):
    from flyte_ddp import session

    for step in range(1, 4):
        print(f"step {step} of a rank", flush=True)
        print("on standard error", file=sys.stderr, flush=True)
        session.report(step=step, loss=1 / step)
    assert sys.stdin is None or sys.stdin.read() == ""
    return number + int(os.environ["WORLD_SIZE"])


def main() -> None:
    kind, directory = sys.argv[1], Path(sys.argv[2])
    if kind == "function":
        import flyte_ddp
        from flyte_ddp.observers.progress_bar import ProgressBar

        result = flyte_ddp.run(work, 40, nproc_per_node=2, listeners=[ProgressBar()])
    else:
        from flytekit.core.context_manager import ExecutionState, FlyteContextManager
        from flytekit.types.directory import FlyteDirectory

        from flyte_ddp.recipes import config_of, get_recipe
        from flyte_ddp.recipes.prepare import prepare_data
        from tasks.train import train_on_one_node

        recipe = "tests.support.recipes.Tiny"
        (directory / "data").mkdir()
        with contextlib.redirect_stdout(None):  # what the recipe itself prints in this process
            prepare_data(get_recipe(recipe), "", directory / "data")
        context = FlyteContextManager.current_context()
        local = context.execution_state.with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
        with FlyteContextManager.with_context(context.with_execution_state(local)):
            outputs = train_on_one_node.task_function(
                recipe=recipe,
                config=config_of(recipe, {"epochs": 2}),
                data=FlyteDirectory(str(directory / "data")),
                num_processes=1,
                checkpoints=str(directory / "checkpoints"),
                output=str(directory / "out"),
            )
        result = len(outputs.epoch_accuracies)
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
