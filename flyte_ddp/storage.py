"""A directory at any fsspec URL, with the two promises that checkpoints and champions need. Imports no torch.

A file appears whole or not at all, and an unwritable place is known before the work begins.
"""

from __future__ import annotations

import contextlib
import os
import uuid

import fsspec

from flyte_ddp.errors import ConfigError


class Storage:
    """The files directly below `url`, such as a run's checkpoints. Names are relative to it; contents are bytes.

    Raises:
        ConfigError: no such kind of URL is known here; names `field`.
    """

    def __init__(self, url: str, field: str = "checkpoints") -> None:
        self.url = url.rstrip("/")
        try:
            self.file_system, self.root = fsspec.url_to_fs(self.url)
        except (ValueError, ImportError) as error:  # a protocol that fsspec does not know or has no package for
            raise ConfigError(
                f"{field}: {url!r} cannot be used: {error}; accepted is a path or a URL that fsspec knows"
            ) from error
        protocol = self.file_system.protocol
        self.is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)
        if self.is_local:
            self.url = self.root  # absolute: a process with another working directory means the same place

    def join(self, name: str) -> str:
        """The full URL of `name`."""
        return f"{self.url}/{name}"

    def check_writable(self, field: str) -> None:
        """Create the directory and prove that a file can be put there.

        Raises:
            ConfigError: it cannot; names `field`, the URL and the reason.
        """
        probe = f".probe-{uuid.uuid4().hex}"
        try:
            self.write(probe, b"")
            self.delete(probe)
        except Exception as error:  # every file system has errors of its own
            raise ConfigError(
                f"{field}: {self.url!r} cannot be written to: {type(error).__name__}: {error}; "
                "accepted is a path or URL at which this process may create files"
            ) from error

    def write(self, name: str, contents: bytes) -> None:
        """Put `contents` at `name`, replacing what was there, so that no reader ever sees a part of it."""
        path = f"{self.root}/{name}"
        if not self.is_local:
            self.file_system.pipe_file(path, contents)  # an object store shows an object once it is complete
            return
        os.makedirs(self.root, exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def read(self, name: str) -> bytes:
        """The contents of `name`; FileNotFoundError where there is none."""
        contents: bytes = self.file_system.cat_file(f"{self.root}/{name}")
        return contents

    def delete(self, name: str) -> None:
        """Remove `name`, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.file_system.rm_file(f"{self.root}/{name}")

    def names(self) -> list[str]:
        """The files directly below, unsorted; none where the directory does not exist. Asks the store, not a cache."""
        self.file_system.invalidate_cache()
        try:
            return [entry.rsplit("/", 1)[-1] for entry in self.file_system.ls(self.root, detail=False)]
        except FileNotFoundError:
            return []
