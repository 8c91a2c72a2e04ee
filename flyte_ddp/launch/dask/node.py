"""One node's supervisor: a process that a Dask worker starts, and that runs `supervise` of the single-machine launcher.

Its job and the driver's commands come through a pipe, and its messages leave through another. What lies between it and
the driver it does not know. When the commands cease, because the driver, the scheduler, the network or the worker is
gone, it kills its ranks: nothing trains unsupervised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
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
from flyte_ddp.launch.dask.messages import BEAT_INTERVAL, KILL, KILL_GRACE, STOP, NodeJob, encode
from flyte_ddp.launch.failures import shorten_traceback
from flyte_ddp.launch.signals import StopRequest
from flyte_ddp.launch.supervisor import supervise
from flyte_ddp.storage import adopt_storage_environment, fetch_file


class DriverLink:
    """The supervisor's ends of the pipes: commands come in, numbered messages go out."""

    def __init__(self, commands: BinaryIO, messages: BinaryIO, driver_timeout: float) -> None:
        self.stop = StopRequest()
        self.step = 0
        self.is_writing = False  # a checkpoint
        self.is_lost = False  # ordered to end at once, or left alone
        self._commands = commands
        self._messages = messages
        self._driver_timeout = driver_timeout
        self._last_command_at = time.monotonic()
        self._num_sent = 0
        self._lines: list[str] = []
        self._lock = threading.Lock()
        for target in (self._listen, self._beat):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message, in order."""
        with self._lock:
            if kind != "beat":  # those only count as heartbeats
                values["number"] = self._num_sent
                self._num_sent += 1
            # The other end may be gone. The end of the other pipe reports that.
            with contextlib.suppress(BrokenPipeError):
                self._messages.write(encode({"kind": kind, **values}).encode() + b"\n")
                self._messages.flush()

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

    def _listen(self) -> None:
        previous = ""
        for line in self._commands:
            self._last_command_at = time.monotonic()
            text = line.decode().rstrip("\n")
            command, _, rest = text.partition(" ")
            if command == KILL:
                self._kill_ranks("the driver ended the attempt")
            elif command == STOP and text != previous:  # commands are repeated
                grace, _, reason = rest.partition(" ")
                self.stop.revise(reason, float(grace))
            previous = text
        self._kill_ranks("the worker is gone")

    def _beat(self) -> None:
        while True:
            self.send_beat()
            time.sleep(BEAT_INTERVAL)
            silence = time.monotonic() - self._last_command_at
            if silence > self._driver_timeout:
                self._kill_ranks(f"the driver has been silent for {silence:.0f} s")

    def _kill_ranks(self, reason: str) -> None:
        """Have the ranks killed. Does not return, and exits this process if its main thread does not."""
        self.is_lost = True
        self.stop.set(reason)
        self.stop.set(reason)  # the second request is urgent
        time.sleep(KILL_GRACE)
        os._exit(1)  # the ranks kill themselves when their pipe to this process ends


def main() -> None:
    """Run the ranks of this node and report last how they ended.

    Arguments of the process: the directory of the code, one for what later attempts may want again, and the file
    descriptors of the two pipes and, where the ranks of the gang meet, of the rendezvous' listening socket.
    """
    _, _, directory, commands_in, messages_out, *listener_in = sys.argv
    commands, messages = os.fdopen(int(commands_in), "rb"), os.fdopen(int(messages_out), "wb")
    node_job = NodeJob.from_json(commands.readline())
    os.environ.update(node_job.environment)
    adopt_storage_environment(node_job.storage)  # what the worker has of its own wins
    listener = socket.socket(fileno=int(listener_in[0])) if listener_in else None
    ranks = dataclasses.replace(node_job.ranks, interface=interface_to(node_job.ranks.host))
    link = DriverLink(commands, messages, node_job.driver_timeout)

    def relay(line: str) -> None:
        if node_job.prints_lines:
            print(line, flush=True)  # noqa: T201 - into the worker's log
        link.relay(line)

    end: dict[str, Any] = {"outcome": "done"}
    try:
        needs_data = node_job.data or node_job.data_archive
        data = functools.partial(local_data, node_job, Path(directory)) if needs_data else None
        supervise(node_job.job, ranks, listener, data, link.emit, link.stop, relay, link.on_beat)
    except TrainingStopped as stopped:
        end = {"outcome": "killed" if link.is_lost else "stopped", "message": str(stopped)}
    except RankFailure as failure:
        end = _failed(str(failure), failure.rank, failure.kind, failure.cause, failure.is_consequence)
    except (ConfigError, DataError) as error:
        cause = f"{type(error).__name__}: {error}"
        end = _failed(cause, -1, "exception", cause, False)
    except Exception as error:
        what = f"{type(error).__name__}: {error}\n{shorten_traceback(traceback.format_exc())}"
        end = {"outcome": "broken", "message": what, "cause": type(error).__name__}
    link.send_lines()
    link.send("end", **end)
    os._exit(0)  # not to wait for the thread that reads commands, which would wait for the driver


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
            os.rename(os.path.join(scratch, "data"), unpacked)
    return str(unpacked)
