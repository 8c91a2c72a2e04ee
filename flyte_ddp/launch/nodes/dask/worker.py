"""The driver's presence in a Dask worker: a plugin that runs the node's agent and passes
messages up and down.

It travels by value, with its code, because the worker may have another version of this package, or
none. So it imports only modules that travel in the same way, and constants. The training runs in a
process of its own (launch/agent/main.py) from the code that the plugin brings along. This process
runs one attempt after another. It dies with the worker's process, because the connection from which
it reads commands then ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from typing import Any

from dask.system import CPU_COUNT
from distributed import Worker, WorkerPlugin, get_worker
from distributed.comm import get_address_host

from flyte_ddp.launch.nodes.dask.preemption import announce_departures, is_leaving, plugins_of
from flyte_ddp.launch.protocol.messages import KILL_GRACE
from flyte_ddp.launch.protocol.programs import OUTPUTS_VARIABLE
from flyte_ddp.process.devices import NODE_VARIABLE, visible_gpus
from flyte_ddp.process.temporary_directories import take_files

NODE = "flyte_ddp.launch.agent.main"  # a name: the worker may lack the module
# seconds for an agent whose pipe was closed to kill its ranks and exit
END_GRACE = 2 * KILL_GRACE
# seconds for which others may not use a worker after an attempt, unless the run has ended
HOLD_SECONDS = 30.0
HOLD_INTERVAL = 5.0  # seconds between two looks whether a worker is still in use

# Set by Dask for tasks that share a process with others; a rank has its share of the cores to
# itself.
DASK_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# The standard library comes first, so that no user's module takes the place of a standard module:
# neither in the working directory nor on the worker's path. Then comes the shipped code, before the
# installed packages, which may have another version of it.
BOOTSTRAP = (
    "import importlib, os, sys; lib = os.path.dirname(os.__file__); "
    "own = [each for each in sys.path if each.startswith(lib) and '-packages' not in each]; "
    "sys.path[:] = [*own, sys.argv[1], *(each for each in sys.path if each and each not in own)]; "
    "importlib.import_module(sys.argv[2]).main()"
)


@dataclass
class Agent:
    """The process of an agent (launch/agent/main.py), which runs one attempt after another."""

    process: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def start(cls, directories: Sequence[str], outputs: str) -> Agent:
        """Start the process.

        Args:
            directories: the directory of the run's code, the agent's module, and the directory of
                the node's files.
            outputs: directory for the files of a script.
        """
        # Standard input and output are not used, because imported modules may print there.
        connection, handed_over = Pipe()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in DASK_THREAD_LIMITS or value != "1"
        }
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment[OUTPUTS_VARIABLE] = outputs
        file = handed_over.fileno()
        with handed_over:
            process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, *directories, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                env=environment,
                pass_fds=[file],
                # A Ctrl-C on the terminal is for the driver, which asks for a final checkpoint.
                start_new_session=True,
            )
        return cls(process, connection)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def begin(self, job: bytes, listener: socket.socket | None) -> None:
        """Hand an attempt over."""
        self.connection.send_bytes(job)
        if listener:
            send_handle(self.connection, listener.fileno(), self.process.pid)

    def pass_on(self, log: Callable[[bytes], None]) -> bytes:
        """Log the messages of an attempt until its last one, which is returned. It is empty if the
        process has died.
        """
        try:
            # An empty message announces the last one.
            for message in iter(self.connection.recv_bytes, b""):
                log(message)
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            self.process.wait()
            return b""

    @property
    def how_it_ended(self) -> str:
        code = self.process.returncode or 0
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def end(self) -> None:
        self.connection.close()  # the process then kills its ranks
        try:
            self.process.wait(END_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class SpareAgent:
    """The agent of a worker that waits for the next attempt, if there is one. Any thread may call
    its methods.
    """

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self._is_over = False
        self._lock = threading.Lock()

    @property
    def is_waiting(self) -> bool:
        """True if an agent waits for a job. It ends after a long time without one."""
        agent = self.agent
        return agent is not None and agent.is_alive

    def take(self) -> Agent | None:
        """Return the agent, which waits no longer; None if there is no living agent."""
        with self._lock:
            agent, self.agent = self.agent, None
        if agent and not agent.is_alive:  # the agent has ended after a long time without an attempt
            agent.end()
            return None
        return agent

    def keep(self, agent: Agent) -> bool:
        """Let an agent wait after the end of an attempt. Return whether it may wait."""
        with self._lock:
            if self._is_over or self.is_waiting or not agent.is_alive:
                return False
            self.agent = agent
        return True

    def close(self) -> None:
        """End the agent, and let no other one wait."""
        with self._lock:
            self._is_over = True
        agent = self.take()
        if agent:
            agent.process.kill()
            agent.end()


class WorkerUse:
    """Records whether the run uses its worker. Its Dask task (holds.py) makes other runs choose
    other workers.
    """

    def __init__(self) -> None:
        self.attempts: set[str] = set()  # attempts whose job has come, until their end
        self.num_holds = 0  # threads in `hold`
        self._ended_at = 0.0  # monotonic: when an attempt last ended here
        self._is_over = threading.Event()

    def end(self, attempt: str) -> None:
        self._ended_at = time.monotonic()
        self.attempts.discard(attempt)

    def hold(self) -> None:
        """Keep a thread of the worker while the run uses it, and a while longer. The next attempt
        may begin until then.
        """
        self.num_holds += 1
        begun_at = time.monotonic()
        while self.attempts or time.monotonic() < max(begun_at, self._ended_at) + HOLD_SECONDS:
            if self._is_over.wait(HOLD_INTERVAL):
                break
        self.num_holds -= 1

    def close(self) -> None:
        """Release the worker, because the run has ended."""
        self._is_over.set()


@dataclass(eq=False, repr=False)
class NodePlugin(WorkerPlugin):  # type: ignore[misc]
    """One run's presence in one worker."""

    name: str  # name of the run and of the plugin
    # zip of packages and modules that the agent and the ranks import before all others
    code: bytes
    directory: str = ""  # the directory with the unpacked code
    attempt: str = ""  # the latest attempt, and the only one that may run
    # attempts whose agent has not been started yet
    admitted: dict[str, socket.socket | None] = field(default_factory=dict)
    agents: dict[str, Agent] = field(default_factory=dict)
    spare: SpareAgent = field(default_factory=SpareAgent)
    use: WorkerUse = field(default_factory=WorkerUse)
    leaves_at: float = float("inf")  # monotonic: when this worker closes
    _turn: threading.Lock = field(default_factory=threading.Lock)  # held by the running attempt

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        digest = hashlib.sha256(self.code).hexdigest()[:16]
        self.directory = os.path.join(worker.local_directory, f"code-{digest}")
        if not os.path.exists(self.directory):
            # A full disk leaves half of the code. No later attempt may import it.
            part = f"{self.directory}.part"
            try:
                with zipfile.ZipFile(io.BytesIO(self.code)) as archive:
                    archive.extractall(part)
                os.rename(part, self.directory)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        self.code = b""
        # Handlers like those of Dask's extensions. Commands come in the scheduler's stream: a
        # connection for each command would cost the scheduler most of its time.
        worker.stream_handlers[self.name] = self.take
        worker.handlers[f"results-{self.name}"] = self.take_results

    def teardown(self, worker: Worker) -> None:
        """Clean up when the worker closes in good order, and at the end of the run."""
        # A late command without a handler would end the scheduler's stream.
        worker.stream_handlers[self.name] = ignore
        worker.handlers.pop(f"results-{self.name}", None)
        self.use.close()
        self._clear()
        self.spare.close()
        # Rank 0 has copied the outputs of its node to their URL.
        shutil.rmtree(self.outputs, ignore_errors=True)
        shutil.rmtree(self.results, ignore_errors=True)

    def admit(self, attempt: str, meets_here: bool) -> tuple[str, int]:
        """Prepare for an attempt, and end the processes of earlier attempts here.

        Returns:
            The host and port of the rendezvous; port 0 unless `meets_here`. The port is bound from
            now on until rank 0 takes it over, so no other process can take it.
        """
        self._clear()
        self.attempt = attempt
        host = get_address_host(self.worker.address)
        listener = None
        port = 0
        if meets_here:
            family = socket.AF_INET
            if ":" in host:
                family = socket.AF_INET6
            listener = socket.create_server((host, 0), family=family, backlog=1024)
            port = listener.getsockname()[1]
        self.admitted[attempt] = listener
        return host, port

    def prepare(self, message: bytes) -> None:
        """Let a spare agent begin to prepare for its first attempt, if the worker has no agent."""
        if not (self.spare.is_waiting or self.is_at_work):
            threading.Thread(target=self._prepare, args=(message,), daemon=True).start()

    def _prepare(self, message: bytes) -> None:
        agent = self._start()
        with contextlib.suppress(EOFError, OSError):  # the agent has died
            agent.connection.send_bytes(message)
            agent.connection.recv_bytes()
        if not self.spare.keep(agent):
            agent.end()

    def take(self, attempt: str, content: dict[str, bytes]) -> None:
        """Begin an attempt with its job, or pass a command on to its agent, if there is one."""
        if "job" in content:
            if attempt not in self.admitted:
                self.admit(attempt, meets_here=False)
            self.use.attempts.add(attempt)
            thread = threading.Thread(target=self._run, args=(attempt, content["job"]), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # `ulimit -u` allows no more threads
                self._finish(attempt, describe_failed_start(error))
        agent = self.agents.get(attempt)
        if agent and "command" in content:
            with contextlib.suppress(OSError):  # the agent has just ended
                agent.connection.send_bytes(content["command"])

    def _run(self, attempt: str, job: bytes) -> None:
        """Run an attempt after the end of the one before, which was killed if it had not ended."""
        try:
            with self._turn:
                event = self._supervise(attempt, job)
        except Exception as error:
            event = describe_failed_start(error)
        self._finish(attempt, event)

    def _finish(self, attempt: str, event: dict[str, Any] | None) -> None:
        """End an attempt with its last event, after which the next attempt may follow at once."""
        self.use.end(attempt)
        listener = self.admitted.pop(attempt, None)  # there is one if no agent took it
        if listener:
            listener.close()
        if event:
            self.worker.log_event(attempt, event)

    def _supervise(self, attempt: str, job: bytes) -> dict[str, Any] | None:
        """Let the agent run an attempt, and pass its messages on as events of the topic `attempt`.
        Return the last event: the agent's last message, or why there is none.
        """
        others = [each for each in plugins_of(self.worker) if each is not self]
        users = [each for each in others if each.use.attempts]
        if users:
            return lost(f"was not started: another run uses the worker ({users[0].name})")
        if attempt not in self.admitted:
            return None  # another attempt was admitted in the meantime
        agent = self.spare.take()
        if agent is None:
            self.worker.log_event(attempt, {"admitted": True})  # a start takes seconds
            agent = self._start()
        with self.admitted.pop(attempt, None) or contextlib.nullcontext() as listener:
            # If the agent has died, the end of its messages reports it.
            with contextlib.suppress(OSError):
                agent.begin(job, listener)
        # Only now may commands reach the agent, because it reads the job first.
        self.agents[attempt] = agent
        if attempt != self.attempt:  # another attempt was admitted in the meantime
            agent.process.kill()
        if self.leaves_at < float("inf"):
            self.announce_departure(self.leaves_at)
        last = b""
        try:
            last = agent.pass_on(lambda each: self.worker.log_event(attempt, {"message": each}))
        finally:
            self.agents.pop(attempt, None)
            # An agent that has sent its last message can run another attempt.
            if not (last and self.spare.keep(agent)):
                agent.end()
        if last:
            return {"message": last}
        return lost(agent.how_it_ended)

    @property
    def outputs(self) -> str:
        """Directory for the ranks' files of `outputs_directory` in launch/run.py."""
        return os.path.join(self.worker.local_directory, f"outputs-{self.name}")

    @property
    def results(self) -> str:
        """Directory for files that the ranks submit."""
        return os.path.join(self.worker.local_directory, f"results-{self.name}")

    @property
    def is_at_work(self) -> bool:
        """Whether an attempt runs here, or is about to."""
        return bool(self.agents or self.admitted)

    def announce_departure(self, leaves_at: float) -> None:
        """Tell the driver that this worker closes at `leaves_at` (monotonic), or as soon as its
        ranks have ended.
        """
        self.leaves_at = leaves_at
        for attempt in list(self.agents):
            self.worker.log_event(attempt, {"leaves_in": leaves_at - time.monotonic()})

    def take_results(self, names: list[str]) -> list[bytes | None]:
        """See `take_files`."""
        return take_files(self.results, names)

    def _start(self) -> Agent:
        return Agent.start([self.directory, NODE, self.worker.local_directory], self.outputs)

    def _clear(self) -> None:
        self.attempt = ""
        for listener in self.admitted.values():
            if listener:
                listener.close()
        self.admitted.clear()
        for agent in list(self.agents.values()):
            agent.process.kill()  # the ranks kill themselves when their pipe to the agent ends


def lost(why: str) -> dict[str, Any]:
    """Return the event that an attempt has lost this node."""
    return {"lost": f"its agent {why}"}


def describe_failed_start(error: Exception) -> dict[str, Any]:
    """Return the event that an attempt cannot be started in this worker."""
    return lost(f"could not be started: {type(error).__name__}: {error}")


def ignore(**message: Any) -> None:
    """Take a command after the end of its run."""


# --- Functions that the driver runs in the worker, by value
# --------------------------------------------------------------------------------------------------


def introduce(plugin: str, dask_worker: Worker) -> dict[str, Any]:
    """Return the facts that the driver needs about this worker: whether it leaves, and fields of
    `placement.Worker`.
    """
    found = dask_worker.plugins.get(plugin)
    num_tasks, is_in_use = dask_worker.state.executing_count, False
    if found:
        num_tasks -= found.use.num_holds
        is_in_use = bool(found.use.attempts)  # the attempt before has not ended yet
    return {
        "host": get_address_host(dask_worker.address),
        "machine": os.environ.get(NODE_VARIABLE, ""),
        "num_cores": CPU_COUNT,
        "gpus": visible_gpus(),
        "has_plugin": plugin in dask_worker.plugins,
        "has_agent": found is not None and found.spare.is_waiting,
        "is_busy": is_in_use or num_tasks >= dask_worker.state.nthreads,
        "is_leaving": is_leaving(dask_worker),
    }


async def install(name: str, code: bytes, dask_worker: Worker) -> None:
    """Install the plugin if it is missing. An installed plugin stays, because its gang may train,
    and Dask would end it for a new plugin.
    """
    if name in dask_worker.plugins:
        return
    try:
        # The plugin is made here: Dask pickles this function by value, but arguments by reference.
        await dask_worker.plugin_add(plugin=NodePlugin(name, code), name=name, catch_errors=False)
    except BaseException:
        dask_worker.plugins.pop(name, None)  # Dask keeps a plugin that could not be set up
        raise
    await announce_departures(dask_worker)


async def uninstall(name: str, dask_worker: Worker) -> None:
    if name in dask_worker.plugins:
        await dask_worker.plugin_remove(name=name)


def call(plugin: str, method: str, *arguments: Any, dask_worker: Worker) -> Any:
    """Call a method of the plugin on the worker's event loop."""
    return getattr(dask_worker.plugins[plugin], method)(*arguments)


def hold(plugin: str) -> None:
    """Run a task of `Holds`. A worker that came back at the address of a lost one has no plugin."""
    found = get_worker().plugins.get(plugin)
    if found:
        found.use.hold()


def holds_file(path: str, contents: bytes) -> bool:
    """Return whether this machine has a file at `path` with these `contents`: the same directory,
    or a copy of it.
    """
    try:
        with open(path, "rb") as file:
            return file.read() == contents
    except OSError:
        return False
