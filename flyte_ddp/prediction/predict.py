"""Predict new data with a recipe's trained model, on this machine or on a Dask cluster. Each part
of the data gets a Parquet file, which is complete or absent. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp import errors, events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.code import by_value
from flyte_ddp.config.fields import check_object, whole_number
from flyte_ddp.errors import (
    ConfigError,
    DataError,
    GangLost,
    RankFailure,
    StorageDenied,
    abbreviate,
)
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import Gang, run_job
from flyte_ddp.prediction.job import MANIFEST, RUN, PredictionJob, part_name
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.project.admission import list_places
from flyte_ddp.promotion.champion import CARD, ChampionStore
from flyte_ddp.recipes import Recipe, config_of, get_recipe, load_anew, name_of, path_of
from flyte_ddp.recipes.prepare import describe_data, prepare_data
from flyte_ddp.recipes.recorded import restore_options
from flyte_ddp.storage import (
    Storage,
    check_places,
    redact_errors,
    redact_values,
)
from flyte_ddp.storage.recorded_config import OPTIONS, RecordedConfig, flatten, hash_hidden
from flyte_ddp.storage.state_dict_file import pin_state, split_pin

if TYPE_CHECKING:
    from distributed import Client

BATCH_SIZE, PART_SIZE = 256, 64 * 256  # samples
# seconds at most until predictions continue without a lost node; another rank makes its files
RETURN_TIMEOUT = 10.0
MAX_NAMED = 3  # number of parts that an error names
ARROW = ("pyarrow.parquet", "pandas")  # The first module imports pandas if it is installed.


@dataclass(frozen=True)
class Predictions:
    """The result of `predict`.

    Example:
        # after a prediction
        made = flyte_ddp.predict("digits", "digits.pt", "", "predictions")
        tables = [pandas.read_parquet(path) for path in made.paths]
        assert made.num_rows == sum(map(len, tables))
    """

    paths: list[str]  # Parquet files, in the order of the samples
    num_rows: int  # rows in all files, one for each sample


@dataclass(frozen=True)
class TrainedModel:
    """A model state, and the known facts about its training."""

    state: str  # URL with the checksum of its contents
    recipe: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # recipe's options that are not hidden
    # hashes of the hidden options; None if version 0.1.0 trained the model
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
    """Predict every sample of `data` once, in its order. The same call resumes: existing files are
    not made again.

    Args:
        recipe: the same as in `train`.
        model_state: path or URL of a state dict, or the directory of a champion.
        data: path or URL for `Recipe.prepare_new_data`; "" for the recipe's own data.
        output: directory or URL for the files and their manifest. All machines must reach it.
        batch_size: samples of a forward pass.
        part_size: samples of a file, a multiple of `batch_size`.
        config: fields that differ from the recipe's defaults. The recipe's options default to the
            values of the model's training, if these are known.
        nnodes, nproc_per_node, cluster, client: the same as in `train`; `auto` starts one rank for
            each GPU, or two. One node is enough to begin and to continue, unless `min_nodes` asks
            for more.
        name: name of a new cluster on Kubernetes, unique in a namespace.
        progress: show a bar on a terminal.

    Raises:
        ConfigError, DataError: the input is bad, for example a state of another model or of other
            classes, or an output that has other predictions.
        ChampionError: the champion is damaged.
        RankFailure, GangLost, ClusterError, StorageUnavailable, TrainingStopped: as
            `launch.run.run`; the message begins with the part that a lost rank had.

    Example:
        # starts a process on this machine
        made = flyte_ddp.predict("digits", "digits.pt", "", "predictions", nproc_per_node=1)
        print(made.num_rows)
        print(pandas.read_parquet(made.paths[0]))
    """
    if not isinstance(recipe, str):
        recipe = load_anew(recipe)
    given: Mapping[str, Any] = {}
    if config is not None:
        given = config
    check_object("config", given)
    _check_sizes(batch_size, part_size)
    gang = Gang(nnodes, nproc_per_node, ClusterConfig.max_restarts, cluster, client=client)
    if gang.needs_cluster:
        gang = dataclasses.replace(gang, cluster=_make_patient(gang.cluster_config()))
    model = find_model(model_state)
    # The options may contain URLs. They are checked before anything is read from them.
    named = {**model.options, **given.get("recipe_options", {})}
    check_places(list_places(named, "recipe_options"))
    options = merge_options(recipe, model, given.get("recipe_options", {}))
    resolved = config_of(recipe, {**given, "recipe_options": options})
    resolved = dataclasses.replace(resolved, parallel="ddp")
    prepared = get_recipe(recipe, resolved.recipe_options)
    storage = Storage(output, "output")
    storage.check_access()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(temporary_directory("data-"))
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
        check_output(storage, facts, options)
        record = {**facts, **redact_values(options), "hidden": hash_hidden(options)}
        job = PredictionJob(
            recipe, resolved, model.state, storage.url, batch_size, part_size, record
        )
        # The job runs even if all files exist, because a rank compares the data with theirs.
        _run(job, gang, name or f"predict-{os.urandom(4).hex()}", directory, progress)
        return _finish(storage, part_size)


def _check_sizes(batch_size: int, part_size: int) -> None:
    whole_number("batch_size", batch_size, minimum=1)
    if whole_number("part_size", part_size, minimum=1) % batch_size:
        raise ConfigError(
            f"part_size: expected a multiple of batch_size ({batch_size}), got {part_size}"
        )


def _finish(storage: Storage, part_size: int) -> Predictions:
    """Delete the temporary files of killed processes, and return the predictions."""
    num_samples = json.loads(storage.read(MANIFEST))["num_samples"]
    for name in storage.names():
        if name.endswith(".tmp"):
            storage.delete(name)
    parts = [part_name(number) for number in range(-(-num_samples // part_size))]
    return Predictions([storage.join(part) for part in parts], num_samples)


def _make_patient(cluster: ClusterConfig) -> ClusterConfig:
    """Return a cluster that continues with any number of nodes, because no rank waits for
    another.
    """
    timeout = min(cluster.return_timeout, RETURN_TIMEOUT)
    return dataclasses.replace(cluster, min_nodes=cluster.min_nodes or 1, return_timeout=timeout)


def _run(job: PredictionJob, gang: Gang, name: str, directory: str, progress: bool) -> None:
    """Write the missing files of `job`. Raises as `predict`."""
    from tqdm import tqdm

    storage = Storage(job.output, "output")
    is_hidden = None  # None hides the bar only if there is no terminal.
    if not progress:
        is_hidden = True
    with tqdm(unit="part", disable=is_hidden) as bar:
        shown = _Claims(bar)
        # All calls use the same id, because the manifest decides if they are alike.
        run = Job(
            _make_program(job),
            storage.join(RUN),
            run="predictions",
            is_kept=False,
            output=storage.url,
        )
        relay = functools.partial(bar.write, file=sys.stderr)
        with shown.name_part():
            run_job(run, gang, lambda: directory, [shown], relay, name=name)
    with contextlib.suppress(FileNotFoundError):
        storage.retry(lambda: storage.file_system.rm(storage.path_of(RUN), recursive=True))


def _make_program(job: PredictionJob) -> Program:
    """Return the program of the ranks: a training's program with another call and no batch size."""
    recipe = job.recipe
    if isinstance(recipe, str):
        call = pickle.dumps(job)
    else:
        call = by_value.pickle(job, recipe, "recipe")
    program = recipe_program(recipe, job.config)
    program = program.with_needs(batch=None, compiler=False, gpus="")
    slow_imports = (*program.slow_imports, *ARROW)
    return dataclasses.replace(program, call=call, slow_imports=slow_imports, missing_state="")


