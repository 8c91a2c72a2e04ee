"""One node's supervisor: a process that a Dask worker starts, and that runs `supervise` of the single-machine launcher.

It runs one attempt after another, so that the ranks of a restart find the server from which they are forked. Its jobs
and the driver's commands come through a pipe, and its messages leave through another. What lies between it and the
driver it does not know. When the commands cease, because the driver, the scheduler, the network or the worker is gone,
it kills its ranks: nothing trains unsupervised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp import events
from flyte_ddp.errors import ConfigError, DataError, RankFailure, TrainingStopped
from flyte_ddp.launch.dask.messages import (
    BEAT_INTERVAL,
    END_OF_ATTEMPT,
    KILL,
    KILL_GRACE,
    PREPARE,
    STOP,
    NodeJob,
    encode,
)
from flyte_ddp.launch.failures import shorten_traceback
from flyte_ddp.launch.rank_start import start_server
from flyte_ddp.launch.signals import StopRequest
from flyte_ddp.launch.supervisor import supervise
from flyte_ddp.storage import adopt_storage_environment, fetch_file

IDLE_TIMEOUT = 300.0  # seconds without an attempt, as after the driver's death, after which this process ends


class DriverLink:
    """One attempt's link to the driver: commands come in, numbered messages go out."""

    def __init__(self, messages: BinaryIO, driver_timeout: float) -> None:
        self.stop = StopRequest()
        self.step = 0
        self.is_writing = False  # a checkpoint
        self.is_lost = False  # ordered to end at once, or left alone
        self.is_alone = False  # left alone: no other attempt will come
        self._messages = messages
        self._driver_timeout = driver_timeout
        self._last_command_at = time.monotonic()
        self._previous = ""  # command
        self._num_sent = 0
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def obey(self, text: str) -> None:
        """Do what a command says. After the end of the attempt, do nothing."""
        self._last_command_at = time.monotonic()
        command, _, rest = text.partition(" ")
        if command == KILL:
            self.kill_ranks("the driver ended the attempt")
        elif command == STOP and text != self._previous:  # commands are repeated
            grace, _, reason = rest.partition(" ")
            self.stop.revise(reason, float(grace))
        self._previous = text

    def send(self, kind: str, **values: Any) -> None:
        """Send a message, in order."""
        with self._lock:
            if kind != "beat":  # those only count as heartbeats
                values["number"] = self._num_sent
                self._num_sent += 1
            if not self._is_over.is_set():
                self._write(encode({"kind": kind, **values}))

    def end(self, **values: Any) -> None:
        """Send how the attempt ended, as the last message of this link."""
        self.send_lines()
        self.send("end", **values)
        with self._lock:
            self._is_over.set()
            self._write(END_OF_ATTEMPT)

    def emit(self, event: events.Event) -> None:
        self.send_lines()
        self.send("event", event=events.to_dict(event))

    def on_beat(self, step: int, is_writing: bool) -> None:
        self.step = step
        self.send_lines()
        if is_writing != self.is_writing:
            self.is_writing = is_writing
            self.send_beat()

    def send_lines(self) -> None:
        """Send the lines that the ranks have printed: many at a time, so that a talkative rank costs little."""
        lines, self._lines = self._lines, []
        if lines:
            self.send("lines", lines=lines)

    def send_beat(self) -> None:
        self.send("beat", step=self.step, is_writing=self.is_writing)

    def relay(self, line: str) -> None:
        self._lines.append(line)

    def kill_ranks(self, reason: str) -> None:
        """Have the ranks killed, wait for the end of the attempt, and exit this process if it does not come."""
        self.is_lost = True
        self.stop.set(reason)
        self.stop.set(reason)  # the second request is urgent
        if not self._is_over.wait(KILL_GRACE):
            os._exit(1)  # the ranks kill themselves when their pipe to this process ends

    def _write(self, line: str) -> None:
        # The other end may be gone. The end of the other pipe reports that.
        with contextlib.suppress(BrokenPipeError):
            self._messages.write(line.encode() + b"\n")
            self._messages.flush()

    def _beat(self) -> None:
        self.send_beat()
        while not self._is_over.wait(BEAT_INTERVAL):
            self.send_beat()
            silence = time.monotonic() - self._last_command_at
            if silence > self._driver_timeout:
                self.is_alone = True
                self.kill_ranks(f"the driver has been silent for {silence:.0f} s")


