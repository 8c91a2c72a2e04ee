"""A recipe's training as a program, for tests that take its standard streams away: `python -m
tests.support.lost_streams DIRECTORY`, where it leaves what came of it.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def main() -> None:
    from flytekit.types.directory import FlyteDirectory

    from flyte_ddp.recipes import config_of, get_recipe
    from flyte_ddp.recipes.prepare import prepare_data
    from tasks.train import train_on_one_node
    from tests.support.task_context import executing

    directory, recipe = Path(sys.argv[1]), "tests.support.recipes.Tiny"
    (directory / "data").mkdir()
    with contextlib.redirect_stdout(None):  # The recipe itself prints in this process too.
        prepare_data(get_recipe(recipe), "", directory / "data")
    with executing():
        outputs = train_on_one_node.task_function(
            recipe=recipe,
            config=config_of(recipe, {"epochs": 2}),
            data=FlyteDirectory(str(directory / "data")),
            num_processes=2,
            checkpoints=str(directory / "checkpoints"),
            output=str(directory / "out"),
        )
    (directory / "epochs").write_text(str(len(outputs.epoch_accuracies)))


if __name__ == "__main__":
    main()