@dataclass(eq=False)
class _Claims(events.Listener):
    """The part that each rank of the attempt claimed last, and a progress bar of the written
    parts.
    """

    bar: Any
    parts: dict[int, str] = field(default_factory=dict)  # rank to the name of its last part

    def handle(self, event: events.Event) -> None:
        match event:
            case events.AttemptStarted():
                self.parts.clear()
            case events.PartStarted(rank, part, num_parts):
                self.parts[rank] = part
                self.bar.total = num_parts
            case events.CheckpointLoaded(step) | events.CheckpointWritten(step):
                self.bar.update(step - self.bar.n)

    @contextlib.contextmanager
    def name_part(self) -> Iterator[None]:
        """Name the lost part in an error of the block. A user's mistake is raised as the rank's own
        error.
        """
        try:
            yield
        except (RankFailure, GangLost) as error:
            rank = -1
            if isinstance(error, RankFailure):
                rank = error.rank
                kind: Any = getattr(errors, error.error_name, object)
                if issubclass(kind, (ConfigError, DataError)):
                    raise kind(error.cause.partition(": ")[2]) from None
            parts = sorted(self.parts.values())
            if rank in self.parts:
                parts = [self.parts[rank]]
            if parts:
                error.args = (f"{abbreviate(parts, MAX_NAMED)}: {error}",)
            raise


def find_model(url: str) -> TrainedModel:
    """Return the model with its state dict at `url`, or the champion in that directory.

    Raises:
        ConfigError: there is no model.
        ChampionError: the champion is damaged.
    """
    store = ChampionStore(url)
    with contextlib.suppress(StorageDenied):  # If the URL is a file, a path below it is refused.
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
    for place in (directory, f"{directory}/export"):  # directories with a training's card
        with contextlib.suppress(FileNotFoundError, ValueError):
            card = json.loads(Storage(place, "model_state").read(CARD))
            return TrainedModel(pinned, card["recipe"], card["config"][OPTIONS], card.get("hidden"))
    return TrainedModel(pinned)


def merge_options(
    recipe: str | type[Recipe], model: TrainedModel, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the recipe's options: the training's values and the given values.

    Raises:
        ConfigError: the model belongs to another recipe, was trained with another value, or was
            trained with a hidden value that is not given.
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


def check_output(storage: Storage, facts: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that the output is empty, or has predictions of the same call.

    Args:
        options: the recipe's options, as {"recipe_options": {...}}.

    Raises:
        ConfigError: the output has other files, or predictions of another call.
    """
    names = set(storage.names())
    if MANIFEST not in names:
        others = sorted(name for name in names if not name.startswith("."))
        if others:
            raise ConfigError(
                "output: expected an empty directory, or one with predictions of this call, got "
                f"{storage.url!r} with {others[0]}"
            )
        return
    manifest = json.loads(storage.read(MANIFEST))
    RecordedConfig(manifest, manifest.get("hidden")).check(
        {**facts, **flatten(options)},
        f", as of the predictions in {storage.url!r}",
        "; others need another output",
    )
