"""The tasks of a sweep: check all of its trials at once, and train them side by side on one cluster."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from flytekit import task
from flytekit.types.file import FlyteFile, PythonPickledFile
from flytekit.types.structured import StructuredDataset

from flyte_ddp.events import CheckpointLoaded, EpochFinished, Event, Listener
from flyte_ddp.flytekit_plugin.failures import flyte_errors
from flyte_ddp.observers.figures import percent
from flyte_ddp.observers.weights_and_biases import Wandb
from flyte_ddp.recipes import config_of
from flyte_ddp.studies.results import FINISHED, STOPPED_EARLY, TrialRun, build_table, find_best
from flyte_ddp.studies.search import EarlyStopping, build_trials
from tasks.cluster import open_task_cluster
from tasks.frame import FRAMED, Frame, open_frame
from tasks.inputs import ClusterInput, OptionalCluster, OptionalOverrides, TrainingOverrides, given
from tasks.prepare import PreparedData
from tasks.resources import DRIVER_TASK, SMALL_TASK, TRAINING_CACHE
from tasks.sweep_report import SweepReport


class SweepOutputs(NamedTuple):
    """The outputs of a sweep. The best trial has the lowest loss on the held-out data after its last epoch."""

    results: StructuredDataset  # a row for every epoch of every trial, see `flyte_ddp.studies.results.build_table`
    csv: FlyteFile  # the same as a CSV file
    best_config: TrainingOverrides  # of the best trial, in the form of --config
    best_accuracies: list[float]  # of the best trial after each epoch, in [0, 1]
    best_model_state: PythonPickledFile  # its state dict after the last epoch, on the CPU
    report: FlyteFile  # the HTML page that the Deck shows too


@task(**SMALL_TASK)
def check_sweep(
    recipe: str,
    config: OptionalOverrides,
    grid: dict,
    num_models: int,
    seed: int,
    stop_early: str,
    cluster: OptionalCluster,
) -> TrainingOverrides:
    """Check every trial of the sweep before anything is prepared or started for the first; returns `config`."""
    from flyte_ddp.studies.runner import check_trials

    with flyte_errors():
        EarlyStopping(stop_early)
        check_trials(recipe, build_trials(recipe, given(config), grid, num_models, seed), cluster or ClusterInput())
    return config or TrainingOverrides()


@task(cache=TRAINING_CACHE, **DRIVER_TASK, **FRAMED)
def train_sweep(
    recipe: str,
    config: TrainingOverrides,
    grid: dict,
    data: PreparedData,
    cluster: ClusterInput,
    num_models: int = 0,
    seed: int = 0,
    stop_early: str = "none",
    checkpoints: str = "",
) -> SweepOutputs:
    """Train one model, a trial, for each configuration, each on a worker of a Dask cluster, and compare them.

    A retry of this task skips the trials that are done and continues the others from their checkpoints.
    """
    from flyte_ddp.studies.runner import train_trials

    report = SweepReport(recipe)
    with open_frame(report, recipe, checkpoints, "sweep") as frame:
        trials = build_trials(recipe, given(config), grid, num_models, seed)
        frame.limit_time(config_of(recipe, given(config)).max_hours)
        data.download()
        observer = _Observer(frame, report, len(trials))
        with open_task_cluster(cluster, frame.name) as client:
            train_trials(
                recipe,
                trials,
                frame.storage.url,
                data.path,
                client,
                cluster,
                stop_early=stop_early,
                observers=[observer.observe],
                make_listeners=observer.make_listeners,
                run_name=frame.name,
                run=frame.execution.run_id,
            )
        frame.close(None)
        return observer.outputs()


class _Observer:
    """Shows a sweep: a line for each start and end of a trial, the report, and one group in W&B."""

    def __init__(self, frame: Frame, report: SweepReport, num_trials: int) -> None:
        self.frame = frame
        self.report = report
        self.num_trials = num_trials
        self.group = frame.wandb_run_id()
        self.started: set[int] = set()
        self._wandb_lines: set[str] = set()  # kinds that were printed
        self._lock = threading.Lock()

    def observe(self, run: TrialRun, event: Event | None) -> None:
        """Take note of what happened to a trial; see `flyte_ddp.studies.runner.train_trials`."""
        number = run.trial.number
        if len(self.report.runs) < self.num_trials:  # a sweep names all its trials before it starts the first
            self.report.runs.append(run)
        if isinstance(event, CheckpointLoaded):
            again = f" again, after epoch {len(run.epochs)}" if number in self.started or run.epochs else ""
            self.started.add(number)
            self._say(run, f"started{again}")
        elif event is None:
            self._say_end(run)
        if isinstance(event, EpochFinished):
            self.frame.publisher.handle(event)

    def make_listeners(self, run: TrialRun) -> list[Listener]:
        """Return the listeners of one trial: W&B, and Prometheus' if a port was asked for."""
        return [
            *self.frame.figures(recipe=self.report.recipe, trial=str(run.trial.number)),
            self.frame.wandb(
                f"{self.group}-{run.key}",
                _TrialWandb,
                trial_run=run,
                name=str(run.trial),
                group=self.group,
                config={"sweep": dict(run.trial.values)},
                say=self._say_of_wandb,
            ),
        ]

    def outputs(self) -> SweepOutputs:
        """Return the task's outputs, and print where they are."""
        best = find_best(self.report.runs)
        assert best is not None  # a sweep without a finished trial has failed
        table = build_table(self.report.runs)
        table.to_csv(self.frame.directory / "results.csv", index=False)
        outputs = SweepOutputs(
            results=StructuredDataset(dataframe=table),
            csv=self.frame.output("results.csv"),
            best_config=TrainingOverrides(**best.trial.overrides),
            best_accuracies=[epoch.accuracy for epoch in best.epochs],
            best_model_state=self.frame.model_state("best_model_state.pt", best.model_state_url),
            report=self.frame.saved_report(),
        )
        self.frame.say(f"the best is {best.trial}: {_result(best)}")
        self.frame.say_outputs(best_model_state=outputs.best_model_state, results=outputs.csv, report=outputs.report)
        return outputs

    def _say(self, run: TrialRun, text: str) -> None:
        trial = str(run.trial).replace(f"trial {run.trial.number}", f"trial {run.trial.number}/{self.num_trials}", 1)
        self.frame.say(f"{trial} {text}")

    def _say_end(self, run: TrialRun) -> None:
        earlier = "" if run.trial.number in self.started else " in an earlier attempt"
        if run.status == FINISHED:
            self._say(run, f"finished{earlier}: {_result(run)}")
        elif run.status == STOPPED_EARLY:
            self._say(run, f"stopped early{earlier}, after epoch {len(run.epochs)}: {_result(run)}")
        elif run.error:
            self._say(run, f"failed: {run.error}")

    def _say_of_wandb(self, line: str) -> None:
        """Print the first line of each kind from W&B. The other trials' lines are like it."""
        kind = "URL" if line.startswith("W&B: http") else " ".join(line.split()[:3])
        with self._lock:
            if kind not in self._wandb_lines:
                self._wandb_lines.add(kind)
                self.frame.say(f"{line} (likewise for all trials of group {self.group})")
                self.report.notes.append(f"W&B group {self.group}. Its first run: {line}")


class _TrialWandb(Wandb):
    """Shows one trial in W&B. A trial that is stopped early has not failed."""

    def __init__(self, trial_run: TrialRun, **settings: Any) -> None:
        super().__init__(**settings)
        self._trial_run = trial_run

    def close(self, error: BaseException | None) -> None:
        super().close(None if self._trial_run.status == STOPPED_EARLY else error)


def _result(run: TrialRun) -> str:
    last = run.epochs[-1]
    return f"test loss {last.test_loss:.4f}, accuracy {percent(last.accuracy)}, {run.elapsed[-1]:.1f} s"
