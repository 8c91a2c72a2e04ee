"""Run the script that you run with torchrun today. The tasks contain the logic.

pyflyte run workflows/script.py script_wf --script train.py --arguments '["--lr", "0.1"]'
"""

from __future__ import annotations

from flytekit import workflow

from flyte_ddp import flyte
from tasks.script import run_script


@workflow
def script_wf(
    script: flyte.ScriptSource,
    entry_point: str = "",
    arguments: list[str] = [],  # noqa: B006 - Flyte's form of a default
    cluster: flyte.OptionalCluster = None,
    checkpoints: str = "",
    output: str = "",
) -> flyte.ScriptOutputs:
    """Run a script in every rank, in torchrun's environment: start a Dask cluster, run the
    script there, and delete the cluster.

    Returns the directory that the script wrote to, its log, the history of events and an HTML
    report.

    Args:
        script: a script, a directory or an archive; the directory of a script is copied to every
            node
        entry_point: name of the script in that directory, such as train.py; by default the script
            that was given
        arguments: arguments of the script, as JSON, for example
            '["--lr", "0.1", "--out", "{outputs}"]', where files in
            the directory {outputs} become the workflow's output
        cluster: the machines, as JSON or the name of a JSON or YAML file, for example
            '{"kind": "kubernetes", "num_nodes": 4, "gpus_per_node": 1}'; by default two workers on
            this machine in a local run, and on Kubernetes in a remote one;
            flyte_ddp/cluster/config.py lists all fields with units
        checkpoints: directory or URL for session.save that all nodes reach; by default a place of
            the execution's own, which its retries share
        output: directory for the outputs of a local run; by default a new one, runs/NAME
    """
    return run_script(
        script=script,
        entry_point=entry_point,
        arguments=arguments,
        cluster=cluster,
        checkpoints=checkpoints,
        output=output,
    )
