"""Run a scaling study: the same training at several world sizes on one cluster, one after the other.

Runs never overlap, because they are timed. Every rank of every run has the same number of CPU threads: otherwise one
rank with a whole machine, compared with two that share it, would measure the cores and not the ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence

from distributed import Client

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import NOT_IN_HISTORY, Event, Listener, parse_history, to_line
from flyte_ddp.launch import driver
from flyte_ddp.launch.dask.place import DaskPlace, check
from flyte_ddp.launch.process.job import Job
from flyte_ddp.launch.process.programs import RecipeProgram
from flyte_ddp.launch.supervisor import print_line
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.storage import Storage
from flyte_ddp.studies.scaling import ScalingRun

HISTORY_FILE = "study.jsonl"  # the events of a finished run, beside its checkpoints


def resize_cluster(cluster: ClusterConfig, world_size: int) -> ClusterConfig:
    """Return the part of `cluster` that `world_size` ranks use: one node, or as many full nodes as needed.

    Raises:
        ConfigError: the ranks do not fill whole nodes.
    """
    per_node = cluster.ranks_per_node
    if world_size > per_node and world_size % per_node:
        raise ConfigError(
            f"world_sizes: expected at most {per_node} (ranks per node) or a multiple of it, such as "
            f"{world_size // per_node * per_node}, got {world_size}"
        )
    return dataclasses.replace(
        cluster,
        num_nodes=max(1, world_size // per_node),
        processes_per_node=min(world_size, per_node),
        min_nodes=0,  # continuing with fewer nodes would change the world size
    )


def validate_runs(recipe: str, config: TrainingConfig, world_sizes: Sequence[int], cluster: ClusterConfig) -> None:
    """Validate all runs before the cluster starts.

    Raises:
        ConfigError: as `resize_cluster` and `launcher.check`; or a split model, no rank of which can step alone.
    """
    if config.parallel != "ddp":
        raise ConfigError(f"config.parallel: expected ddp in a scaling study, got {config.parallel!r}")
    for world_size in world_sizes:
        check(Job(RecipeProgram(recipe, config), "", 0.0), resize_cluster(cluster, world_size))


def train_at_sizes(
    recipe: str,
    config: TrainingConfig,
    world_sizes: Sequence[int],
    learning_rates: Sequence[float],
    checkpoints: str,
    data: str,
    client: Client,
    cluster: ClusterConfig,
    *,
    make_listeners: Callable[[Job, TrainingConfig, int], Sequence[Listener]] = lambda job, config, world_size: (),
    relay: Callable[[str], None] = print_line,
    run_name: str = "",
    run: str = "",
) -> list[str]:
    """Train at every world size with every learning rate. Runs already finished in `checkpoints` are not repeated.

    Args:
        checkpoints: URL of a directory that every worker reaches; each run has a subdirectory.
        data: the directory of the prepared data.
        client: from `cluster.open_cluster`, for the largest world size.
        make_listeners: returns the listeners of a job with a config at a world size.
        run: the same for all attempts of the study, see `Job`.

    Returns:
        The history of each run as JSON lines, see `events.to_line`.

    Raises:
        As `driver.run`. Runs that finished before the failure are not repeated by a retry.
    """
    fingerprint = describe_data(data)["fingerprint"]
    histories: list[str] = []
    threads = cluster.threads_per_rank
    for learning_rate in learning_rates:
        # The largest first: all other runs get the same number of threads per rank.
        for world_size in sorted(world_sizes, reverse=True):
            run_config = dataclasses.replace(config, learning_rate=learning_rate)
            storage = Storage(
                f"{checkpoints.rstrip('/')}/{_name_directory(recipe, run_config, world_size, fingerprint)}"
            )
            job = Job(RecipeProgram(recipe, run_config), storage.url, time.time(), run=run)
            record = _load_record(storage)
            if record is None:
                record = _Recorder()
                nodes = dataclasses.replace(resize_cluster(cluster, world_size), threads_per_rank=threads)
                listeners = [record, *make_listeners(job, run_config, world_size)]
                driver.run(job, DaskPlace(client, nodes, run_name), lambda: data, listeners, relay)
                storage.write(HISTORY_FILE, record.text.encode())
            else:
                for listener in make_listeners(job, run_config, world_size):
                    for event in record.events:
                        listener.handle(event)
                    listener.close(None)
            finished = ScalingRun.of(record.events)
            assert finished is not None  # the run has finished
            threads = threads or finished.started.num_threads
            histories.append(record.text)
    return histories


class _Recorder:
    """Listener that records the events a study needs."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.text = ""

    def handle(self, event: Event) -> None:
        if not isinstance(event, NOT_IN_HISTORY):
            self.events.append(event)
            self.text += to_line(event)

    def close(self, error: BaseException | None) -> None:
        pass


def _name_directory(recipe: str, config: TrainingConfig, world_size: int, fingerprint: str) -> str:
    """Return a directory name unique to the run, so that no other run resumes from its checkpoints."""
    whole = json.dumps([recipe, dataclasses.asdict(config), fingerprint], sort_keys=True)
    return f"{world_size}-ranks-rate-{config.learning_rate:g}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


def _load_record(storage: Storage) -> _Recorder | None:
    """Load the finished run stored there; None if there is none."""
    record = _Recorder()
    try:
        contents = storage.read(HISTORY_FILE)
    except FileNotFoundError:
        return None
    record.text, record.events = contents.decode(), parse_history(contents, storage.join(HISTORY_FILE))
    return record if ScalingRun.of(record.events) else None
