"""Before and after the training of a challenger: decide to train it, and to promote it."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import flytekit
from flytekit import Deck
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import Limits, check
from flyte_ddp.flyte.flyte_context import current_execution
from flyte_ddp.flyte.inputs import (
    ClusterInput,
    ConfigTransformer,
    OptionalCluster,
    OptionalOverrides,
    OptionalSource,
)
from flyte_ddp.flyte.outputs import RetrainingOutputs, keep_values, open_output_directory
from flyte_ddp.flyte.task import check_files, check_urls, task_body
from flyte_ddp.flyte.training import PreparedData, prepare
from flyte_ddp.process.devices import check_requested_gpus
from flyte_ddp.project.admission import places_of_config
from flyte_ddp.promotion.policy import PromotionCriteria, PromotionResult
from flyte_ddp.storage import check_places
from flyte_ddp.task_run import retraining as core
from flyte_ddp.task_run.retraining import Retraining as Retraining

ONE_NODE, CLUSTER, NOTHING = "one_node", "cluster", "nothing"
# This kickoff time stands for the time at which the first task begins.
NOW = datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
DECK_NAME = "Retraining"


class RetrainingPlan(NamedTuple):
    """The next step, and the inputs of the tasks that follow, resolved and checked."""

    train_on: str  # one_node, cluster or nothing
    retraining: Retraining
    parent: str  # same as `retraining.parent`
    data: PreparedData
    config: TrainingConfig  # config of the challenger, with its initial weights
    cluster: ClusterInput


@task_body
def plan_retraining(
    kickoff_time: datetime.datetime,
    champion: str,
    recipe: str,
    config: OptionalOverrides,
    source: OptionalSource,
    cluster: OptionalCluster,
    train_on: str,
    start_from: str,
    margin: float,
    min_samples: int,
    min_share: float,
    output: str = "",
) -> RetrainingPlan:
    """Prepare the data, and decide, before a GPU is requested, if there is a challenger to train,
    and from which weights.
    """
    check("train_on", train_on, str, Limits(choices=(ONE_NODE, CLUSTER)))
    if output:  # The default directory is made when there is something to keep.
        open_output_directory(output, recipe)
    check_urls(champion=champion)
    execution = current_execution()
    criteria = PromotionCriteria(start_from, margin, min_samples, min_share)
    store = core.open_champions(execution, recipe, champion)
    prepared = prepare(recipe, config, source, cluster)
    retraining, started = core.plan_retraining(
        execution,
        store,
        criteria,
        kickoff_time,
        recipe,
        prepared.config,
        Path(prepared.data.path),
    )
    if retraining.outcome:
        train_on = NOTHING
    return RetrainingPlan(
        train_on, retraining, retraining.parent, prepared.data, started, prepared.cluster
    )


@task_body
def judge_challenger(
    retraining: Retraining,
    config: TrainingConfig,
    data: FlyteDirectory,
    challenger: PythonPickledFile,
    export: FlyteDirectory,
    output: str = "",
) -> RetrainingOutputs:
    """Measure challenger and champion on the same held-out data, and promote the challenger if it
    is better.

    Args:
        export: the challenger's files. A promoted version keeps the run card, and the retraining
            returns all of them.
        output: directory of a local run's outputs, which contains the challenger's already.
    """
    check_requested_gpus()
    check_urls(champion=retraining.champion)
    check_places(places_of_config(config))
    check_files(data=data, challenger=challenger, export=export)
    directory = Path(data.download() or data.path)
    result = core.judge_challenger(
        retraining,
        retraining.challenge(current_execution(), config, directory),
        export.remote_source or export.path,
        Path(challenger.download()).read_bytes(),
    )
    return _outputs(retraining, result, output, export)


@task_body
def keep_champion(retraining: Retraining, output: str = "") -> RetrainingOutputs:
    """Report why nothing was trained. `output` is the same as in `judge_challenger`."""
    check_urls(champion=retraining.champion)
    return _outputs(retraining, None, output)


def _outputs(
    retraining: Retraining,
    result: PromotionResult | None,
    output: str,
    export: FlyteDirectory | None = None,
) -> RetrainingOutputs:
    """Return the outputs of the last task, print the outcome and show the report in the Deck."""
    result, in_use, page = core.record_outcome(current_execution(), retraining, result)
    Deck(DECK_NAME, page.render_fragment())
    kept_in = open_output_directory(output, retraining.recipe)
    directory = kept_in or Path(flytekit.current_context().working_directory)
    directory.mkdir(parents=True, exist_ok=True)
    report = directory / "retraining.html"
    page.write(report)
    outputs = RetrainingOutputs(
        result.outcome.value,
        result.reason,
        in_use,
        result.figures,
        FlyteFile(str(report)),
        export,
    )
    keep_values(kept_in, "retraining.json", outputs)
    return outputs


TypeEngine.register(ConfigTransformer(Retraining))
