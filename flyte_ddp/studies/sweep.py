"""Sweep over the arguments of a function: each trial calls it in new processes, on this machine or
on nodes of a Dask cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp.cluster.config import ClusterConfig, cluster_config
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.code.by_value import Checksum, code_version
from flyte_ddp.config import Monitor, TrainingConfig
from flyte_ddp.config.fields import check_object, plain_number, whole_number
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import Event, Reported
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.run import count_workers, function_program, plain_function
from flyte_ddp.launch.run_observers import show_resume_command
from flyte_ddp.observers.formats import shown_value
from flyte_ddp.observers.reports.drawing import save_panels
from flyte_ddp.process.devices import default_num_processes, num_gpus
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.storage import redact_errors
from flyte_ddp.studies.plots import metric_panels
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import TrialLines, TrialRun, build_table, choose_best, describe_kept
from flyte_ddp.studies.runner import TrialRunner
from flyte_ddp.studies.search import WORLD_SIZE, Search, Trial, expand

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from distributed import Client


@dataclass(frozen=True, kw_only=True)
class FunctionTrial(Trial):
    """One call of a function. Of its config only the monitor counts."""

    function: Callable[..., Any] = field(repr=False)
    # none where `overrides` are its keywords
    arguments: tuple[Any, ...] = field(repr=False)
    version: str = field(repr=False)  # version of the function's code
    counted: ClassVar[type[Event]] = Reported

    @property
    def num_epochs(self) -> int:
        return 0

    def program(self) -> Program:
        keywords = {} if self.arguments else self.overrides
        program = function_program(self.function, self.arguments, keywords)
        if "torch" not in sys.modules:
            return program
        # This process has imported torch, so the function does not need to be the first to do so.
        # To import it in each trial would take seconds.
        return dataclasses.replace(program, slow_imports=("torch",))

    def identity(self, data_version: Sequence[str]) -> list[Any]:
        return [self.version, _identify(self.overrides).hex(), self.world_size]

    def reports_of(self, value: bytes, reports: Sequence[Reported]) -> Sequence[Reported]:
        """Return what counts as reports of the value that the function has returned: where it has
        reported no metric, a number, a mapping, or one for each item of a list.

        Raises:
            ConfigError: it has returned no metric either.
        """
        metric = self.config.monitor.metric
        if any(metric in each.values for each in reports):
            return []
        returned = cloudpickle.loads(value)
        found = []
        for number, item in enumerate(returned if isinstance(returned, list) else [returned], 1):
            values: dict[str, float] = {}
            notes: dict[str, str] = {}
            for name, each in (item if isinstance(item, Mapping) else {metric: item}).items():
                try:
                    values[str(name)] = each if type(each) is int else plain_number(name, each)
                except ConfigError:
                    notes[str(name)] = shown_value(each)
            step, epoch = int(values.pop("step", number)), values.pop("epoch", None)
            found.append(Reported(step, epoch, values, notes=notes))
        if not any(metric in each.values for each in found):
            names = dict.fromkeys(name for each in (*reports, *found) for name in each.values)
            raise ConfigError(
                "metric: expected a figure that the function reports or returns, "
                f"{', '.join(names) or 'of which there is none'}, got {metric!r}"
            )
        return found


@dataclass(frozen=True, repr=False)
class Swept:
    """The result of a sweep. A notebook shows its report.

    Attributes:
        trials: each with `trial.values`, `status`, `results` and, if it failed, `error`.
        best: the finished one with the best result, `best.kept`.

    Example:
        # after a sweep
        swept = flyte_ddp.sweep(train, {"learning_rate": [0.1, 0.01]})
        swept.plot("losses.svg")
        print(swept.table.groupby("trial")["loss"].min())
    """

    trials: list[TrialRun]
    best: TrialRun
    _report: StudyReport

    @property
    def table(self) -> pandas.DataFrame:
        """A row for every result of every trial, see `results.build_table`."""
        return build_table(self.trials)

    def plot(self, file: str | Path) -> None:
        """Write the figures to an SVG, PNG or PDF file."""
        save_panels(metric_panels(self.trials)[2], Path(file))

    def __repr__(self) -> str:
        return (
            f"<Swept {self._report.recipe}: {self.best.trial} is best, {describe_kept(self.best)}>"
        )

    def _repr_html_(self) -> str:
        return self._report.render_fragment()


@redact_errors()
def sweep(
    function: Callable[..., Any],
    grid: Sequence[Any] | Mapping[str, Any],
    *,
    metric: str = "loss",
    mode: str = "auto",
    num_trials: int = 0,
    stop_early: str = "none",
    nnodes: int | None = None,
    nproc_per_node: int = 1,
    world_sizes: Sequence[int] = (),
    client: Client | None = None,
    cluster: ClusterConfig | Mapping[str, Any] | None = None,
    checkpoints: str | None = None,
) -> Swept:
    """Call `function` in new processes for every item of `grid`, and compare what it reports or
    returns.

    Args:
        function: as of `launch.run.run`. What it gives `session.report` counts; where that has no
            metric, what it returns: a number, a dict of numbers, or a list of such.
        grid: a list or array of arguments. A mapping in it gives the function's keywords; anything
            else is its only argument. Or a list or array of values for each keyword: every
            combination is a trial. With `num_trials` also a range, see `search.expand_grid`.
        metric, mode: the figure that trials are compared by, and whether the "min" or the "max" is
            best. "auto" knows by the metric's name, see `Monitor`.
        num_trials: so many are drawn of a grid by name.
        stop_early: "median" or "halving" ends a trial if its reports fall behind, see `Search`.
        nnodes, nproc_per_node: of each trial, by default one node and one rank. As many trials run
            at a time as there are nodes for.
        world_sizes: for a scaling study: each trial is run with each number of ranks, on as many
            nodes, one at a time, and with as many CPU threads a rank. They are compared by what the
            function measures, such as `metric="samples_per_second"`.
        client: of an existing Dask cluster; all of its workers are nodes.
        cluster: the nodes, with the fields of `ClusterConfig`; `max_restarts` is 0 by
            default; without it this machine's GPUs, or two processes where there are none.
        checkpoints: directory or URL, which all machines reach: for `session.save`, and where a
            later sweep finds the trials that are done.

    Raises:
        ConfigError: bad input, before anything is started.
        SweepFailed: no trial finished, or none with a finite figure; names the error of each.
        ClusterError, StorageUnavailable, TrainingStopped: as `TrialRunner.train`.

    Example:
        # starts two processes on this machine, one for each trial
        def square(x):
            return (x - 1) ** 2

        swept = flyte_ddp.sweep(square, {"x": [0.5, 2.0]}, metric="loss")
        print(swept.best.trial.values)
        print(swept.table)
    """
    function = plain_function(function)
    nnodes = whole_number("nnodes", 1 if nnodes is None else nnodes, minimum=1)
    nproc_per_node = whole_number("nproc_per_node", nproc_per_node, minimum=1)
    search = Search(stop_early)
    if world_sizes:  # the largest first, as `TrialRunner` takes them
        sizes = {whole_number("world_sizes", each, minimum=1) for each in world_sizes}
        nnodes = -(-max(sizes) // nproc_per_node)
    trials = build_trials(
        function,
        grid,
        num_trials,
        Monitor(metric, mode),
        sorted(sizes, reverse=True) if world_sizes else [nnodes * nproc_per_node],
    )
    num_at_once = 1 if world_sizes else len(trials)
    config = _find_cluster(cluster, client, num_at_once, nnodes, nproc_per_node)
    report = StudyReport(trials[0].program().name)
    lines = TrialLines(print_line, report.runs)
    with show_resume_command(bool(checkpoints)), contextlib.ExitStack() as stack:
        runner = TrialRunner(
            checkpoints or stack.enter_context(temporary_directory("checkpoints-")),
            "",
            client or stack.enter_context(open_cluster(config, f"sweep-{os.urandom(4).hex()}")),
            config,
            one_at_a_time=bool(world_sizes),
            keeps_states=bool(checkpoints),
            search=search,
            observe=lines.observe,
            runs=report.runs,
        )
        runs = runner.train(trials)
    report.close(None)
    return Swept(runs, choose_best(runs), report)


def build_trials(
    function: Callable[..., Any],
    grid: Any,
    num_trials: int,
    monitor: Monitor,
    world_sizes: Sequence[int],
) -> list[FunctionTrial]:
    """Return a trial for each choice of the grid at each world size, without duplicates. Raises
    ConfigError as `sweep`.
    """
    if not callable(function):
        raise ConfigError(f"function: expected one to call, got {function!r}")
    grid = _plain(grid)
    if isinstance(grid, Mapping):
        grid = {name: _plain(values) for name, values in grid.items()}
    if not grid or not isinstance(grid, (list, Mapping)):
        raise ConfigError(
            'grid: expected a list of arguments, or by keyword a list each such as {"lr": [0.1, '
            f"0.01]}}, got {grid!r}"
        )
    choices = expand(grid, num_trials, name_of_number="num_trials")
    parameter = next(iter(inspect.signature(function).parameters), "argument")
    named = [each if isinstance(each, Mapping) else {parameter: each} for each in choices]
    names = dict.fromkeys(name for each in named for name in each)
    config, version = TrainingConfig(monitor=monitor), code_version(function)
    trials: dict[bytes, FunctionTrial] = {}  # keys say what a trial is
    chosen = zip(choices, named, strict=True)
    for world_size, (choice, values) in itertools.product(world_sizes, chosen):
        size = {WORLD_SIZE: world_size} if len(world_sizes) > 1 else {}
        trial = FunctionTrial(
            number=len(trials) + 1,
            values={**size, **{name: values.get(name) for name in names}},
            overrides=values,
            config=config,
            world_size=world_size,
            function=function,
            arguments=() if isinstance(choice, Mapping) else (choice,),
            version=version,
        )
        trials.setdefault(_identify([world_size, values]), trial)
    return list(trials.values())


def _plain(values: Any) -> Any:
    """Return an array, a tuple or a range as a list of its items, and anything else unchanged."""
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, (tuple, range)):
        return list(values)
    return values


def _identify(values: Any) -> bytes:
    """Return a checksum of a trial's arguments, in which the order of keywords does not count."""
    return Checksum(()).of(_sort(values))


