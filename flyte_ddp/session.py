"""The run that a training function belongs to: its checkpoints, reports and stop requests. Using it
is optional.

    from flyte_ddp import session

    state = session.load()  # None in a new run
    if state:
        model.load_state_dict(state["model"])
    for step in range(state["step"] + 1 if state else 1, 1001):  # counts the steps that are done
        ...
        session.report(step=step, loss=loss.item())
        is_last = session.stop_requested or step == 1000
        if is_last or step % 100 == 0:
            session.save({"step": step, "model": model.state_dict()}, step)
        if is_last:
            return

Under torchrun, or in a plain process, there is no run to ask: `load` returns None, `save` and
`report` do nothing, and `stop_requested` is False. So the same script runs under all of them.
Imports no torch before a checkpoint is read or written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flyte_ddp.rank.batches import Batches
    from flyte_ddp.rank.session import Session

# URL of a directory that outlives processes, pods and attempts; "" if the run was given none
checkpoints: str
stop_requested: (
    # the run is to end soon, a preemption for example: save and return. Read it once a step, on all
    # ranks
    bool
)


def save(state: Mapping[str, Any], step: int, in_memory: bool = False) -> None:
    """Keep `state` as the checkpoint of optimizer step `step`. Every rank may call it; rank 0
    writes.

    A state with DTensors, such as `torch.distributed.checkpoint.state_dict` returns of a model that
    is split over the ranks, is saved by all of them: each calls it, and writes the part that it
    has. None is gathered. What is not split is rank 0's. Stages of a pipeline, which have other
    values under the same keys, are refused.

    `state` is copied before this returns and written in the background: tensors and plain values,
    nested in dicts, lists, tuples and sets. It is complete or not there at all, and checksummed.
    The newest ones stay: an earlier step that is saved after later ones replaces them. `load`
    returns what was saved last, but NumPy's scalars as Python's numbers,
    its arrays as tensors (`.numpy()` makes arrays of them), and other mappings as dicts.

    Args:
        in_memory: keep it in the memory of this node and of one other alone, to save more often
            than a store allows, such as at every step. It outlives ranks that are killed and the
            loss of a node, but not the run: it does not count when the run is asked to stop, so
            save without it then. `load` of the next attempt finds it if the store has nothing as
            new. It is left out while the one before is still on its way to the other node. Where it
            does not fit, a line says so, and none is kept.

    Raises:
        ConfigError: `state` holds something that could not be read back, such as an object of a
            class of yours. The message has its place and its type. Or a split state is not saved by
            all ranks, with the same keys. Or one is saved after a whole one in memory, or a whole
            one after it.
        StorageDenied: the store refuses.
        StorageUnavailable: the store has been away for `store_timeout` seconds.
    """
    if _current:
        _current.saver.save(state, step, in_memory)


def load(into: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the newest complete checkpoint, in memory or in the store; None in a new run. For all
    ranks together.

    What was saved before in this attempt counts: it is waited for.

    Args:
        into: a state with the same keys. Its tensors are filled in place and are those that are
            returned. A split one gets this rank's part, whatever the number of ranks and the mesh
            were that saved it: so no rank ever holds the whole. Without it tensors are whole and on
            the CPU, those that were split as well.

    Raises:
        ConfigError: `into` has other keys or shapes than the checkpoint, or types that cannot hold
            all its values.
        StorageUnavailable, StorageDenied: what is there could not be found out.
    """
    return _current.saver.load(into) if _current else None


