"""How the process of a rank starts: forked from a server that has imported torch, or fresh. Imports
no torch.

The ranks of a recipe are forked from a server, the one of Python's `forkserver` method. Each
process that launches ranks has one server. It imports torch and the training loop once. Otherwise
every rank of every attempt needs 2 s of processor time for these imports, or 4 s with the compiler.
So the first ranks start as soon as fresh ranks would, and the ranks of a restart within 0.05 s.

The ranks of a user's function are fresh processes, of the method `spawn`: torch must not be there
before the function imports it, because a variable that the function sets for torch would come too
late.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from flyte_ddp.launch.protocol.ranks import STOP_SIGNALS, TRAINING
from flyte_ddp.process.interpreter import find_fork_server, process_config
from flyte_ddp.process.standard_streams import open_standard_streams
from flyte_ddp.process.temporary_directories import temporary_directory

if TYPE_CHECKING:
    from flyte_ddp.launch.protocol.programs import Program

# Prefixes of variables that torch, fsspec and the loader of libraries read at their start. Those
# for OpenMP and malloc are left out, because Dask and scikit-learn set them in this process. A
# recipe's rank sets threads and malloc's thresholds itself.
READ_ON_IMPORT = ("FSSPEC_", "LD_", "PYTORCH_", "TORCH_")

ENTRY = "flyte_ddp.rank.entry:run_rank"  # a name: an agent imports no modules of ranks
# this package's modules that the ranks of a recipe need
OWN_MODULES = [name.partition(":")[0] for name in (ENTRY, TRAINING)]
FIRST_MODULE = "flyte_ddp.process.no_collection"

MAX_SOCKET_DIRECTORY = 85  # bytes of a path to which a socket's name is added, on macOS too

END_SIGNALS = tuple(signal.Signals[name] for name in STOP_SIGNALS)

_variables_of_server: dict[str, str] | None = None
_starting = threading.Lock()  # held while this process has the environment of its server


class ForkedProcess(ForkServerProcess):
    """A process with its parent's environment at the start, as in other start methods."""

    def start(self) -> None:
        with _starting:
            self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        os.environ.clear()
        os.environ.update(self._environment)
        # The collector never visits what the server has imported. A visit writes to the pages that
        # this process shares with the server, so each rank would get a copy of them.
        gc.freeze()
        gc.enable()
        super().run()


class _Server(forkserver.ForkServer):
    """Finds modules where this process does. Python 3.10 cannot keep another version in the working
    directory away.
    """

    def ensure_running(self) -> None:
        path = {
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "PYTHONSAFEPATH": "1",
        }
        # A signal to the whole process group, such as Ctrl-C, is for this process, which then asks
        # the ranks to stop.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            resource_tracker.ensure_running()  # now, because its start unblocks some of the signals
            signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
            with _starting:
                own = {name: os.environ[name] for name in path if name in os.environ}
                os.environ.update(path)
                try:
                    super().ensure_running()
                finally:
                    for name in path:
                        del os.environ[name]
                    os.environ.update(own)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_server(modules: Sequence[str]) -> bool:
    """Start this process's server if it has none, and do not wait for it.

    Args:
        modules: modules of other packages, which a new server imports before this package's.

    Returns:
        False if Python has no server, or if forked ranks would differ from fresh ranks: the
        environment has changed since the server read it, or this is macOS, where libraries do not
        survive a fork.
    """
    global _variables_of_server
    server = find_fork_server()
    if sys.platform == "darwin" or server is None:
        return False
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(READ_ON_IMPORT)
    }
    if _variables_of_server is None:
        _variables_of_server = variables
        server.__class__ = _Server
        preloaded = list(modules)
        if sys.version_info >= (3, 11):
            preloaded = [FIRST_MODULE, *modules, *OWN_MODULES]
        forkserver.set_forkserver_preload(preloaded)
    if variables != _variables_of_server:
        return False
    open_standard_streams()
    shorten_socket_paths()
    server.ensure_running()
    return True


def shorten_socket_paths() -> None:
    """Put the sockets of multiprocessing into a directory with a short path, here and in the ranks.

    The path of a socket has at most 107 bytes, and TMPDIR may be anything.
    """
    config = process_config()
    if len(os.fsencode(config.get("tempdir") or "x" * MAX_SOCKET_DIRECTORY)) < MAX_SOCKET_DIRECTORY:
        return
    places = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")
    short = (
        each
        for each in places
        if len(os.fsencode(each)) < MAX_SOCKET_DIRECTORY - 14 and os.access(each, os.W_OK)
    )
    stack = contextlib.ExitStack()
    config["tempdir"] = stack.enter_context(temporary_directory("pymp-", next(short, None)))
    util.Finalize(None, stack.close, exitpriority=-100)  # like multiprocessing's own directory


def start_rank(
    program: Program, target: Callable[..., object], arguments: tuple[Any, ...], name: str
) -> BaseProcess:
    """Start a process that calls `target(*arguments)` as a rank of `program`, and return it."""
    shorten_socket_paths()
    if program.slow_imports and start_server(program.slow_imports):
        forked = ForkedProcess(target=target, args=arguments, name=name)
        # If the server has died, a fresh process reports the reason.
        with contextlib.suppress(EOFError, OSError):
            forked.start()
            return forked
    fresh = SpawnProcess(target=target, args=arguments, name=name)
    with _starting:
        fresh.start()
    return fresh


def enter_rank(*arguments: Any) -> None:
    """Call the entry of a rank's process."""
    pkgutil.resolve_name(ENTRY)(*arguments)
