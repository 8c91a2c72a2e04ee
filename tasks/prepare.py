"""The task that fetches and checks a recipe's data, once, before any GPU is asked for."""

from __future__ import annotations

from flytekit import task

from flyte_ddp import flyte


# Not cached: the contents of a URL may have changed. The training task is cached, by the contents
# of this one's output.
@task(**flyte.pod(flyte.SETTINGS.small), retries=2)
def prepare(
    recipe: str,
    config: flyte.OptionalOverrides = None,
    source: flyte.OptionalSource = None,
    cluster: flyte.OptionalCluster = None,
    initial_model_state: str = "",
    trains_here: bool = False,
) -> flyte.Prepared:
    """Check and resolve the inputs, and prepare the data of `recipe`."""
    return flyte.prepare(
        recipe=recipe,
        config=config,
        source=source,
        cluster=cluster,
        initial_model_state=initial_model_state,
        trains_here=trains_here,
    )