def _sort(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _sort(values[name]) for name in sorted(values, key=repr)}
    if isinstance(values, list):
        return [_sort(each) for each in values]
    return values


def _find_cluster(
    cluster: ClusterConfig | Mapping[str, Any] | None,
    client: Client | None,
    num_trials: int,
    nnodes: int,
    nproc_per_node: int,
) -> ClusterConfig:
    """Return the cluster of all trials. Raises ConfigError as `sweep`."""
    if not isinstance(cluster, ClusterConfig):
        check_object("cluster", {} if cluster is None else cluster)
        given: dict[str, Any] = {"max_restarts": 0}
        if client is not None:
            given |= {"kind": "existing", "num_nodes": count_workers(client)}
        elif cluster is None:
            num_at_once = default_num_processes() // (nnodes * nproc_per_node)
            num_nodes = nnodes * min(num_trials, max(1, num_at_once))
            has_gpus = num_gpus() >= num_nodes * nproc_per_node
            given |= {"kind": "local", "num_nodes": num_nodes}
            given |= {"gpus_per_node": nproc_per_node if has_gpus else 0}
        cluster = cluster_config({**given, **(cluster or {})})
    if cluster.num_nodes < nnodes:
        raise ConfigError(
            f"nnodes: expected at most {cluster.num_nodes}, the nodes of the cluster, got {nnodes}"
        )
    return dataclasses.replace(cluster, processes_per_node=nproc_per_node)
