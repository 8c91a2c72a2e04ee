"""The runs of a scaling study: the same training at several world sizes on one cluster, one after the other.

Never two at once, because they are timed. Every rank of every run has the same number of CPU threads: one rank with a
machine to itself, compared with two that share it, would tell of the cores and not of the ranks.
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
from flyte_ddp.launch.dask.launcher import check, train_on_dask
from flyte_ddp.launch.spawn import print_line
from flyte_ddp.prepare import describe_data
from flyte_ddp.rank.job import Job
from flyte_ddp.scaling.study import SizedRun, timed_batch_sizes
from flyte_ddp.storage import Storage

RECORD = "study.jsonl"  # beside the checkpoints of a run that has finished: its events


def sized(cluster: ClusterConfig, world_size: int) -> ClusterConfig:
    """The part of `cluster` that `world_size` ranks take: one node, or as many full ones as they need.

    Raises:
        ConfigError: they fill no whole number of nodes.
    """
    per_node = cluster.ranks_per_node
    if world_size > per_node and world_size % per_node:
        raise ConfigError(
            f"world_sizes: {world_size} ranks do not fill nodes of {per_node}; accepted is at most {per_node}, or a "
            f"multiple of it, such as {world_size // per_node * per_node}"
        )
    return dataclasses.replace(
        cluster,
        num_nodes=max(1, world_size // per_node),
        processes_per_node=min(world_size, per_node),
        min_nodes=0,  # a gang that went on with fewer nodes would be another world size
    )


def check_runs(recipe: str, config: TrainingConfig, world_sizes: Sequence[int], cluster: ClusterConfig) -> None:
    """Find what is wrong with any of the runs before the cluster is asked for.

    Raises:
        ConfigError: as `sized` and `dask.check`.
    """
    for world_size in world_sizes:
        check(Job(recipe, config, "", 0.0), sized(cluster, world_size))


def train_at_sizes(
    recipe: str,
    config: TrainingConfig,
    world_sizes: Sequence[int],
    learning_rates: Sequence[float],
    projected_world_sizes: Sequence[int],
    checkpoints: str,
    data: str,
    client: Client,
    cluster: ClusterConfig,
    *,
    listeners_of: Callable[[Job, int], Sequence[Listener]] = lambda job, world_size: (),
    relay: Callable[[str], None] = print_line,
    run_name: str = "",
) -> list[str]:
    """Train at every world size with every learning rate; those are left out that `checkpoints` know to be finished.

    Args:
        checkpoints: URL of a directory that every worker reaches; each run has a directory in it, by what it is.
        data: the directory of the prepared data.
        client: from `cluster.open_cluster`, of a cluster as large as the largest of the `sized` ones.
        listeners_of: those of the run of a job at a world size, besides the study's own.

    Returns:
        The history of each run, in the form of `events.to_line`'s files.

    Raises:
        As `dask.train_on_dask`; the runs before the one that failed need not be done again.
    """
    fingerprint = describe_data(data)["fingerprint"]
    histories: list[str] = []
    threads = cluster.threads_per_rank
    for learning_rate in learning_rates:
        # The largest first: its ranks' share of the cores is what those of the others get too.
        for world_size in sorted(world_sizes, reverse=True):
            timed: tuple[int, ...] = ()
            if learning_rate == learning_rates[0]:  # what a step costs does not depend on it
                timed = timed_batch_sizes(config, world_size, max(world_sizes), projected_world_sizes)
            own = dataclasses.replace(config, learning_rate=learning_rate)
            place = Storage(f"{checkpoints.rstrip('/')}/{_directory(recipe, own, world_size, fingerprint)}")
            job = Job(recipe, own, place.url, time.time(), timed_batch_sizes=timed)
            record = _recorded(place, timed)
            if record is None:
                record = _Record()
                train_on_dask(
                    job,
                    lambda: data,
                    client,
                    dataclasses.replace(sized(cluster, world_size), threads_per_rank=threads),
                    [record, *listeners_of(job, world_size)],
                    relay,
                    run_name,
                )
                place.write(RECORD, record.text.encode())
            else:
                for listener in listeners_of(job, world_size):
                    for event in record.events:
                        listener.handle(event)
                    listener.close(None)
            run = SizedRun.of(record.events)
            assert run is not None  # it has finished
            threads = threads or run.started.num_threads
            histories.append(record.text)
    return histories


class _Record:
    """The listener that keeps what a study needs of a run."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.text = ""

    def handle(self, event: Event) -> None:
        if not isinstance(event, NOT_IN_HISTORY):
            self.events.append(event)
            self.text += to_line(event)

    def close(self, error: BaseException | None) -> None:
        pass


def _directory(recipe: str, config: TrainingConfig, world_size: int, fingerprint: str) -> str:
    """The same for the same run alone: another one must not go on from its checkpoints."""
    whole = json.dumps([recipe, dataclasses.asdict(config), fingerprint], sort_keys=True)
    return f"{world_size}-ranks-rate-{config.learning_rate:g}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


def _recorded(place: Storage, timed: tuple[int, ...]) -> _Record | None:
    """What is known of the run that finished there; None where none has, or other costs of it were timed."""
    record = _Record()
    try:
        contents = place.read(RECORD)
    except FileNotFoundError:
        return None
    record.text, record.events = contents.decode(), parse_history(contents, place.join(RECORD))
    run = SizedRun.of(record.events)
    if run is None or (timed and (run.costs is None or tuple(run.costs.batch_sizes) != timed)):
        return None
    return record
