"""The lease of a run's place: one run at a time may write there, named by a token in `owner.json`.

Two runs in one place would delete each other's checkpoints. So the process that starts a run takes
the lease before anything is written there, renews it by heartbeats, and releases it at the end.
Rank 0 compares the token before everything that it writes or deletes: a process that was replaced,
but lives on somewhere, changes nothing any more.

A lease is over if it was released, if its process is gone from this very machine, if it is an
earlier attempt's of the same run on another one (Flyte retries a node under the same name), or if
no heartbeat comes for as long as it lasts. The last is measured by the clock of the process that
waits: no two machines' clocks are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import ConfigError, FileChanged
from flyte_ddp.process.threads import start_thread
from flyte_ddp.storage import Storage, redact_url

OWNER = "owner.json"
BEAT_INTERVAL = 20.0  # seconds between two heartbeats
LOOK_INTERVAL = 1.0  # seconds between two looks at another run's lease

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The contents of `owner.json`."""

    token: str  # identifies the process that drives the run
    run: str  # the same for all attempts of a run: Flyte's execution and node; "" for a local run
    host: str
    machine: str  # names the kernel and the process namespace of `pid`
    pid: int
    # start time of the process, because another process may get the same `pid` later
    process_start: str
    since: str  # UTC, ISO 8601
    beat_at: float  # last heartbeat, seconds since the epoch by the owner's clock
    lease: float  # seconds without a heartbeat for which the owner may still be alive
    released: bool = False

    def is_over(self, run: str) -> bool | None:
        """Return whether this owner has ended, from the view of an attempt of `run`. None if only
        its lease can show it.
        """
        if self.released:
            return True
        if self.machine and self.machine == _read_machine():
            return _read_start(self.pid) != self.process_start
        if run and self.run == run:
            return True
        return None

    def __str__(self) -> str:
        name = f"process {self.pid}"
        if self.run:
            name = f"run {self.run}"
        return f"{name} on {self.host} since {self.since}"


class Ownership:
    """As a context manager: the place at `url` belongs to this run inside the block.

    Args:
        run: the run's name, the same for all its attempts; "" for a local run.
        store_timeout: seconds that the run waits for a store that is away. A run may be alive
            without a sign of life for that long.

    Raises:
        ConfigError: the place belongs to another run, which is alive.
        StorageUnavailable, StorageDenied: the place cannot be read or written.
    """

    def __init__(self, url: str, run: str, store_timeout: float, output: str = "") -> None:
        self._field, self._place = "checkpoints", url
        if output:
            self._field, self._place = "output", output
        self._storage = Storage(url, timeout=store_timeout)
        self._beats = Storage(url, timeout=0)
        pid = os.getpid()
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._owner = Owner(
            token=uuid.uuid4().hex,
            run=run,
            host=socket.gethostname(),
            machine=_read_machine(),
            pid=pid,
            process_start=_read_start(pid),
            since=since,
            beat_at=time.time(),
            lease=store_timeout + 3 * BEAT_INTERVAL,
        )
        self.token = self._owner.token
        self._has_ended = threading.Event()

    def __enter__(self) -> Ownership:
        watched, over_at = b"", 0.0
        while True:
            contents, other = read_owner(self._storage)
            is_over = other is None or other.is_over(self._owner.run)
            if is_over or (contents == watched and time.monotonic() > over_at):
                with contextlib.suppress(FileChanged):  # another process was quicker, so look again
                    self._put(self._storage, contents)
                    break
            elif is_over is False or contents != watched != b"":
                raise ConfigError(
                    f"{self._field}: expected a place of this run's own, got "
                    f"{redact_url(self._place)}, which belongs to {other}, and that is alive"
                )
            elif other and not watched:
                watched, over_at = contents, time.monotonic() + other.lease
                wait = (
                    f"waiting up to {other.lease:.0f} s for a heartbeat of it. If it is over, "
                    f"delete {redact_url(self._storage.join(OWNER))}"
                )
                place = redact_url(self._place)
                logger.warning("%s: %s belongs to %s; %s", self._field, place, other, wait)
            time.sleep(LOOK_INTERVAL)
        self._thread = start_thread("ownership", self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        # The wait is bounded: a process that was asked to stop has seconds, and a store may hang.
        self._thread.join(ANSWER_TIMEOUT)

    def _put(self, storage: Storage, replaced: bytes, released: bool = False) -> None:
        owner = dataclasses.replace(self._owner, beat_at=time.time(), released=released)
        contents = json.dumps(dataclasses.asdict(owner), indent=1).encode()
        storage.replace(OWNER, contents, replaced)

    def _beat(self) -> None:
        """Send heartbeats until the end, and then release the place. Errors do not end the
        heartbeats, because another run may take the place without them.
        """
        is_over = False
        while not is_over:
            is_over = self._has_ended.wait(BEAT_INTERVAL)
            # Rank 0 checks the owner before it writes, and reports a change.
            with contextlib.suppress(Exception):
                contents, other = read_owner(self._beats)
                if other is None or other.token == self.token:
                    self._put(self._beats, contents, released=is_over)


def read_owner(storage: Storage) -> tuple[bytes, Owner | None]:
    """Return the contents of `owner.json` and the owner. The contents are b"" without a file. The
    owner is None if the contents name none.
    """
    try:
        contents = storage.read(OWNER)
    except FileNotFoundError:
        return b"", None
    try:
        return contents, Owner(**json.loads(contents))
    except (ValueError, TypeError):
        return contents, None


def check_owner(storage: Storage, token: str) -> None:
    """Raise ConfigError if the place of `storage` does not belong to the run with this token any
    more. The token "" stands for a place without other users, which is not checked.
    """
    owner = None
    if token:
        owner = read_owner(storage)[1]
    if owner and (owner.token != token or owner.released):
        raise ConfigError(
            f"checkpoints: {redact_url(storage.url)} belongs to {owner} now, so this process "
            "writes nothing more there"
        )


def _read_machine() -> str:
    """Return a name of the boot and the process namespace, in which a process number is unique; ""
    if there is no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _read_start(pid: int) -> str:
    """Return the start of a process in ticks since the boot, which stay where a clock is set; ""
    for one that has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    if fields[0] in (b"Z", b"X"):
        return ""
    return fields[19].decode()