def batches(
    dataset: Any,
    global_batch_size: int,
    epoch: int | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    num_samples: Callable[[Any], int] | None = None,
    mesh: DeviceMesh | None = None,
) -> Batches:
    """Return this rank's part of each global batch of an epoch, and its mean loss's weight. For all
    ranks together.

        for batch, weight in session.batches(data, 64, epoch):
            loss = weight * functional.cross_entropy(model(batch[0]), batch[1])

    Every sample is in one batch of one rank, and which ones share a batch does not depend on the
    number of ranks. DDP and FSDP average gradients over the ranks, so with the weight the gradient
    is that of the whole batch's mean also where a batch does not divide evenly. All ranks get as
    many batches: one for which no sample is left gets another's, with weight 0. A sample's random
    augmentation is drawn by seed, epoch and sample. So it is under torchrun too.

    After `load` an epoch goes on behind the batches whose steps were saved, and epochs before it
    yield nothing. `epochs` begins at it. `save` notes the batch that the loop is at, so call it
    after the optimizer's step. A loop that is left before its end has ended its epoch, unless
    `stop_requested` was true, or the same loop is opened again.

    What is returned is an IterableDataset: a loop goes over it, or torchdata's `StatefulDataLoader`
    with `batch_size=None`.

    Args:
        dataset: with a length and items; or an iterable, of which every rank reads all samples and
            keeps its own, in the iterable's order. Its `set_epoch` is called, and its random draws
            are seeded by seed and epoch. `flyte_ddp.data.Shards` have an order of their own, for
            which each rank fetches few files.
        epoch: counts passes over the training data. None for other data, such as held-out ones:
            they are in their own order, and begin at the start.
        shuffle: draws an order for each epoch; else it is that of the data, as for an iterable.
        seed: of the order and of augmentation.
        num_workers: loader processes of this rank; at most 1 for an iterable.
        collate_fn: makes a batch of samples, as in a DataLoader; by default tensors, nested as the
            samples are. It may leave samples out, and return None where it keeps none: then another
            sample stands in for them, with weight 0. Where the data have a length, what it draws is
            seeded by its last sample.
        num_samples: returns how many samples are in a batch, where `collate_fn` leaves some out.
            The weight then counts these alone.
        mesh: the ranks that share the samples, by default all: with tensor parallelism the part of
            the device mesh that `fully_shard` or DDP gets, because the ranks of a tensor-parallel
            group need the same samples.

    Raises:
        ConfigError: `global_batch_size` is smaller than the number of ranks that share it;
            `num_samples` returns fewer than 1 or more than there were; the
            length of the data, `shuffle` or `seed` are not those that the checkpoint was written
            with; an iterable ends before the checkpoint.
    """
    from flyte_ddp.rank.batches import Batches, EpochBatches

    made = EpochBatches(
        *(dataset, global_batch_size, epoch, seed, num_workers, collate_fn, shuffle),
        mesh=mesh,
        num_samples=num_samples,
    )
    track = None
    if _current and epoch is not None:
        track = functools.partial(_current.position.track, epoch=epoch)
    return Batches(made, track)


def epochs(num_epochs: int) -> range:
    """Return the epochs from 0 to `num_epochs` of a loop around `batches`, after `load` those that
    are left.

    An epoch whose last batch was saved in the loop over its batches is one of them, with no batch
    left: what the function does at its end is still to be done. It is not if the function saves
    again after that.
    """
    return _current.position.epochs(num_epochs) if _current else range(num_epochs)


def report(step: int | None = None, epoch: float | None = None, **values: float) -> None:
    """Report progress and metrics: for the progress bar, the history, the report and W&B.

    Each rank may report other names, and waits for no other. Rank 0's are the run's figures. Those
    of the others, which travel once a second, are in the history with their rank; the report has
    their mean and range.

    Every rank's call is a heartbeat: after the first one, a run in which no rank reports for
    `stall_timeout` seconds is ended, with the rank that the others wait for and the stacks.

    Args:
        step: optimizer steps since the start of the run; one more than the last by default.
        epoch: of the data, a fraction is fine.
        values: numbers by name, such as loss=0.31, accuracy=0.98.

    Raises:
        ConfigError: a value is no number.
    """
    if _current:
        _current.reporter.report(step, epoch, values)


def show(name: str, picture: Any) -> None:
    """Show a picture in the run's report, the newest of each name, and in W&B or TensorBoard.

    Rank 0's is shown, and the other ranks' calls do nothing. What needs more than 1024 pixels or
    256 KiB is made smaller. A recipe calls it in `on_step` or `on_epoch`.

    Args:
        name: of at most 100 characters.
        picture: a figure of matplotlib, an image of PIL, or an array or tensor of (H, W), (H, W, C)
            or (C, H, W) with C of 1, 3 or 4: bytes, or floats in [0, 1].

    Raises:
        ConfigError: it is none of these.
    """
    if _current:
        _current.reporter.show(name, picture)


def submit_result(path: str, data: str | bytes) -> None:
    """Send a file of this rank to where the run was started, into `results` of `flyte_ddp.run`.

    It is there whole or not at all, before the run ends; what was sent before this rank is killed
    as well. The latest under a path stays, of a restart also over what the ranks before it have
    sent. The call waits only while many files of this rank have not arrived. Without `results`
    nothing is kept.

    Args:
        path: of the file below the directory, such as "rank-1/losses.json".
        data: at most 64 MiB; text is stored as UTF-8.

    Raises:
        ConfigError: the path is none of a file below a directory, or the data are something else.
    """
    if _current:
        _current.files.submit(path, data)


_current: Session | None = None


def is_in_run() -> bool:
    """Return whether this process is a rank of a run: under torchrun, or alone, it is not."""
    return _current is not None


def make_current(session: Session) -> None:
    """Replace the functions and names of this module by those of `session`, in this process."""
    global _current
    _current = session


def current() -> Session:
    """Return the session of this process, which is one of a rank."""
    assert _current is not None
    return _current


def __getattr__(name: str) -> Any:
    if name == "checkpoints":
        return _current.process.job.checkpoints if _current else ""
    if name == "stop_requested":
        return _current.stop.poll() if _current else False
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
