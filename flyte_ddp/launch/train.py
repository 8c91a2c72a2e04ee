"""Train a recipe from Python, on this machine or on a Dask cluster: what the workflows do, without
a Flyte.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.agent.scratch import own_directory
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.protocol.programs import Job, check_run_id
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import Gang
from flyte_ddp.observers.command_line import show_resume_command
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.reports.run_card import run_card, write_card
from flyte_ddp.recipes import Recipe, config_of, get_recipe, load_anew
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage import read_file, redact_errors
from flyte_ddp.storage.weights import from_bytes

if TYPE_CHECKING:
    from distributed import Client
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Trained:
    """The result of a training. A notebook shows the run's report.

    Attributes:
        model_state: the state dict, on the CPU: that of the best epoch, or of the last one if the
            config says so.
        epochs: each with its losses and metrics.
        best: the best of them, by the config's `monitor`.
        model_state_url: where the state dict is; "" if the checkpoints were not kept.
        card: the run card, as docs/outputs.md has it.
        export_url: directory with the card, the weights as safetensors and what the recipe exports;
            "" likewise.
    """

    model_state: dict[str, Tensor]
    epochs: list[events.EpochFinished]
    best: events.EpochFinished
    model_state_url: str
    card: dict[str, Any]
    export_url: str
    _run: events.RunState

    def __repr__(self) -> str:
        figures = {"test_loss": self.best.test_loss, **self.best.metrics}
        shown = ", ".join(f"{name} {value:.5g}" for name, value in figures.items())
        name = self._run.started.name if self._run.started else ""
        best, last = self.best.position, self.epochs[-1].position
        return f"<Trained {name}: epoch {best:.3g} of {last:.3g} is best, {shown}>"

    def _repr_html_(self) -> str:
        from flyte_ddp.observers.reports.run import Report

        return Report.of(self._run).render_fragment()


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
        recipe: such as "digits", the dotted name of your own, or your class itself, also one of a
            notebook, a REPL or a script: it travels by value, and a checksum of its code and of the
            values that this refers to is its version.
        config: fields that differ from the recipe's defaults, as of `--config`.
        data: path or URL for recipes that read data of yours.
        prepared: directory in which `prepare_data` has prepared the data already.
        nnodes, nproc_per_node, max_restarts, cluster, client: see `launch.run.Gang`.
        checkpoints: directory or URL, which all machines reach; an unfinished run there goes on,
            that of a class that travels by value if its version is the same. Where all ranks are on
            this machine, the default is a directory for the length of the run.
        run_id: as for `launch.run.run`.
        listeners: receive every event of the run.
        progress: show a bar and the ranks' lines on standard error.
        origin: for the run card, see `run_card`.

    Raises:
        ConfigError, DataError: bad input, before any rank trains.
        RankFailure, GangLost, ClusterError, StorageUnavailable, TrainingStopped: as
            `launch.run.run`.
    """
    check_run_id(run_id)
    recipe = recipe if isinstance(recipe, str) else load_anew(recipe)
    resolved = config_of(recipe, config or {})
    gang = Gang(nnodes, nproc_per_node, max_restarts, cluster, client=client)
    if not checkpoints and not gang.is_on_this_machine:
        raise ConfigError("checkpoints: expected a URL that all machines reach, got none")
    run = events.RunState()
    bars = [ProgressBar()] if progress else []
    with show_resume_command(bool(checkpoints)), contextlib.ExitStack() as stack:
        card = train_recipe(
            recipe,
            resolved,
            gang,
            checkpoints or stack.enter_context(own_directory("checkpoints-")),
            is_kept=bool(checkpoints),
            data=data,
            prepared=prepared,
            run_id=run_id,
            listeners=[*bars, *listeners],
            state=run,
            relay=bars[0].write if bars else None,
            origin=origin,
        )
        assert run.finished is not None  # else it has raised
        assert run.best is not None
        url = run.finished.model_state_url
        places = (url, card, run.finished.export_url) if checkpoints else ("", card, "")
        return Trained(from_bytes(read_file(url)), run.epochs, run.best, *places, run)


def train_recipe(
    recipe: str | type[Recipe],
    config: TrainingConfig,
    gang: Gang,
    checkpoints: str,
    *,
    is_kept: bool = True,
    data: str = "",
    prepared: str = "",
    run_id: str = "",
    listeners: Sequence[events.Listener] = (),
    relay: Callable[[str], None] | None = None,
    origin: Mapping[str, str] = MappingProxyType({}),
    state: events.RunState | None = None,
) -> dict[str, Any]:
    """Train as `train` does, without loading the model state; return the run card.

    The data are prepared while the ranks of this machine start, and before a cluster does.
    """
    program = recipe_program(recipe, config)
    reader = get_recipe(recipe, config.recipe_options)
    with contextlib.ExitStack() as stack:
        directory = prepared or stack.enter_context(own_directory("data-"))

        @functools.cache
        def prepare() -> str:
            if not prepared:
                prepare_data(reader, data, Path(directory))
            return directory

        if not gang.is_on_this_machine:
            prepare()
        place = stack.enter_context(gang.open_place(program))
        job = Job(program, checkpoints, time.time(), run_id, is_kept=is_kept)
        state = driver.run(job, place, prepare, listeners, relay, state=state)
        assert state.finished is not None  # else it has raised
        card = run_card(state, **origin)
        if is_kept:
            write_card(state.finished.export_url, card)
        return card
