"""One node's supervisor: a process that a Dask worker starts, with `spawn.supervise` in it.

It gets its orders and the driver's words through a pipe, and answers through another; what lies between it and the
driver it does not know. When the words cease, because the driver, the scheduler, the network or the worker
is gone, it ends its ranks: nothing trains unsupervised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from flyte_ddp import events
from flyte_ddp.errors import RankFailure, TrainingStopped
from flyte_ddp.launch.spawn import StopRequest, supervise
from flyte_ddp.rank.job import Job, NodeRanks

BEAT_SECONDS = 1.0  # between two signs of life, in either direction
KILL_GRACE = 5.0  # seconds in which the ranks must be gone after an order to kill them

# The driver's words, one per line
GO, STOP, KILL = "go", "stop", "kill"


@dataclass(frozen=True)
class Order:
    """What a node's supervisor has to know, pickled: it unpickles in the driver's own code."""

    job: Job
    place: NodeRanks  # its interface is chosen here
    lease: float  # seconds without a word from the driver after which the ranks are ended
    environment: dict[str, str]  # of the supervisor and its ranks, beside the worker's own
    data: str  # the directory of the prepared data, where this machine has it
    data_archive: str  # else the URL of a zip of it
    data_name: str  # names the unpacked copy, which later attempts find again
    prints_lines: bool  # whether the ranks' output goes to the worker's own log as well


class DriverLink:
    """The supervisor's end of the pipes: words come in, numbered messages go out."""

    def __init__(self, words: BinaryIO, messages: BinaryIO, lease: float) -> None:
        self.stop = StopRequest()
        self.step = 0
        self.is_lost = False  # ordered to end at once, or left alone
        self._words = words
        self._messages = messages
        self._lease = lease
        self._last_word = time.monotonic()
        self._num_sent = 0
        self._lines: list[str] = []
        self._lock = threading.Lock()
        for target in (self._listen, self._beat):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message, in order. Its values are plain ones, as Dask's events take them."""
        with self._lock:
            if kind != "beat":  # those only count as signs of life
                values["number"] = self._num_sent
                self._num_sent += 1
            # The other end may be gone. The word that this is so comes the other way.
            with contextlib.suppress(BrokenPipeError):
                pickle.dump({"kind": kind, **values}, self._messages)
                self._messages.flush()

    def emit(self, event: events.Event) -> None:
        self.send_lines()
        # As bytes, because Dask's events turn lists into tuples.
        self.send("event", event=pickle.dumps(events.to_dict(event)))

    def on_beat(self, step: int) -> None:
        self.step = step
        self.send_lines()

    def send_lines(self) -> None:
        """Send the ranks' lines that have gathered: many at a time, so that a talkative rank costs little."""
        lines, self._lines = self._lines, []
        if lines:
            self.send("lines", lines=lines)

    def relay(self, line: str) -> None:
        self._lines.append(line)

    def _listen(self) -> None:
        for line in self._words:
            self._last_word = time.monotonic()
            word, _, reason = line.decode().rstrip("\n").partition(" ")
            if word == KILL:
                self._give_up("the driver ended the attempt")
            elif word == STOP and not self.stop.is_set():
                self.stop.set(reason)
        self._give_up("the worker is gone")

    def _beat(self) -> None:
        while True:
            self.send("beat", step=self.step)
            time.sleep(BEAT_SECONDS)
            silence = time.monotonic() - self._last_word
            if silence > self._lease:
                self._give_up(f"there was no word from the driver for {silence:.0f} s")

    def _give_up(self, reason: str) -> None:
        """Have the ranks killed. Does not return, and ends this process itself if its main thread does not."""
        self.is_lost = True
        self.stop.set(reason)
        self.stop.set(reason)  # twice is urgent
        time.sleep(KILL_GRACE)
        os._exit(1)  # the ranks end themselves when their pipe to this process does


def main() -> None:
    """Run the ranks of this node as ordered, and say last how they ended.

    Arguments of the process: the directory of the code, one for what later attempts may want again, and the file
    descriptors of the two pipes and, where the ranks of the gang meet, of the rendezvous' listening socket.
    """
    _, _, directory, words_in, messages_out, *listener_in = sys.argv
    words, messages = os.fdopen(int(words_in), "rb"), os.fdopen(int(messages_out), "wb")
    order: Order = pickle.load(words)
    os.environ.update(order.environment)
    listener = socket.socket(fileno=int(listener_in[0])) if listener_in else None
    place = dataclasses.replace(order.place, interface=interface_to(order.place.host))
    link = DriverLink(words, messages, order.lease)

    def relay(line: str) -> None:
        if order.prints_lines:
            print(line, flush=True)  # noqa: T201 - into the worker's log
        link.relay(line)

    end: dict[str, Any] = {"outcome": "done"}
    try:
        data = functools.partial(local_data, order, Path(directory))
        supervise(order.job, place, listener, data, link.emit, link.stop, relay, link.on_beat)
    except TrainingStopped as stopped:
        end = {"outcome": "killed" if link.is_lost else "stopped", "message": str(stopped)}
    except RankFailure as failure:
        end = {
            "outcome": "failed",
            "message": str(failure),
            "rank": failure.rank,
            "failure_kind": failure.kind,
            "cause": failure.cause,
            "is_consequence": failure.is_consequence,
        }
    except Exception as error:
        end = {"outcome": "broken", "message": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
    link.send_lines()
    link.send("end", **end)
    os._exit(0)  # not to wait for the thread that reads words, which would wait for the driver


def interface_to(host: str) -> str:
    """The network interface by which this machine reaches `host`, which may be itself: where gloo and NCCL listen."""
    import psutil  # type: ignore[import-untyped]

    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only asks the routing table
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return str(name)
    raise OSError(f"no network interface of this machine has the address {own}, by which it reaches {host}")


def local_data(order: Order, directory: Path) -> str:
    """The directory of the prepared data on this machine, fetched and unpacked there if need be."""
    if order.data:
        return order.data
    unpacked = directory / order.data_name
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            file_system, path = fsspec.url_to_fs(order.data_archive)
            archive = os.path.join(scratch, "data.zip")
            file_system.get_file(path, archive)
            with zipfile.ZipFile(archive) as contents:
                contents.extractall(os.path.join(scratch, "data"))
            os.rename(os.path.join(scratch, "data"), unpacked)
    return str(unpacked)
