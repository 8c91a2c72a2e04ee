"""One rank of a gang that predicts: it claims part after part, until no part is left.

Claims are a counter in the store of the rendezvous. An attempt begins with a new store and a new
list of the missing files, so a claim ends with the attempt of its rank. Ranks wait for that list
and for nothing else, so there is no process group, and no barrier at the end.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import torch

from flyte_ddp import events, session
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.protocol.ranks import STOP_SIGNALS
from flyte_ddp.prediction.job import MANIFEST, PredictionJob, part_name
from flyte_ddp.prediction.model import Predictor
from flyte_ddp.world import World

if TYPE_CHECKING:
    from flyte_ddp.rank.link import RankProcess
    from flyte_ddp.rank.reporter import Reporter

# keys of the store: numbers of the missing parts, count of claimed and count of finished parts
MISSING, CLAIMED, FINISHED = (f"flyte_ddp/parts-{each}" for each in ("missing", "claimed", "done"))
GOLDEN_RATIO = 0.618034


def main(job: PredictionJob) -> None:
    """Predict parts until all are claimed, or the run has to end. Raises as `Predictor`, and
    ConfigError for a batch that the GPU cannot hold.
    """
    current = session.current()
    process, reporter = current.process, current.reporter
    store = process.open_store()
    for name in STOP_SIGNALS:  # After a signal the rank still finishes its part.
        signal.signal(signal.Signals[name], lambda number, frame: None)
    directory = process.link.wait_for_data()
    predictor = Predictor(job, str(directory), World(0, 1, process.choose_device()))
    if process.rank == 0:
        store.set(MISSING, json.dumps(_begin(predictor, process, reporter)))
    missing = json.loads(store.get(MISSING))
    num_before = predictor.num_parts - len(missing)
    reporter.beat(num_before)
    while not process.link.stop_requested:
        place = store.add(CLAIMED, 1) - 1
        if place >= len(missing):
            return
        part = part_name(missing[place])
        started = events.PartStarted(process.rank, part, predictor.num_parts)
        reporter.emit(started, from_all=True)
        _write(predictor, missing[place], reporter)
        num_done = num_before + store.add(FINISHED, 1)
        reporter.beat(num_done)
        written = events.CheckpointWritten(num_done, f"{job.output}/{part}", best=False)
        reporter.emit(written, from_all=True)
    # The thread that received the request may not have noted it in the session yet.
    current.stop.is_reached = True


def _write(predictor: Predictor, number: int, reporter: Reporter) -> None:
    try:
        predictor.write_part(number, reporter.beat)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"batch_size: expected fewer samples for the memory of {predictor.device}, got "
            f"{predictor.job.batch_size}, with which {part_name(number)} does not fit: {error}"
        ) from error


def _begin(predictor: Predictor, process: RankProcess, reporter: Reporter) -> list[int]:
    """Write the manifest, or compare the data with it, and return the numbers of the missing parts.

    Each existing file counts as progress from which the run resumes.
    """
    job, storage = predictor.job, predictor.storage
    names = set(storage.names())
    if MANIFEST not in names:
        manifest = {**job.record, **predictor.describe()}
        storage.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    elif not process.job.stored:  # Otherwise an attempt of this run has compared the data.
        predictor.check_data()
    missing = [each for each in range(predictor.num_parts) if part_name(each) not in names]
    num_there = predictor.num_parts - len(missing)
    reporter.emit(events.CheckpointLoaded(num_there, job.output))
    process.link.position.is_stoppable = True
    # Each attempt begins with another part. So a part that ends its rank does not block the others.
    first = int(len(missing) * (GOLDEN_RATIO * process.node.num_restarts % 1))
    return missing[first:] + missing[:first]
