"""docs/settings.md has one table of what a launch may name, made from the code:
`python -m tests.project.test_launch_table` writes it anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.cluster.config import ClusterConfig, KubernetesConfig
from flyte_ddp.config.fields import LISTED
from flyte_ddp.project.admission import Allowed
from tasks import generate, predict, retrain, script, study, train

PAGE = Path(__file__).parents[2] / "docs/settings.md"
BEGIN, END = "<!-- what a launch may name: begin -->\n", "<!-- what a launch may name: end -->\n"
TASKS = (generate, predict, retrain, script, study, train)
# Texts of a launch that are no places; a new one has to be put here or into `PLACES`.
NO_PLACES = (
    *("recipe", "entry_point", "parent_champion", "train_on", "start_from", "stop_early"),
    *("sampler", "prefix", "prompt", "arguments"),
)
INPUT = "the task that takes it, before it reads anything; and whatever opens it"
# Inputs with a URL or a path: who may set it, and what refuses it where.
PLACES = {
    "source": INPUT,
    "data": INPUT + ". Prepared data lie where Flyte keeps outputs",
    "checkpoints": INPUT,
    "output": INPUT,
    "champion": INPUT,
    "model_state": INPUT,
    "script": INPUT,
    "challenger": INPUT + ". It lies where Flyte keeps outputs",
    "export": INPUT + ". It lies where Flyte keeps outputs",
    "config.initial_model_state": "the task prepare; each trial of a study where it starts",
    "config.recipe_options": (
        "as `initial_model_state`, for text that looks like a place, keys too; and whatever opens "
        "it"
    ),
}
CREATED = "the task prepare, and the task that would make the cluster"


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield what a launch names, who may set it, and what refuses another value."""
    defaults = Allowed()
    for name, refuses in PLACES.items():
        yield f"`{name}`", _list("urls", defaults), refuses
    free = []
    for config, prefix in ((ClusterConfig, "cluster."), (KubernetesConfig, "cluster.kubernetes.")):
        for each in dataclasses.fields(config):
            table = each.metadata[LISTED]
            if table:
                yield f"`{prefix}{each.name}`", _list(table, defaults), CREATED
            elif each.name != "kubernetes":
                free.append(f"`{prefix}{each.name}`")
    yield ", ".join(free), "each launch", "the limits of the field, at the launch"
    yield (
        "all other fields of `config`, and `recipe`",
        "each launch",
        "the limits of the field, at the launch",
    )
    yield (
        "the environment, service account and raw output prefix of an execution",
        "Flyte, for all that may launch",
        "nothing here: by the environment a launch runs code in the task's pod",
    )


def _list(table: str, defaults: Allowed) -> str:
    patterns = ", ".join(f"`{each}`" for each in getattr(defaults, table))
    return f"the registration, by `allowed.{table}` ({patterns or 'empty, so none'})"


def make_table() -> str:
    lines = ["| a launch names | who says what it may be | what refuses another value |"]
    lines += ["|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows())]
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table_of_the_code():
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == make_table()


def test_every_place_among_the_inputs_of_tasks_is_in_the_table():
    found: dict[str, set[str]] = {"place": set(), "text": set()}
    for module in TASKS:
        for task in vars(module).values():
            function = getattr(task, "task_function", None)
            if function is None:
                continue
            kinds = typing.get_type_hints(function)
            for name in inspect.signature(function).parameters:
                parts = {kinds[name], *typing.get_args(kinds[name])}
                if any(
                    isinstance(part, type) and issubclass(part, (FlyteFile, FlyteDirectory))
                    for part in parts
                ):
                    found["place"].add(name)
                elif str in parts:
                    found["text"].add(name)
    assert found["place"] <= set(PLACES)
    assert found["text"] - set(PLACES) == set(NO_PLACES)
    assert {name for name in PLACES if "." not in name} == found["place"] | (
        found["text"] & set(PLACES)
    )


def test_every_list_of_the_registration_is_in_the_table():
    tables = set(re.findall(r"`allowed\.(\w+)`", make_table()))
    assert tables == {each.name for each in dataclasses.fields(Allowed)}


if __name__ == "__main__":
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(head + BEGIN + make_table() + END + rest.partition(END)[2], encoding="utf-8")
