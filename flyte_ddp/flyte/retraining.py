"""Before and after the training of a challenger: decide to train it, and to promote it."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any, NamedTuple

import flytekit
from flytekit import Deck
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, log_failures
from flyte_ddp.events import plain
from flyte_ddp.flyte.flyte_context import (
    Execution,
    current_execution,
    share_storage_credentials,
)
from flyte_ddp.flyte.frame import make_output_directory
from flyte_ddp.flyte.outputs import RetrainingOutputs
from flyte_ddp.flyte.resources import code_version
from flyte_ddp.flyte.task import check_initial_state, check_output, check_urls, task_body
from flyte_ddp.launch.agent.devices import check_requested_gpus
from flyte_ddp.promotion.champion import CARD, ChampionStore
from flyte_ddp.promotion.policy import (
    Challenge,
    Outcome,
    PromotionCriteria,
    PromotionResult,
    judge,
    plan,
)
from flyte_ddp.promotion.report import RetrainingReport
from flyte_ddp.storage import read_file, redact_url
from flyte_ddp.storage.weights import pin_state

ONE_NODE, CLUSTER, NOTHING = "one_node", "cluster", "nothing"
# The kickoff time of a start that no schedule made: a default has to be a time, which `now` at the
# import is not.
BY_HAND = datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
DECK_NAME = "Retraining"


class RetrainingPlan(NamedTuple):
    """The next step, and the champion that all later tasks use."""

    train_on: str  # one_node, cluster or nothing
    outcome: str  # "" if there is something to train
    reason: str
    champion: str  # URL of the champion and its predecessors
    parent: str  # the version in use; "" for none
    # URL of the state dict that the challenger starts from; "" for fresh weights
    initial_model_state: str
    criteria: PromotionCriteria


@task_body
def plan_retraining(
    kickoff_time: datetime.datetime,
    champion: str,
    recipe: str,
    config: TrainingConfig,
    data: FlyteDirectory,
    train_on: str,
    start_from: str,
    margin: float,
    min_samples: int,
    min_share: float,
    initial_model_state: str = "",
    output: str = "",
) -> RetrainingPlan:
    """Decide, before a GPU is requested, if there is a challenger to train, and from which weights.

    Where it does not start from a champion, it starts from `initial_model_state`, or with fresh
    weights.
    """
    if train_on not in (ONE_NODE, CLUSTER):
        raise ConfigError(f"train_on: expected one of {ONE_NODE}, {CLUSTER}, got {train_on!r}")
    check_output(output)
    check_urls(champion=champion)
    given = check_initial_state(initial_model_state)
    execution = _execution()
    criteria = PromotionCriteria(start_from, margin, min_samples, min_share)
    store = ChampionStore(champion or _default_champion(execution, recipe))
    store.storage.check_access("champion")
    planned = plan(
        store, _challenge(kickoff_time, recipe, config, data, execution, given), criteria
    )
    return RetrainingPlan(
        train_on=train_on if planned.train else NOTHING,
        outcome=planned.outcome,
        reason=planned.reason,
        champion=store.url,
        parent=store.version_in_use(),
        initial_model_state=pin_state(planned.initial_state) or given,
        criteria=criteria,
    )


@task_body
def judge_challenger(
    kickoff_time: datetime.datetime,
    champion: str,
    recipe: str,
    config: TrainingConfig,
    data: FlyteDirectory,
    challenger: PythonPickledFile,
    export: FlyteDirectory,
    criteria: PromotionCriteria,
    initial_model_state: str = "",
    output: str = "",
) -> RetrainingOutputs:
    """Measure challenger and champion on the same held-out data, and promote the challenger if it
    is better.

    Args:
        export: the challenger's; a promoted version keeps the run card, and the retraining returns
            all of it.
        initial_model_state: what the challenger's training started from, for its manifest.
        output: directory of a local run's outputs, where the challenger's are already; "" for a
            temporary one.
    """
    check_requested_gpus()
    check_urls(champion=champion)
    execution = _execution()
    store = ChampionStore(champion)
    card = read_file(f"{export.remote_source or export.path}/{CARD}", "export")
    result = judge(
        store,
        dataclasses.replace(
            _challenge(kickoff_time, recipe, config, data, execution, initial_model_state),
            card=card,
        ),
        criteria,
        Path(challenger.download()).read_bytes(),
    )
    return _outputs(store, recipe, result, execution, output, export)


@task_body
def keep_champion(
    champion: str, recipe: str, outcome: str, reason: str, output: str = ""
) -> RetrainingOutputs:
    """Report why nothing was trained. `output` is as of `judge_challenger`."""
    check_urls(champion=champion)
    result = PromotionResult(Outcome(outcome), reason)
    return _outputs(ChampionStore(champion), recipe, result, _execution(), output)


def _execution() -> Execution:
    share_storage_credentials()
    return current_execution(flytekit.current_context())


def _default_champion(execution: Execution, recipe: str) -> str:
    """Return a place in the bucket of Flyte's raw outputs that all executions of a project and
    domain share.

    At the bucket's top: a lifecycle rule for the raw outputs must not delete the model in use.
    """
    if not execution.run_id:
        raise ConfigError("champion: expected a directory or a URL in a local run, got ''")
    # Beside the checkpoints of this execution, whose URL ends in
    # checkpoints/PROJECT/DOMAIN/EXECUTION/NODE.
    root, _, place = execution.checkpoints.rpartition("/checkpoints/")
    project, domain, *_ = place.split("/")
    return "/".join([_find_bucket(root), "champions", project, domain, recipe])


def _find_bucket(url: str) -> str:
    """Return the URL of the bucket that `url` lies in; `url` itself where its store has no
    buckets.
    """
    scheme, separator, path = url.partition("://")
    return (
        url
        if not separator or scheme in ("file", "memory")
        else f"{scheme}://{path.partition('/')[0]}"
    )


def _challenge(
    kickoff_time: datetime.datetime,
    recipe: str,
    config: TrainingConfig,
    data: FlyteDirectory,
    execution: Execution,
    initial_state: str,
) -> Challenge:
    begun = datetime.datetime.now() if kickoff_time == BY_HAND else kickoff_time
    return Challenge(
        recipe=recipe,
        config=config,
        directory=Path(data.download() or data.path),
        kickoff_time=begun.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        code_version=code_version(),
        execution=execution.run_id,
        initial_state=initial_state,
    )


def _outputs(
    store: ChampionStore,
    recipe: str,
    result: PromotionResult,
    execution: Execution,
    output: str,
    export: FlyteDirectory | None = None,
) -> RetrainingOutputs:
    """Return the outputs of the last task, print the outcome and show the report in the Deck."""
    outcome = result.outcome.value
    store.record_run(outcome, execution.run_id, result.outcome == Outcome.PROMOTED)
    print(  # noqa: T201
        f"{outcome}: {result.reason}\nchampion  {store.version_in_use() or 'none'} in "
        f"{redact_url(store.url)}"
    )
    page = RetrainingReport(store, recipe, result, execution.url)
    page.close(None)
    Deck(DECK_NAME, page.render_fragment())
    directory = (
        make_output_directory(output)
        if output
        else Path(flytekit.current_context().working_directory)
    )
    directory.mkdir(parents=True, exist_ok=True)
    report = directory / "retraining.html"
    page.write(report)
    values: dict[str, Any] = {
        "outcome": outcome,
        "reason": result.reason,
        "champion": store.version_in_use(),
        "metrics": {
            f"{who}_{name}": value
            for who, metrics in (("challenger", result.challenger), ("champion", result.champion))
            for name, value in metrics.items()
        }
        | dict(zip(("advantage_low", "advantage_high"), result.advantage, strict=False)),
    }
    if output:
        with log_failures("retraining.json"):
            text = json.dumps(plain(values), indent=1, allow_nan=False)
            (directory / "retraining.json").write_text(f"{text}\n", encoding="utf-8")
    return RetrainingOutputs(**values, report=FlyteFile(str(report)), export=export)
