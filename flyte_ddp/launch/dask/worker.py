"""The driver's presence in a Dask worker: a plugin that runs the node's supervisor and passes
messages up and down.

It travels by value, code and all, because the worker may have another version of this package, or
none. So it imports nothing from here but what travels alike, and a variable's name. All that knows
of training runs in a process of its own (node.py) from the code that the plugin brings along. That
process runs one attempt after another. It dies with the worker's: it reads its commands from a
pipe, and the pipe ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from dask.system import CPU_COUNT
from distributed import Worker, WorkerPlugin, get_worker
from distributed.comm import get_address_host

from flyte_ddp.launch.dask.leaving import announce_departures, is_leaving
from flyte_ddp.launch.devices import visible_gpus
from flyte_ddp.launch.process.programs import OUTPUTS_VARIABLE

END_GRACE = 10.0  # seconds for a supervisor whose pipe was closed to kill its ranks and exit

# Set by Dask for tasks that share a process with others; a rank has its share of the cores to
# itself.
DASK_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# The standard library comes first, so that no module of a user's takes the place of one of its:
# neither in the working directory nor on the worker's path. Then the shipped code, before what is
# installed here, maybe of another version.
BOOTSTRAP = (
    "import os, sys; lib = os.path.dirname(os.__file__); "
    "own = [each for each in sys.path if each.startswith(lib) and '-packages' not in each]; "
    "sys.path[:] = [*own, sys.argv[1], *(each for each in sys.path if each and each not in own)]; "
    "from flyte_ddp.launch.dask.node import main; main()"
)


class Sealed:
    """A text with secrets in it, such as a node's job: Dask shows and logs the arguments of
    tasks.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return "Sealed(...)"


