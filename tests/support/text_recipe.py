"""Recipe text for tests: small, with prepared data."""

from __future__ import annotations

from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.prepare import describe_data, prepare_data

TINY = {"layers": 2, "width": 16, "heads": 2, "context": 8}


def new_recipe(**options):
    return get_recipe("text", {**TINY, **options})


def prepared(directory, source="", **options):
    """The recipe after `prepare` and `datasets`, the datasets, and the description."""
    recipe, data = new_recipe(**options), directory / "data"
    data.mkdir()
    prepare_data(recipe, str(source), data)
    return recipe, recipe.datasets(data), describe_data(data)["description"]
