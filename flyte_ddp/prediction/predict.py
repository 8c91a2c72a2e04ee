"""Predict new data with a recipe's trained model, on this machine or on a Dask cluster: Parquet
files, one for each part of the data, complete or absent. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.cluster.admission import list_places
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config.fields import check_object, whole_number
from flyte_ddp.errors import ConfigError, StorageDenied
from flyte_ddp.launch.agent.devices import num_gpus
from flyte_ddp.launch.agent.scratch import own_directory
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import Gang
from flyte_ddp.prediction.job import MANIFEST, PredictionJob, part_name
from flyte_ddp.promotion.champion import CARD, ChampionStore
from flyte_ddp.recipes import Recipe, config_of, get_recipe, load_anew, name_of, path_of
from flyte_ddp.recipes.prepare import describe_data, prepare_data
from flyte_ddp.recipes.recorded import restore_options
from flyte_ddp.storage import (
    Storage,
    check_places,
    redact_errors,
    redact_values,
    storage_environment,
)
from flyte_ddp.storage.hidden import OPTIONS, RecordedConfig, flatten, hash_hidden
from flyte_ddp.storage.weights import pin_state, split_pin

if TYPE_CHECKING:
    from distributed import Client

BATCH_SIZE, PART_SIZE = 256, 64 * 256  # samples


@dataclass(frozen=True)
class Predictions:
    """The result of `predict`."""

    paths: list[str]  # of the Parquet files, in the order of the samples
    num_rows: int  # in all of them, one for each sample


@dataclass(frozen=True)
class TrainedModel:
    """A model state, and what is known of its training."""

    state: str  # URL with the checksum of its contents
    recipe: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, as they are shown
    # of those that are hidden; None where an earlier version trained
    hidden: Sequence[Mapping[str, str]] | None = ()


@redact_errors()
def predict(
    recipe: str | type[Recipe],
    model_state: str,
    data: str,
    output: str,
    *,
    batch_size: int = BATCH_SIZE,
    part_size: int = PART_SIZE,
    config: Mapping[str, Any] | None = None,
    nnodes: int | str | None = None,
    nproc_per_node: int | str = "auto",
    cluster: ClusterConfig | Mapping[str, Any] | None = None,
    client: Client | None = None,
    name: str = "",
    progress: bool = True,
) -> Predictions:
    """Predict every sample of `data` once, in its order. The same call resumes: files that are
    there are not made again.

    Args:
        recipe: as of `train`.
        model_state: path or URL of a state dict, or the directory of a champion.
        data: path or URL for `Recipe.prepare_new_data`; "" for the recipe's own.
        output: directory or URL for the files and their manifest, which all machines reach.
        batch_size: samples of a forward pass.
        part_size: samples of a file, a multiple of `batch_size`.
        config: fields that differ from the recipe's defaults. Options of the recipe are by default
            those of the model's training, where that is known.
        nnodes, nproc_per_node, cluster, client: as of `train`; one process for each GPU, or `auto`
            two.
        name: of a cluster that is made on Kubernetes, unique in a namespace.
        progress: show a bar on a terminal.

    Raises:
        ConfigError, DataError: bad input, among it a state of another model or of other classes,
            and an output that has other predictions.
        ChampionError: the champion is damaged.
        ClusterError: the cluster did not start, or lost too many processes.
        StorageUnavailable: a store could not be reached for some minutes.
    """
    recipe = recipe if isinstance(recipe, str) else load_anew(recipe)
    given = {} if config is None else config
    check_object("config", given)
    whole_number("batch_size", batch_size, minimum=1)
    if whole_number("part_size", part_size, minimum=1) % batch_size:
        raise ConfigError(
            f"part_size: expected a multiple of batch_size ({batch_size}), got {part_size}"
        )
    gang = Gang(nnodes, nproc_per_node, ClusterConfig.max_restarts, cluster, client=client)
    place = _cluster_config(gang)
    model = find_model(model_state)
    # also those beside the model, before anything is read by them
    named = {**model.options, **given.get("recipe_options", {})}
    check_places(list_places(named, "recipe_options"))
    options = _merge_options(recipe, model, given.get("recipe_options", {}))
    resolved = config_of(recipe, {**given, "recipe_options": options})
    resolved = dataclasses.replace(resolved, parallel="ddp")
    prepared = get_recipe(recipe, resolved.recipe_options)
    storage = Storage(output, "output")
    storage.check_access()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(own_directory("data-"))
        prepare_data(prepared, data, Path(directory), "prepare_new_data")
        note = describe_data(directory)
        facts = {
            "recipe": name_of(recipe),
            "recipe_version": note["recipe_version"],
            "precision": resolved.precision,
            "model_state": split_pin(model.state)[1] or model.state,
            "data": note["fingerprint"],
            "batch_size": batch_size,
            "part_size": part_size,
        }
        options = {OPTIONS: resolved.recipe_options}
        names, manifest = _look_into(storage, facts, options)
        job = PredictionJob(
            *(recipe, resolved, model.state, storage.url, batch_size, part_size),
            storage=storage_environment(),
        )

        from tqdm import tqdm

        from flyte_ddp.cluster.connect import open_cluster
        from flyte_ddp.launch.nodes.dask.data import SharedData, packed_code
        from flyte_ddp.prediction.workers import PredictionWorkers

        # Also where all files are there: the data may have changed where a recipe reads them.
        name = name or f"predict-{os.urandom(4).hex()}"
        workers = PredictionWorkers(
            client or stack.enter_context(open_cluster(place, name)),
            place,
            job,
            packed_code(recipe_program(recipe, resolved)),
            directory,
            SharedData(storage),
        )
        stack.callback(workers.close)
        if manifest:
            deque(workers.run("check_data", [()]), maxlen=0)
        else:
            (found,) = workers.run("describe", [()])
            record = {**redact_values(options), "hidden": hash_hidden(options)}
            manifest = {**facts, **record, **found}
            storage.write(MANIFEST, json.dumps(manifest, indent=1).encode())
        num_samples = manifest["num_samples"]
        parts = [part_name(number) for number in range(-(-num_samples // part_size))]
        missing = [(number,) for number, part in enumerate(parts) if part not in names]
        written = tqdm(
            workers.run("write_part", missing),
            total=len(missing),
            unit="part",
            disable=None if progress else True,  # None: where there is no terminal
        )
        deque(written, maxlen=0)
        for left in storage.names():
            if left.endswith(".tmp"):  # by a process that was killed
                storage.delete(left)
        return Predictions([storage.join(part) for part in parts], num_samples)


def find_model(url: str) -> TrainedModel:
    """Return the model whose state is at `url`, or that is the champion there.

    Raises:
        ConfigError: there is none.
        ChampionError: the champion is damaged.
    """
    store = ChampionStore(url)
    with contextlib.suppress(StorageDenied):  # below a file nothing can be read
        if store.pointer():
            manifest = store.manifest()
            return TrainedModel(
                f"{store.state_url(manifest)} (sha256 {manifest.sha256})",
                manifest.recipe,
                manifest.config.get(OPTIONS, {}),
                manifest.hidden,
            )
    pinned = pin_state(url)
    if not split_pin(pinned)[1]:
        raise ConfigError(
            "model_state: expected the file of a state dict, or the directory of a champion, got "
            f"{url!r}, which does not exist"
        )
    directory = os.path.dirname(url) or "."
    for place in (directory, f"{directory}/export"):  # where a training leaves its card
        with contextlib.suppress(FileNotFoundError, ValueError):
            card = json.loads(Storage(place, "model_state").read(CARD))
            return TrainedModel(pinned, card["recipe"], card["config"][OPTIONS], card.get("hidden"))
    return TrainedModel(pinned)


def _merge_options(
    recipe: str | type[Recipe], model: TrainedModel, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the recipe's options: those of the training, and what is given besides.

    Raises:
        ConfigError: the model is of another recipe, or was trained with another value, or with one
            that is hidden and not given.
    """
    ours, theirs = (
        path_of(each).rpartition(".")[2] for each in (name_of(recipe), model.recipe or "")
    )
    if theirs and ours != theirs:
        raise ConfigError(
            f"recipe: expected {model.recipe!r}, of which the model is, got {name_of(recipe)!r}"
        )
    trained = RecordedConfig({OPTIONS: model.options}, model.hidden)
    return restore_options(recipe, trained, given)