def main() -> None:
    """Run the ranks of this node, attempt after attempt, and report last how each of them ended.

    Arguments of the process: the directory of the code, one for what later attempts may want again, and the file
    descriptors of the two pipes and of a socket. Where the ranks of a gang meet, the rendezvous' listening socket comes
    through that before the job does.
    """
    _, _, directory, commands_in, messages_out, listeners_in = sys.argv
    commands, messages = os.fdopen(int(commands_in), "rb"), os.fdopen(int(messages_out), "wb")
    listeners = socket.socket(fileno=int(listeners_in))
    own_environment = dict(os.environ)
    attempts: queue.SimpleQueue[tuple[NodeJob, DriverLink]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands, messages, attempts), name="commands", daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while True:
            node_job, link = attempts.get(timeout=IDLE_TIMEOUT)
            os.environ.clear()
            os.environ.update(own_environment | node_job.environment)
            adopt_storage_environment(node_job.storage)  # what the worker has of its own wins
            listener = None
            if node_job.ranks.first_rank == 0:
                _, (descriptor,), _, _ = socket.recv_fds(listeners, 1, 1)
                listener = socket.socket(fileno=descriptor)
            with listener or contextlib.nullcontext():
                end = _run_attempt(node_job, link, listener, Path(directory))
            link.end(**end)
            if link.is_alone:
                break
    os._exit(0)  # not to wait for the thread that reads commands, which would wait for the driver


def _listen(commands: BinaryIO, messages: BinaryIO, attempts: queue.SimpleQueue[tuple[NodeJob, DriverLink]]) -> None:
    """Start an attempt for each job, and pass the commands that follow it on. Have the server of ranks started."""
    link = None
    try:
        for line in commands:
            text = line.decode().rstrip("\n")
            if text.startswith("{"):
                node_job = NodeJob.from_json(text)
                link = DriverLink(messages, node_job.driver_timeout)
                attempts.put((node_job, link))
            elif text.startswith(f"{PREPARE} "):
                start_server(text.split()[1:])
            elif link:
                link.obey(text)
    except Exception:
        traceback.print_exc()  # into the worker's log
    if link:
        link.kill_ranks("the worker is gone")
    os._exit(1)


def _run_attempt(
    node_job: NodeJob, link: DriverLink, listener: socket.socket | None, directory: Path
) -> dict[str, Any]:
    """Run the ranks of this node to their end; return how they ended, as `DriverLink.end` sends it."""

    def relay(line: str) -> None:
        if node_job.prints_lines:
            print(line, flush=True)  # noqa: T201 - into the worker's log
        link.relay(line)

    try:
        ranks = dataclasses.replace(node_job.ranks, interface=interface_to(node_job.ranks.host))
        needs_data = node_job.data or node_job.data_archive
        data = functools.partial(local_data, node_job, directory) if needs_data else None
        supervise(node_job.job, ranks, listener, data, link.emit, link.stop, relay, link.on_beat)
    except TrainingStopped as stopped:
        return {"outcome": "killed" if link.is_lost else "stopped", "message": str(stopped)}
    except RankFailure as failure:
        return _failed(str(failure), failure.rank, failure.kind, failure.cause, failure.is_consequence)
    except (ConfigError, DataError) as error:
        cause = f"{type(error).__name__}: {error}"
        return _failed(cause, -1, "exception", cause, False)
    except Exception as error:
        what = f"{type(error).__name__}: {error}\n{shorten_traceback(traceback.format_exc())}"
        return {"outcome": "broken", "message": what, "cause": type(error).__name__}
    return {"outcome": "done"}


def _failed(message: str, rank: int, kind: str, cause: str, is_consequence: bool) -> dict[str, Any]:
    return {
        "outcome": "failed",
        "message": message,
        "rank": rank,
        "failure_kind": kind,
        "cause": cause,
        "is_consequence": is_consequence,
    }


def interface_to(host: str) -> str:
    """Return the network interface by which this machine reaches `host`, which may be itself, for gloo and NCCL."""
    import psutil  # type: ignore[import-untyped]

    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only asks the routing table
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return str(name)
    raise OSError(f"no network interface of this machine has the address {own}, by which it reaches {host}")


def local_data(node_job: NodeJob, directory: Path) -> str:
    """Return the directory of the prepared data on this machine, fetched and unpacked there if need be."""
    if node_job.data:
        return node_job.data
    unpacked = directory / node_job.data_name
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            archive = os.path.join(scratch, "data.zip")
            fetch_file(node_job.data_archive, archive, "data", node_job.job.program.store_timeout)
            with zipfile.ZipFile(archive) as contents:
                contents.extractall(os.path.join(scratch, "data"))
            try:
                os.rename(os.path.join(scratch, "data"), unpacked)
            except OSError:  # an earlier attempt's thread was still at it, and was first
                if not unpacked.exists():
                    raise
    return str(unpacked)