@dataclass
class Supervisor:
    """A process with node.py in it, and the ends of the pipes to it."""

    process: subprocess.Popen[bytes]
    commands: BinaryIO
    messages: BinaryIO
    listeners: socket.socket  # takes the listening socket of a rendezvous over
    has_run: bool = False  # an attempt

    @property
    def is_prepared(self) -> bool:
        """Its ranks start at once: it has run some, or has answered that it is prepared. For one
        that is idle.
        """
        return self.has_run or bool(select.select([self.messages], [], [], 0)[0])

    def begin(self, job: str, listener: socket.socket | None) -> None:
        """Hand an attempt over. Raises BrokenPipeError if the process has ended."""
        if listener:
            socket.send_fds(self.listeners, [b"\n"], [listener.fileno()])
        self.commands.write(f"{job}\n".encode())
        self.commands.flush()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.commands.close()  # its end makes the process kill its ranks
        self.messages.close()
        self.listeners.close()
        try:
            self.process.wait(END_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class NodePlugin(WorkerPlugin):  # type: ignore[misc]
    """One run's presence in one worker.

    Args:
        name: of the run, and of the plugin.
        code: a zip of packages and modules, what the supervisor and the ranks import before all
            else.
    """

    directory: str
    outputs: str  # where ranks leave the files of `outputs_directory` in launch/run.py
    worker: Worker

    def __init__(self, name: str, code: bytes) -> None:
        self.name = name
        self.code = code
        self.attempt = ""  # the latest, the only one that may run
        # attempts whose supervisor has not been started yet
        self.admitted: dict[str, socket.socket | None] = {}
        self.supervisors: dict[str, Supervisor] = {}
        self.idle: Supervisor | None = None  # ready for the next attempt
        self.is_over = False
        self.leaves_at = float("inf")  # monotonic: when this worker closes
        self.lock = threading.Lock()  # of the two above

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.outputs = os.path.join(worker.local_directory, f"outputs-{self.name}")
        digest = hashlib.sha256(self.code).hexdigest()[:16]
        self.directory = os.path.join(worker.local_directory, f"code-{digest}")
        if not os.path.exists(self.directory):
            # a full disk leaves half of the code, which no later attempt may import
            part = f"{self.directory}.part"
            try:
                with zipfile.ZipFile(io.BytesIO(self.code)) as archive:
                    archive.extractall(part)
                os.rename(part, self.directory)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        self.code = b""
        # A call of its own, as Dask's extensions have them: for `Client.run` the worker would log a
        # line every second.
        worker.handlers[self.name] = self.send_command

    def teardown(self, worker: Worker) -> None:
        """Called when the worker closes in good order, and at the end of the run."""
        worker.handlers.pop(self.name, None)
        self._clear()
        with self.lock:
            self.is_over = True
        if idle := self._take_idle():
            idle.process.kill()
            idle.end()
        shutil.rmtree(self.outputs, ignore_errors=True)  # those of rank 0's node are at their URL

    def prepare(self, modules: Sequence[str]) -> bool:
        """Start a supervisor with a server of ranks that imports `modules`, if there is none, for
        the next attempt.

        Returns:
            True when it has imported them, or where an attempt runs already.
        """
        with self.lock:
            if self.supervisors or self.admitted:
                return True
            if self.idle is None:
                self.idle = self._start()
                self.idle.commands.write(f"prepare {' '.join(modules)}\n".encode())
                self.idle.commands.flush()
            return self.idle.is_prepared

    def admit(self, attempt: str, meets_here: bool) -> tuple[str, int]:
        """Prepare for an attempt, and end what is left of earlier ones here.

        Returns:
            The rendezvous' host and port where `meets_here`. The port is bound now and stays so
            until rank 0 takes it over: nobody else can get it in between.
        """
        self._clear()
        self.attempt = attempt
        host = get_address_host(self.worker.address)
        listener = None
        if meets_here:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.admitted[attempt] = listener
        return host, listener.getsockname()[1] if listener else 0

    def supervise(self, attempt: str, job: Sealed, topic: str) -> str:
        """Let the supervisor run an attempt, pass its messages on as events of `topic`, and return
        how it ended.

        Raises:
            RuntimeError: the attempt was not admitted here, or has been run. Dask runs a task again
                when a worker comes back under the address of a dead one, but an attempt that lost a
                node is over.
        """
        if attempt not in self.admitted:
            raise RuntimeError("this worker is not the one that was admitted to the attempt")
        with self.admitted.pop(attempt) or contextlib.nullcontext() as listener:
            supervisor = self._begin(job, listener)
        # now, because the job is the first line that it reads
        self.supervisors[attempt] = supervisor
        if attempt != self.attempt:  # another one was admitted in the meantime
            supervisor.process.kill()
        if self.leaves_at < float("inf"):
            self.announce_departure(self.leaves_at)
        is_ready = False  # for another attempt
        try:
            for line in supervisor.messages:
                if line == b"prepared\n":
                    continue
                is_ready = line == b"\n"
                if is_ready:
                    break
                if line.endswith(b"\n"):  # else it died in the middle of it
                    self.worker.log_event(topic, {"message": line.decode()})
            else:
                supervisor.process.wait()  # it has died
        finally:
            self.supervisors.pop(attempt, None)
            if not (is_ready and self._keep(supervisor)):
                supervisor.end()
        code = supervisor.process.returncode
        if code is None:
            return "has ended the attempt"
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )

    @property
    def is_at_work(self) -> bool:
        """An attempt runs here, or is about to."""
        return bool(self.supervisors or self.admitted)

    def announce_departure(self, leaves_at: float) -> None:
        """Tell the driver that this worker closes at `leaves_at` (monotonic), or as soon as its
        ranks have ended.
        """
        self.leaves_at = leaves_at
        for attempt in list(self.supervisors):
            self.send_command(attempt, f"leave {leaves_at - time.monotonic():g}")

    def send_command(self, attempt: str, command: str) -> None:
        """Pass a command on to the supervisor, if it is there."""
        if supervisor := self.supervisors.get(attempt):
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has just ended
                supervisor.commands.write(f"{command}\n".encode())
                supervisor.commands.flush()

    def _begin(self, job: Sealed, listener: socket.socket | None) -> Supervisor:
        """Return a supervisor that has taken the attempt over: the idle one, or a new one."""
        if idle := self._take_idle():
            try:
                idle.begin(job.text, listener)
                return idle
            except BrokenPipeError:  # it has just ended
                idle.end()
        supervisor = self._start()
        # it has died, which is reported by the end of its messages
        with contextlib.suppress(BrokenPipeError):
            supervisor.begin(job.text, listener)
        return supervisor

    def _take_idle(self) -> Supervisor | None:
        with self.lock:
            idle, self.idle = self.idle, None
        return idle

    def _keep(self, supervisor: Supervisor) -> bool:
        """Keep a supervisor that has ended an attempt for the next one. Return whether there may be
        one.
        """
        with self.lock:
            if self.is_over or self.idle or supervisor.process.poll() is not None:
                return False
            supervisor.has_run = True
            self.idle = supervisor
        return True

    def _start(self) -> Supervisor:
        environment = {
            name: value for name, value in os.environ.items() if name not in DASK_THREAD_LIMITS
        }
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment[OUTPUTS_VARIABLE] = self.outputs
        # Not its standard input and output, into which whatever it imports may print.
        commands_in, commands = os.pipe()
        messages, messages_out = os.pipe()
        listeners, listeners_in = socket.socketpair()
        handed_over = [commands_in, messages_out, listeners_in.fileno()]
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    BOOTSTRAP,
                    self.directory,
                    self.worker.local_directory,
                    *map(str, handed_over),
                ],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                env=environment,
                pass_fds=handed_over,
                # a Ctrl-C on the terminal is for the driver, which asks for a last checkpoint
                start_new_session=True,
            )
        finally:
            os.close(commands_in)
            os.close(messages_out)
            listeners_in.close()
        return Supervisor(process, os.fdopen(commands, "wb"), os.fdopen(messages, "rb"), listeners)

    def _clear(self) -> None:
        self.attempt = ""
        for listener in self.admitted.values():
            if listener:
                listener.close()
        self.admitted.clear()
        for supervisor in list(self.supervisors.values()):
            supervisor.process.kill()  # its ranks kill themselves when their pipe to it ends


