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

    A state with DTensors comes from a model that is split over the ranks, for example by
    `torch.distributed.checkpoint.state_dict`. All ranks save it: each rank calls `save`, and writes
    its own part. No tensor is gathered. Rank 0 writes the values that are not split. Stages of a
    pipeline have different values under the same keys, and are refused.

    `state` contains tensors and plain values, nested in dicts, lists, tuples and sets. It is copied
    before this returns, and written in the background. A checkpoint has a checksum. It is complete
    or does not exist. The newest checkpoints stay. An earlier step that is saved after later steps
    replaces them. `load` returns the last saved state. In it, NumPy's scalars are Python's numbers,
    NumPy's arrays are tensors (`.numpy()` converts them back), and other mappings are dicts.

    Args:
        in_memory: keep the state only in the memory of this node and one other node. So a run can
            save more often than a store allows, such as at every step. The state outlives killed
            ranks and the loss of a node, but not the run. So save without `in_memory` when the run
            is asked to stop. `load` of the next attempt finds the state if the store has no newer
            one. A save is left out while the previous state is still on its way to the other node.
            If the state does not fit, a line says so, and no state is kept in memory.

    Raises:
        ConfigError: `state` contains a value that could not be read back, such as an object of your
            own class. The message names its place and type. Or not all ranks save a split state
            with the same keys. Or a split state follows a whole state in memory, or the reverse.
        StorageDenied: the store refuses.
        StorageUnavailable: the store has been away for `store_timeout` seconds.

    Example:
        for step in range(1, 101):
            ...  # one optimizer step
            is_last = session.stop_requested or step == 100
            if is_last or step % 10 == 0:
                session.save({"step": step, "model": model.state_dict()}, step)
            if is_last:
                break
    """
    if _current:
        _current.saver.save(state, step, in_memory)


def load(into: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the newest complete checkpoint, in memory or in the store; None in a new run. For all
    ranks together.

    A state that was saved earlier in this attempt counts: `load` waits until it is written.

    Args:
        into: a state with the same keys. Its tensors are filled in place and returned. A split
            tensor gets this rank's part, whatever the number of ranks and the mesh were at the
            save. So no rank ever holds the whole tensor. Without `into`, all tensors are whole and
            on the CPU.

    Raises:
        ConfigError: `into` has other keys or shapes than the checkpoint, or types that cannot hold
            all its values.
        StorageUnavailable, StorageDenied: the store could not be read.

    Example:
        first_step = 1
        state = session.load()
        if state is not None:
            model.load_state_dict(state["model"])
            first_step = state["step"] + 1
    """
    if _current is None:
        return None
    return _current.saver.load(into)


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
    """Return this rank's part of each global batch of an epoch, and its mean loss's weight. All
    ranks call it.

    Every sample is in one batch of one rank. The number of ranks does not change which samples
    share a batch. DDP and FSDP average gradients over the ranks. With the weight, the average is
    the gradient of the mean loss of the whole batch, even where the batch does not divide evenly.
    All ranks get the same number of batches. A rank without a sample gets another rank's sample,
    with weight 0. A sample's random augmentation is drawn by seed, epoch and sample. All this holds
    under torchrun too.

    After `load`, an epoch continues after the saved batches, and earlier epochs yield nothing.
    `epochs` begins at the epoch that continues. `save` notes the current batch of the loop, so call
    it after the optimizer's step. Leaving the loop early ends its epoch, unless `stop_requested`
    was true, or the same loop is opened again.

    The result is an IterableDataset. Loop over it, or pass it to torchdata's `StatefulDataLoader`
    with `batch_size=None`.

    Args:
        dataset: a data set with a length and items, or an iterable. Every rank reads all samples of
            an iterable and keeps its own, in the iterable's order. The iterable's `set_epoch` is
            called, and its random draws are seeded by seed and epoch. `flyte_ddp.data.Shards` have
            an order of their own, so that each rank fetches few files.
        epoch: counts passes over the training data. None for other data, such as held-out data:
            they are in their own order, and begin at the start.
        shuffle: draws a new order for each epoch. Without it, and for an iterable, the order is the
            order of the data.
        seed: seed of the order and of augmentation.
        num_workers: loader processes of this rank; at most 1 for an iterable.
        collate_fn: makes a batch of samples, as in a DataLoader; by default tensors, nested as the
            samples are. It may leave samples out, and return None if it keeps none. Then another
            sample stands in for them, with weight 0. If the data have a length, its random draws
            are seeded by its last sample.
        num_samples: returns the number of samples in a batch if `collate_fn` leaves some out. The
            weight then counts only the samples in the batch.
        mesh: the ranks that share the samples, by default all: with tensor parallelism the part of
            the device mesh that `fully_shard` or DDP gets, because the ranks of a tensor-parallel
            group need the same samples.

    Raises:
        ConfigError: `global_batch_size` is smaller than the number of ranks that share it;
            `num_samples` returns fewer than 1 or more than there were; the
            length of the data, `shuffle` or `seed` differs from the checkpoint; an iterable ends
            before the checkpoint.

    Example:
        for epoch in session.epochs(2):
            for (inputs, targets), weight in session.batches(data, 32, epoch):
                loss = weight * functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    from flyte_ddp.rank.batches import Batches, EpochBatches

    made = EpochBatches(
        dataset,
        global_batch_size,
        epoch,
        seed,
        num_workers,
        collate_fn,
        shuffle,
        shared_by=mesh,
        num_samples=num_samples,
    )
    track = None
    if _current and epoch is not None:
        track = functools.partial(_current.position.track, epoch=epoch)
    return Batches(made, track)


def epochs(num_epochs: int) -> range:
    """Return the epochs from 0 to `num_epochs` of a loop around `batches`. After `load`, only the
    remaining epochs.

    If the last batch of an epoch was saved inside the loop over its batches, the epoch remains,
    with no batch left. So the function can still do its work at the end of the epoch. If the
    function saves again after that loop, the epoch no longer remains.

    Example:
        for epoch in session.epochs(3):
            for batch, weight in session.batches(data, 32, epoch):
                ...  # one optimizer step
            session.report(epoch=epoch + 1, accuracy=0.98)
    """
    if _current is None:
        return range(num_epochs)
    return _current.position.epochs(num_epochs)


def report(step: int | None = None, epoch: float | None = None, **values: float) -> None:
    """Report progress and metrics: for the progress bar, the history, the report and W&B.

    Each rank may report different names, and waits for no other rank. The values of rank 0 are the
    run's figures. The values of the other ranks are sent once a second. The history contains them
    with their rank, and the report shows their mean and range.

    Every rank's call is a heartbeat: after the first one, a run in which no rank reports for
    `stall_timeout` seconds is ended, with the rank that the others wait for and the stacks.

    Args:
        step: optimizer steps since the start of the run; one more than the last by default.
        epoch: of the data, a fraction is fine.
        values: numbers by name, such as loss=0.31, accuracy=0.98.

    Raises:
        ConfigError: a value is no number.

    Example:
        for step in range(1, 11):
            loss = 1 / step
            session.report(step=step, epoch=step / 5, loss=loss)
    """
    if _current:
        _current.reporter.report(step, epoch, values)


def show(name: str, picture: Any) -> None:
    """Show a picture in the run's report, the newest of each name, and in W&B or TensorBoard.

    Only rank 0's picture is shown. A picture of more than 1024 pixels or 256 KiB is made smaller. A
    recipe calls this in `on_step` or `on_epoch`.

    Args:
        name: name of the picture, of at most 100 characters.
        picture: a figure of matplotlib, an image of PIL, or an array or tensor of (H, W), (H, W, C)
            or (C, H, W) with C of 1, 3 or 4: bytes, or floats in [0, 1].

    Raises:
        ConfigError: `picture` has another type or shape.

    Example:
        weight = model.weight.detach()
        lowest, highest = weight.aminmax()
        session.show("weights", (weight - lowest) / (highest - lowest))
    """
    if _current:
        _current.reporter.show(name, picture)


def submit_result(path: str, data: str | bytes) -> None:
    """Send a file of this rank to where the run was started, into `results` of `flyte_ddp.run`.

    The file arrives whole or not at all, before the run ends, even if this rank is killed after the
    call. A later file replaces an earlier one with the same path, even from before a restart. The
    call waits only while many files of this rank have not arrived. Without `results` no file is
    kept.

    Args:
        path: path of the file below the directory, such as "rank-1/losses.json".
        data: at most 64 MiB; text is stored as UTF-8.

    Raises:
        ConfigError: `path` names no file below the directory, or `data` has another type or size.

    Example:
        rank = int(os.environ.get("RANK", 0))
        losses = {"train": 0.31, "held-out": 0.35}
        session.submit_result(f"rank-{rank}/losses.json", json.dumps(losses))
    """
    if _current:
        _current.files.submit(path, data)


_current: Session | None = None


def is_in_run() -> bool:
    """Return whether this process is a rank of a run: under torchrun, or alone, it is not."""
    return _current is not None


def make_current(session: Session) -> None:
    """Let the functions and names of this module use `session`, in this process."""
    global _current
    _current = session


def current() -> Session:
    """Return the session of this process, which must be a rank."""
    assert _current is not None
    return _current


def __getattr__(name: str) -> Any:
    if name == "checkpoints":
        return _current.process.job.checkpoints if _current else ""
    if name == "stop_requested":
        return _current.stop.poll() if _current else False
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
