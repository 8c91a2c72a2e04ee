"""Stores on this machine, as fixtures: moto for S3, fake-gcs-server, which Go builds, and Azurite
from npm.

Azurite checks keys, and the others do not. `make emulators` fetches the emulators that are not
Python packages. It needs Go and npm.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from flyte_ddp.storage import open_filesystem
from tests.support.image_store import running_store
from tests.support.ports import free_port

REPOSITORY = Path(__file__).parents[2]
ACCOUNT, KEY = "account", base64.b64encode(os.urandom(64)).decode()
PROGRAMS = {
    "gs": "build/emulators/fake-gcs-server",
    "abfs": "build/emulators/node_modules/.bin/azurite-blob",
}
KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in PROGRAMS]


def install(kind):
    """Return the path of the emulator of `kind`, which is fetched if it is not there; skip the test
    if it cannot be.
    """
    program = REPOSITORY / PROGRAMS[kind]
    program.parent.mkdir(parents=True, exist_ok=True)
    # Another process of this session may be making the emulators.
    with open(REPOSITORY / "build/emulators/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-C", str(REPOSITORY), PROGRAMS[kind]]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    if done.returncode:
        pytest.skip(
            f"{kind}:// was NOT tested: its emulator could not be fetched: {done.stderr[-300:]}"
        )
    return str(program)


class Emulator:
    """A store that can be taken away; its files are in `place` and outlive its process."""

    def __init__(self, kind, place):
        self.kind, self.port, program = kind, free_port(), install(kind)
        self.url = f"http://127.0.0.1:{self.port}"
        if kind == "gs":
            self.environment = {"STORAGE_EMULATOR_HOST": self.url, "NO_GCE_CHECK": "true"}
            self._command = [
                program,
                "-scheme=http",
                "-host=127.0.0.1",
                f"-port={self.port}",
                "-log-level=error",
            ]
            self._command += [f"-filesystem-root={place}/files", f"-external-url={self.url}"]
        else:
            self.environment = {"AZURE_STORAGE_CONNECTION_STRING": self.connection_string()}
            self._command = [program, f"--blobPort={self.port}", f"--location={place}", "--silent"]
            self._command += ["--skipApiVersionCheck", "--disableTelemetry"]
        self._log = place / "log"
        self.start()

    def connection_string(self, key=KEY):
        endpoint = f"BlobEndpoint={self.url}/{ACCOUNT}"
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};{endpoint}"

    def start(self):
        with open(self._log, "ab") as log:
            accounts = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env={**os.environ, **accounts}
            )
        deadline = time.monotonic() + 120
        while True:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 5),
            ):
                return
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def stop(self):
        self.process.terminate()  # Azurite writes what it knows of its files at its end
        self.process.wait(60)

    @contextlib.contextmanager
    def refusing(self):
        """Refuse connections while the block runs."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def hanging(self):
        """Take requests and answer none while the block runs."""
        self.process.send_signal(signal.SIGSTOP)
        # Its threads run on until the kernel has stopped each of them.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def new_bucket(self):
        """Return the URL of a bucket that is empty."""
        name = f"bucket-{uuid.uuid4().hex}"
        open_filesystem(f"{self.kind}://{name}")[0].mkdir(name)
        return f"{self.kind}://{name}"


def running(kind):
    """Return a fixture: an emulator that the environment names while the tests of a file use it."""

    @pytest.fixture(scope="module", name=kind)
    def emulator(tmp_path_factory):
        with pytest.MonkeyPatch.context() as patch:
            found = Emulator(kind, tmp_path_factory.mktemp(kind))
            for name, value in found.environment.items():
                patch.setenv(name, value)
            yield found
            found.stop()

    return emulator


gs, abfs = running("gs"), running("abfs")


@pytest.fixture(scope="module")
def s3():
    with running_store() as store:
        yield store


@pytest.fixture(name="bucket")
def s3_bucket(s3):
    """The URL of an empty bucket on an S3 server of this machine, which the environment names."""
    return s3.new_bucket()


@pytest.fixture(params=["disk", "s3", "memory", *KINDS], name="url")
def place_url(request, tmp_path):
    """An empty place: on a disk, in a bucket of each kind, and in a store that knows no condition
    for a put.
    """
    if request.param == "disk":
        return str(tmp_path / "place")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return request.getfixturevalue(request.param).new_bucket() + "/place"
