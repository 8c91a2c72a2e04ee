"""Retrain a recipe in tasks of Flyte 2, and keep the better model.

A small task plans, before a GPU is requested. Another task trains the challenger and measures it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterator, Mapping
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
    project_tracking,
    publish,
)
from flyte_ddp.flyte2.training import check_inputs, run_training
from flyte_ddp.launch.train import open_data
from flyte_ddp.observers.reports.publisher import PagePublisher
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.process.devices import check_requested_gpus
from flyte_ddp.project.settings import SETTINGS
from flyte_ddp.promotion.champion import CARD, ChampionStore
from flyte_ddp.promotion.policy import (
    Challenge,
    PromotionCriteria,
    PromotionResult,
    RetrainingResult,
    judge,
    plan,
)
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.storage import check_places, read_file
from flyte_ddp.storage.state_dict_file import pin_state
from flyte_ddp.task_run.origin import code_version
from flyte_ddp.task_run.retraining import format_kickoff, open_champions, record_outcome


@dataclass(frozen=True)
class Retraining:
    """The plan of a retraining, for the tasks after it.

    Example:
        retraining = flyte2.plan_retraining(None, "", "digits")
        if retraining.outcome:
            print(retraining.outcome, retraining.reason)
    """

    recipe: str
    config: str  # config of the challenger as JSON, with its initial weights
    data: str
    champion: str  # URL of the champion and its predecessors
    criteria: str  # `PromotionCriteria` as JSON
    kickoff_time: str  # UTC, ISO 8601
    outcome: str  # "" if there is something to train
    reason: str


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
        resolved, terms = check_inputs(recipe, config, data), PromotionCriteria(**criteria)
        # The contents of the state decide if there is something new, and a file may be replaced
        # meanwhile. So the config gets the checksum.
        given = {**(config or {}), "initial_model_state": pin_state(resolved.initial_model_state)}
        begun: datetime.datetime | None = kickoff_time or flyte.ctx().run_start_time
        # Flyte 2.0.43 gives 1970 to a task with a pod template.
        if begun and not begun.timestamp():
            begun = None
        execution = current_execution()
        if not execution.is_local:
            check_places([("champion", champion)], SETTINGS.allowed.urls)
        store = open_champions(execution, recipe, champion)
        retraining = Retraining(
            *(recipe, json.dumps(given), data, store.url),
            *(json.dumps(dataclasses.asdict(terms)), format_kickoff(begun), "", ""),
        )
        with _prepare(retraining) as prepared:
            planned = plan(store, prepared, terms)
        if planned.initial_state:
            given["initial_model_state"] = pin_state(planned.initial_state)
        return dataclasses.replace(
            retraining,
            config=json.dumps(given),
            outcome=planned.outcome,
            reason=planned.reason,
        )


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
    config, nodes = json.loads(retraining.config), check_cluster(cluster)
    resolved = check_inputs(retraining.recipe, config, retraining.data)
    report = Report()
    with (
        open_task_run(report, checkpoints, resolved.max_hours, project_tracking()) as run,
        # The data are prepared once, so that the record describes the training's data.
        _prepare(retraining) as prepared,
    ):
        trained = run_training(
            *(run, report, retraining.recipe, resolved, retraining.data, num_processes, nodes),
            prepared=str(prepared.directory),
        )
        finished = trained.finished
        result = judge(
            ChampionStore(retraining.champion),
            dataclasses.replace(prepared, card=read_file(f"{finished.export_url}/{CARD}")),
            PromotionCriteria(**json.loads(retraining.criteria)),
            read_file(finished.model_state_url),
        )
        run.files.keep_history(report)
    return _list_outputs(retraining, result, trained.finished.export_url)


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
    result = PromotionResult(RetrainingResult(retraining.outcome), retraining.reason)
    with flyte_errors():
        return _list_outputs(retraining, result)


@contextlib.contextmanager
def _prepare(retraining: Retraining) -> Iterator[Challenge]:
    """Prepare the data of a challenge, for the length of the block."""
    config = config_of(retraining.recipe, json.loads(retraining.config))
    recipe = get_recipe(retraining.recipe, config.recipe_options)
    with open_data(recipe, retraining.data) as prepare:
        yield Challenge(
            recipe=retraining.recipe,
            config=config,
            directory=Path(prepare()),
            kickoff_time=retraining.kickoff_time,
            code_version=code_version(),
            execution=current_execution().name,
        )


def _list_outputs(
    retraining: Retraining, result: PromotionResult, export: str = ""
) -> RetrainingOutputs:
    """Return the outputs of the last task, and show the retraining's report as the task's."""
    store = ChampionStore(retraining.champion)
    page = record_outcome(store, retraining.recipe, result, current_execution())
    PagePublisher(page, publish).close(None)
    outcome, version = result.outcome.value, store.in_use().version
    return RetrainingOutputs(version, export, result.figures, outcome, result.reason)
