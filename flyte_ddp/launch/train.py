"""Train a recipe from Python, on this machine or on a Dask cluster: what the workflows do, without
a Flyte.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import ConfigError, log_failures
from flyte_ddp.launch import driver
from flyte_ddp.launch.process.programs import Job, check_run_id, recipe_program
from flyte_ddp.launch.run import Gang
from flyte_ddp.launch.scratch import own_directory
from flyte_ddp.observers.reports.run_card import card_files, run_card
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage import redact_errors, write_file

if TYPE_CHECKING:
    from distributed import Client
    from torch import Tensor


@dataclass(frozen=True)
class Trained:
    """The result of a training.

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


@redact_errors()
def train(
    recipe: str,
    config: Mapping[str, Any] | None = None,
    *,
    data: str = "",
    nnodes: int | str = 1,
    nproc_per_node: int | str = "auto",
    max_restarts: int = ClusterConfig.max_restarts,
    cluster: ClusterConfig | Mapping[str, Any] | None = None,
    client: Client | None = None,
    checkpoints: str = "",
    run_id: str = "",
    initial_model_state: str = "",
    listeners: Sequence[events.Listener] = (),
) -> Trained:
    """Prepare the data of a recipe, train it in every rank of a gang, and return its model state
    and metrics.

    Args:
        recipe: such as "digits", or the dotted name of your own.
        config: fields that differ from the recipe's defaults, as of `--config`.
        data: path or URL for recipes that read data of yours.
        nnodes, nproc_per_node, max_restarts, cluster: see `launch.run.Gang`.
        client: of a Dask cluster that is there already.
        checkpoints: directory or URL, which all machines reach; an unfinished run there goes on.
            Where all ranks are on this machine, the default is a directory for the length of the
            run.
        run_id: as for `launch.run.run`.
        initial_model_state: URL of the weights to start from.
        listeners: receive every event of the run.

    Raises:
        ConfigError, DataError: bad input, before any rank starts.
        RankFailure, GangLost, ClusterError, StorageUnavailable, TrainingStopped: as
        `launch.run.run`.
    """
    check_run_id(run_id)
    resolved = config_of(recipe, config or {})
    gang = Gang(nnodes, nproc_per_node, max_restarts, cluster, resolved.stall_timeout)
    program = recipe_program(recipe, resolved, initial_model_state)
    prepared = get_recipe(recipe, resolved.recipe_options)
    prepared = prepared.adapt_to(initial_model_state) if initial_model_state else prepared
    is_kept = bool(checkpoints)
    if not is_kept and (client is not None or not gang.is_on_this_machine):
        raise ConfigError("checkpoints: expected a URL that all machines reach, got none")
    with contextlib.ExitStack() as stack:
        checkpoints = checkpoints or stack.enter_context(own_directory("checkpoints-"))
        directory = stack.enter_context(own_directory("data-"))
        prepare_data(prepared, data, Path(directory))
        place = stack.enter_context(gang.open_place(program, client=client))
        job = Job(program, checkpoints, time.time(), run_id, is_kept=is_kept)
        state = driver.run(job, place, lambda: directory, listeners)
        from flyte_ddp.checkpoints.files import load_state  # imports torch

        assert state.finished is not None  # else it has raised
        assert state.best is not None
        url, card = state.finished.model_state_url, run_card(state)
        if is_kept:
            with log_failures("run card"):
                for name, contents in card_files(card).items():
                    write_file(f"{state.finished.export_url}/{name}", contents, "checkpoints")
        places = (url, card, state.finished.export_url) if is_kept else ("", card, "")
        return Trained(load_state(url), state.epochs, state.best, *places)