# --- What the driver runs in the worker, by value
# --------------------------------------------------------------------------------------------------


def introduce(plugin: str, dask_worker: Worker) -> dict[str, Any]:
    """Return what the driver has to know of this worker: whether it leaves, and fields of
    `placement.Worker`.
    """
    supervisor = getattr(dask_worker.plugins.get(plugin), "idle", None)
    return {
        "host": get_address_host(dask_worker.address),
        "num_cores": CPU_COUNT,
        "gpus": visible_gpus(),
        "has_plugin": plugin in dask_worker.plugins,
        "has_run": supervisor is not None and supervisor.has_run,
        "is_busy": dask_worker.state.executing_count >= dask_worker.state.nthreads,
        "is_leaving": is_leaving(dask_worker),
    }


async def install(name: str, code: bytes, dask_worker: Worker) -> None:
    """Install the plugin if it is missing. One that is there stays: its gang may train, and Dask
    would end it for a new one.
    """
    if name in dask_worker.plugins:
        return
    try:
        # Made here, because Dask pickles this function by value, but its arguments by reference.
        await dask_worker.plugin_add(plugin=NodePlugin(name, code), name=name, catch_errors=False)
    except BaseException:
        dask_worker.plugins.pop(name, None)  # Dask keeps one that could not be set up
        raise
    await announce_departures(dask_worker)


async def uninstall(name: str, dask_worker: Worker) -> None:
    if name in dask_worker.plugins:
        await dask_worker.plugin_remove(name=name)


def call(plugin: str, method: str, *arguments: Any, dask_worker: Worker) -> Any:
    """Call a method of the plugin on the worker's event loop."""
    return getattr(dask_worker.plugins[plugin], method)(*arguments)


def supervise(plugin: str, attempt: str, job: Sealed, topic: str) -> str:
    """Run the task of a node, in one of the worker's threads, for as long as the attempt lasts."""
    node: NodePlugin | None = get_worker().plugins.get(plugin)
    if node is None:
        raise RuntimeError("this worker is not the one that was admitted to the attempt")
    return node.supervise(attempt, job, topic)


def holds_file(path: str, contents: bytes) -> bool:
    """Return whether this machine has a file at `path` with these `contents`: the same directory,
    or a copy of it.
    """
    try:
        with open(path, "rb") as file:
            return file.read() == contents
    except OSError:
        return False
