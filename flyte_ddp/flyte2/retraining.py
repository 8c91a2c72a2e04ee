"""Retrain a recipe in tasks of Flyte 2, and keep the better model.

A small task plans, before a GPU is requested. Another task trains the challenger and measures it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flyte

from flyte_ddp.flyte2.task import (
    check_cluster,
    current_execution,
    flyte_errors,
    limited,
    open_task_run,
    publish,
)
from flyte_ddp.flyte2.training import check_inputs, open_inputs, run_training
from flyte_ddp.observers.reports.publisher import PagePublisher
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.process.devices import check_requested_gpus
from flyte_ddp.promotion.policy import PromotionCriteria, PromotionResult
from flyte_ddp.recipes import pin_initial_state
from flyte_ddp.storage import check_places, read_file
from flyte_ddp.task_run import retraining as core


@dataclass(frozen=True)
class Retraining(core.Retraining):
    """The plan of a retraining, for the tasks after it.

    Example:
        retraining = flyte2.plan_retraining(None, "", "digits")
        if retraining.outcome:
            print(retraining.outcome, retraining.reason)
    """

    config: str  # config of the challenger as JSON, with its initial weights
    data: str


class RetrainingOutputs(NamedTuple):
    """The outputs of a retraining.

    Example:
        outputs = flyte2.challenge(retraining, num_processes=2)
        if outputs.outcome == "promoted":
            print(outputs.champion, outputs.metrics)
    """

    champion: str  # the version in use now; "" for none
    export: str  # URL of the challenger's files, as in `TrainingOutputs.export`; "" for none
    metrics: dict[str, float]  # measured figures of challenger and champion
    outcome: str  # value of flyte_ddp.promotion.policy.RetrainingResult
    reason: str


@limited
def plan_retraining(
    kickoff_time: datetime.datetime | None,
    champion: str,
    recipe: str,
    config: Mapping[str, Any] | None = None,
    data: str = "",
    **criteria: Any,
) -> Retraining:
    """Prepare the data, and decide if there is a challenger to train, and from which weights.

    Args:
        kickoff_time: time of the data; None for the run's start, which a schedule sets.
        champion: URL; "" for a place that all runs of the project and domain share.
        criteria: fields of `PromotionCriteria`.

    Example:
        @planning.task(report=True)
        def plan(champion: str, data: str) -> flyte2.Retraining:
            return flyte2.plan_retraining(None, champion, "digits", data=data, margin=0.01)
    """
    with flyte_errors():
        terms, execution = PromotionCriteria(**criteria), current_execution()
        # The contents of the state decide if there is something new, and a file may be replaced
        # meanwhile. So the config gets the checksum.
        resolved = pin_initial_state(check_inputs(recipe, config, data))
        check_places([("champion", champion)])
        store = core.open_champions(execution, recipe, champion)
        begun = kickoff_time or flyte.ctx().run_start_time
        with open_inputs(recipe, resolved, data) as prepare:
            shared, started = core.plan_retraining(
                execution, store, terms, begun, recipe, resolved, Path(prepare())
            )
        given = {**(config or {}), "initial_model_state": started.initial_model_state}
        return Retraining(**vars(shared), config=json.dumps(given), data=data)


@limited
def challenge(
    retraining: Retraining,
    num_processes: int = 0,
    cluster: Mapping[str, Any] | None = None,
    checkpoints: str = "",
) -> RetrainingOutputs:
    """Train a challenger, measure challenger and champion on the same held-out data, and promote
    the challenger if it is better.

    Example:
        @training.task(retries=3, report=True)
        def challenge(retraining: flyte2.Retraining) -> flyte2.RetrainingOutputs:
            return flyte2.challenge(retraining, num_processes=2)
    """
    check_requested_gpus()
    recipe, nodes = retraining.recipe, check_cluster(cluster)
    config = check_inputs(recipe, json.loads(retraining.config), retraining.data)
    check_places([("champion", retraining.champion)])
    report = Report()
    with (
        open_task_run(report, checkpoints, config.max_hours) as run,
        # The data are prepared once, so that the record describes the training's data.
        open_inputs(recipe, config, retraining.data) as prepare,
    ):
        trained = run_training(
            run, recipe, config, prepare, nodes, num_processes, retraining.parent
        )
        finished = trained.finished
        result = core.judge_challenger(
            retraining,
            retraining.challenge(run.execution, config, Path(prepare())),
            finished.export_url,
            read_file(finished.model_state_url),
        )
        run.files.keep_history(report)
    return _list_outputs(retraining, result, finished.export_url)


@limited
def keep_champion(retraining: Retraining) -> RetrainingOutputs:
    """Report why nothing was trained.

    Example:
        @planning.task(report=True)
        def retrain(champion: str) -> flyte2.RetrainingOutputs:
            retraining = flyte2.plan_retraining(None, champion, "digits")
            if retraining.outcome:
                return flyte2.keep_champion(retraining)
            return challenge(retraining)
    """
    with flyte_errors():
        check_places([("champion", retraining.champion)])
        return _list_outputs(retraining, None)


def _list_outputs(
    retraining: Retraining, result: PromotionResult | None, export: str = ""
) -> RetrainingOutputs:
    """Return the outputs of the last task, and show the retraining's report as the task's."""
    result, in_use, page = core.record_outcome(current_execution(), retraining, result)
    PagePublisher(page, publish).close(None)
    return RetrainingOutputs(in_use, export, result.figures, result.outcome.value, result.reason)