def _look_into(
    storage: Storage, facts: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[set[str], dict[str, Any]]:
    """Return the names of the files in the output, and their manifest; nothing where there is none
    yet.

    Args:
        options: of the recipe, under their name in a config.

    Raises:
        ConfigError: it has other files, or predictions that others would have made.
    """
    names = set(storage.names())
    if MANIFEST not in names:
        if others := sorted(name for name in names if not name.startswith(".")):
            raise ConfigError(
                "output: expected an empty directory, or one with predictions of this call, got "
                f"{storage.url!r} with {others[0]}"
            )
        return set(), {}
    manifest = json.loads(storage.read(MANIFEST))
    for field_name, value in facts.items():
        if manifest.get(field_name) != value:
            raise ConfigError(
                f"{field_name}: expected {manifest.get(field_name)!r}, as of the predictions in "
                f"{storage.url!r}, got {value!r}; others need another output"
            )
    made = RecordedConfig({OPTIONS: manifest[OPTIONS]}, manifest.get("hidden"))
    for name, value in flatten(options).items():
        if not made.is_comparable(name):
            raise ConfigError(
                f"{name}: expected a value that can be compared, but the predictions in "
                f"{storage.url!r} hide it and are of an earlier version: give another output"
            )
        if not made.is_same(name, value):
            where = f", as of the predictions in {storage.url!r}"
            difference = made.describe_difference(name, value, where)
            raise ConfigError(f"{name}: {difference}; others need another output")
    return names, dict(manifest)


def _cluster_config(gang: Gang) -> ClusterConfig:
    """Return the cluster of the gang; for one machine a node of this one."""
    if gang.needs_cluster:
        return gang.cluster_config()
    count = gang.num_processes()
    gpus = count if count <= num_gpus() else 0
    return ClusterConfig("local", num_nodes=1, gpus_per_node=gpus, processes_per_node=count)
