"""The task that runs a script of the user's own."""

from __future__ import annotations

from flytekit import task

from flyte_ddp import flyte


@task(
    **flyte.pod(flyte.SETTINGS.driver, trains=True),  # Only the cluster has GPUs.
    retries=3,
    interruptible=False,  # Losing the driver ends all ranks.
)
@flyte.wandb_link
def run_script(
    script: flyte.ScriptSource,
    entry_point: str = "",
    arguments: list[str] = [],  # noqa: B006 - Flyte's form of a default
    cluster: flyte.OptionalCluster = None,
    checkpoints: str = "",
    output: str = "",
) -> flyte.ScriptOutputs:
    """Run a script in every rank of a new Dask cluster."""
    return flyte.run_script(
        script=script,
        entry_point=entry_point,
        arguments=arguments,
        cluster=cluster,
        checkpoints=checkpoints,
        output=output,
    )
