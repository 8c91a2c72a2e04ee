"""Call the program in a rank, with a session, and send what it returned. Imports no torch at the top.

A function's first line must not wait for torch: who measures a start measures that. Nor may torch be imported before
the function does it: a variable that the function sets for torch would come too late. So the store where the ranks meet
is served from a thread that waits for the function's own import.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import select
import sys
import threading
import time
from typing import TYPE_CHECKING

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp import events, session
from flyte_ddp.errors import StopRequested
from flyte_ddp.launch.process.background import call_in_background
from flyte_ddp.launch.process.collectives import watch_main_thread
from flyte_ddp.launch.process.end import end_forked_processes, run_exit_handlers
from flyte_ddp.launch.process.session import Session

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from flyte_ddp.launch.process.link import RankProcess, SupervisorLink

STORE_TIMEOUT = 600.0  # seconds that a rank waits for the store to be served
MAX_RETURNED_BYTES = 64 << 20
ENDED = "flyte_ddp/num_ended"  # the store's counter of calls that have returned
POLL_INTERVAL = 0.05  # seconds


def call_program(process: RankProcess) -> None:
    """Call the program, and send rank 0's value once every rank's call has returned.

    Raises:
        StopRequested: the call has ended because the session asked for it.
        ValueError: the value is too large to be sent.
    """
    program = process.job.program
    store = _Store(process, program.is_command)
    current = Session(process, store.open)
    session.make_current(current)
    if not program.describes_itself:
        current.emit_start()
        if process.node.world_size > 1:
            watch_main_thread(process.link.set_waiting_since, program.stall_timeout)
            threading.Thread(target=_watch_ddp, args=(process.link, current), name="pace", daemon=True).start()
    _be_a_main_process()
    with current.finish_on_error(), end_forked_processes():
        value = b""
        with contextlib.suppress(StopRequested):
            value = cloudpickle.loads(program.call)()
    if len(value) > MAX_RETURNED_BYTES:
        raise ValueError(
            f"{program.name}: expected a value of at most {MAX_RETURNED_BYTES >> 20} MiB, got {len(value) >> 20} MiB: "
            "write it to session.checkpoints, and return where it is"
        )
    current.close()
    store.open_for_other_nodes()  # may import torch, which a process that has shut down its threads cannot
    run_exit_handlers()
    store.wait_until_all_ended()
    if current.stop.is_reached or current.was_terminated:
        raise StopRequested
    seconds = time.time() - process.job.launched_at
    current.emit(events.RunFinished(current.step, seconds, value, **current.results))


def _be_a_main_process() -> None:
    """Undo what shows that the process was started by multiprocessing: a script may ask, or choose a start method."""
    multiprocessing.set_start_method(None, force=True)  # none is chosen
    multiprocessing.current_process().name = "MainProcess"


def _has_imported_torch() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _watch_ddp(link: SupervisorLink, current: Session) -> None:
    """Have the passes of the function's DistributedDataParallel timed, or its reports, once it has imported torch."""
    while not _has_imported_torch():
        time.sleep(POLL_INTERVAL)
    from flyte_ddp.rank.step_timer import watch_ddp

    current.on_report = watch_ddp(link.set_pace, lambda name: link.send("device", name))


class _Store:
    """The store where the ranks meet: served by rank 0's process, from a thread, until the last rank has ended."""

    def __init__(self, process: RankProcess, is_for_others: bool) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._is_needed = threading.Event()  # now, even if that imports torch
        self._is_for_others = is_for_others  # processes below this one's use it, and this one imports no torch itself
        self._opened = call_in_background(self._open) if process.rank == 0 else None

    def open(self) -> Store:
        """Return the store, as a client on all ranks but rank 0."""
        self._is_needed.set()
        with self._lock:
            self._opened = self._opened or call_in_background(self._open)
        return self._opened.result()

    def open_for_other_nodes(self) -> None:
        """Open the store if the ranks of other nodes have to learn by it that this one has ended, or this of them."""
        if self._process.node.num_nodes > 1:
            self.open()

    def wait_until_all_ended(self) -> None:
        """Wait, on rank 0, for the functions of all ranks: they may use the store until they return."""
        node, link = self._process.node, self._process.link
        link.set_ended()
        if self._process.rank > 0:
            if node.first_rank > 0:
                with contextlib.suppress(RuntimeError):  # rank 0 has ended already, by os._exit
                    self.open().add(ENDED, 1)
            return
        while not link.all_ended:
            time.sleep(POLL_INTERVAL)
        while node.num_nodes > 1 and self.open().add(ENDED, 0) < node.world_size - node.num_ranks:
            time.sleep(POLL_INTERVAL)

    def _is_asked_for(self) -> bool:
        listener = self._process.listener
        return self._is_for_others and listener is not None and bool(select.select([listener], [], [], 0)[0])

    def _open(self) -> Store:
        while not (_has_imported_torch() or self._is_needed.wait(POLL_INTERVAL) or self._is_asked_for()):
            pass
        return self._process.open_store(STORE_TIMEOUT)
