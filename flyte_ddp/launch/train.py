"""Train a recipe from Python, on this machine or on a Dask cluster. The workflows do the same with
Flyte.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.protocol.programs import Job, check_run_id
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import Gang, run_job
from flyte_ddp.launch.run_observers import show_resume_command
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.reports.run_card import run_card, write_card
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.recipes import Recipe, config_of, get_recipe, load_anew
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage import read_file, redact_errors
from flyte_ddp.storage.state_dict_file import from_bytes

if TYPE_CHECKING:
    from distributed import Client
    from torch import Tensor

    from flyte_ddp.observers.reports.run import Report


@dataclass(frozen=True, repr=False)
class Trained:
    """The result of a training. A notebook shows the run's report.

    Attributes:
        model_state: the state dict of the best epoch, on the CPU; of the last epoch if the config
            says so.
        epochs: all epochs, each with its losses and metrics.
        best: the best epoch, by the config's `monitor`.
        model_state_url: URL of the state dict; "" if the checkpoints were not kept.
        card: the run card, described in docs/outputs.md.
        export_url: directory with the card, the weights as safetensors and the recipe's exports; ""
            if the checkpoints were not kept.

    Example:
        # after a training
        trained = flyte_ddp.train("digits", {"epochs": 2}, nproc_per_node=2)
        losses = [epoch.test_loss for epoch in trained.epochs]
        model = Digits().model()
        model.load_state_dict(trained.model_state)
    """

    model_state: dict[str, Tensor]
    epochs: list[events.EpochFinished]
    best: events.EpochFinished
    model_state_url: str
    card: dict[str, Any]
    export_url: str
    _report: Report

    def __repr__(self) -> str:
        figures = {"test_loss": self.best.test_loss, **self.best.metrics}
        shown = ", ".join(f"{name} {value:.5g}" for name, value in figures.items())
        best, last = self.best.position, self.epochs[-1].position
        return f"<Trained {self.card['recipe']}: epoch {best:.3g} of {last:.3g} is best, {shown}>"

    def _repr_html_(self) -> str:
        return self._report.render_fragment()


@redact_errors()
def train(
    recipe: str | type[Recipe],
    config: Mapping[str, Any] | None = None,
    *,
    data: str = "",
    prepared: str = "",
    nnodes: int | str | None = None,
    nproc_per_node: int | str = "auto",
    max_restarts: int = ClusterConfig.max_restarts,
    cluster: ClusterConfig | Mapping[str, Any] | None = None,
    client: Client | None = None,
    checkpoints: str = "",
    run_id: str = "",
    listeners: Sequence[events.Listener] = (),
    progress: bool = True,
    origin: Mapping[str, str] = MappingProxyType({}),
) -> Trained:
    """Prepare the data of a recipe, train it in every rank of a gang, and return its model state
    and metrics.

    Args:
        recipe: a name such as "digits", the dotted name of your own recipe, or your class itself. A
            class of a notebook, a REPL or a script travels by value. Its version is a checksum of
            its code and of the values to which the code refers.
        config: fields that differ from the recipe's defaults, as in `--config`.
        data: path or URL for recipes that read data of yours.
        prepared: directory in which `prepare_data` has prepared the data already.
        nnodes, nproc_per_node, max_restarts, cluster, client: see `launch.run.Gang`.
        checkpoints: directory or URL, which all machines reach. An unfinished run there goes on. If
            the class travels by value, its version must be the same. If all ranks are on this
            machine, the default is a directory for the length of the run.
        run_id: as for `launch.run.run`.
        listeners: receive every event of the run.
        progress: show a bar and the ranks' lines on standard error.
        origin: for the run card, see `run_card`.

    Raises:
        ConfigError, DataError: bad input, before any rank trains.
        RankFailure, GangLost, ClusterError, StorageUnavailable, TrainingStopped: as
            `launch.run.run`.

    Example:
        # starts two processes on this machine
        trained = flyte_ddp.train("digits", {"epochs": 2}, nproc_per_node=2)
        print(trained.best.metrics["accuracy"])
        torch.save(trained.model_state, "digits.pt")
    """
    check_run_id(run_id)
    if not isinstance(recipe, str):
        recipe = load_anew(recipe)
    resolved = config_of(recipe, config or {})
    gang = Gang(nnodes, nproc_per_node, max_restarts, cluster, client=client)
    if not checkpoints and not gang.is_on_this_machine:
        raise ConfigError("checkpoints: expected a URL that all machines reach, got none")
    from flyte_ddp.observers.reports.run import Report

    report = Report()
    bars: list[ProgressBar] = []
    relay = None
    if progress:
        bars.append(ProgressBar())
        relay = bars[0].write
    with show_resume_command(bool(checkpoints)), contextlib.ExitStack() as stack:
        place = checkpoints or stack.enter_context(temporary_directory("checkpoints-"))
        is_kept = bool(checkpoints)
        job = Job(recipe_program(recipe, resolved), place, run=run_id, is_kept=is_kept)
        reader = get_recipe(recipe, resolved.recipe_options)
        prepare = stack.enter_context(open_data(reader, data, prepared))
        run = train_recipe(job, gang, prepare, [*bars, report, *listeners], relay, origin)
        assert run.finished is not None
        assert run.best is not None
        url, export_url = run.finished.model_state_url, run.finished.export_url
        model_state = from_bytes(read_file(url))
        if not checkpoints:
            url = export_url = ""
        card = run_card(run, **origin)
        return Trained(model_state, run.epochs, run.best, url, card, export_url, report)


@contextlib.contextmanager
def open_data(recipe: Recipe, source: str, prepared: str = "") -> Iterator[Callable[[], str]]:
    """Yield the function that prepares a recipe's data at its first call, and returns the
    directory, which exists for the length of the block.

    Args:
        source: path or URL for recipes that read data of the user's.
        prepared: directory of data that are prepared already; "" for none.
    """
    if prepared:
        yield lambda: prepared
        return
    with temporary_directory("data-") as directory:

        @functools.cache
        def prepare() -> str:
            prepare_data(recipe, source, Path(directory))
            return directory

        yield prepare


def train_recipe(
    job: Job,
    gang: Gang,
    data: Callable[[], str],
    listeners: Sequence[events.Listener],
    relay: Callable[[str], None] | None,
    origin: Mapping[str, str] = MappingProxyType({}),
) -> events.RunState:
    """Train as `train` does, without loading the model state. Return the run's state.

    The data are prepared while the ranks of this machine start, and before a cluster does.
    """
    if not gang.is_on_this_machine:
        data()
    state = run_job(job, gang, data, listeners, relay)
    assert state.finished is not None  # an unfinished run has raised
    if job.is_kept:
        write_card(state.finished.export_url, run_card(state, **origin))
    return state
