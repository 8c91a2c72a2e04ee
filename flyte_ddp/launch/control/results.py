"""The files that ranks submit, on their way to the caller of the run."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import queue
import time
from collections.abc import Callable

from flyte_ddp.config.waits import BEAT_INTERVAL, POLL_INTERVAL
from flyte_ddp.errors import ConfigError, TrainingStopped, in_one_line
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.protocol.messages import Submitted
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.process.threads import call_in_background
from flyte_ddp.storage import SHORT_TIMEOUT, Storage

Destination = str | os.PathLike[str] | Callable[[str, bytes], object]

logger = logging.getLogger(__name__)


class Results:
    """Takes files away from the nodes of a run, in a thread, and passes them on in their order.

    A rank waits while too many of its files are still on its node. So a slow destination fills
    neither the nodes' disks nor the memory of this process. An error of the destination does not
    end a training. The first error is logged, no further file is passed on, and `check` raises it.

    Args:
        destination: directory or URL for the files, or a function that gets path and contents of
            each.

    Raises:
        StorageDenied, StorageUnavailable: nothing can be written there.
    """

    def __init__(self, destination: Destination) -> None:
        if callable(destination):
            self._deliver: Callable[[str, bytes], object] = destination
        else:
            storage = Storage(os.fspath(destination), "results", SHORT_TIMEOUT)
            storage.check_access()
            self._deliver = storage.write
        self._failure: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[Nodes, Node, Submitted] | None] = queue.SimpleQueue()
        self._taking = call_in_background(self._take_all)

    def put(self, nodes: Nodes, node: Node, submitted: Submitted) -> None:
        """Take one more file from `node`."""
        self._queue.put((nodes, node, submitted))

    def close(self, stop: StopRequest) -> None:
        """Wait until all files are passed on, or until a second request to stop is made."""
        self._queue.put(None)
        while not (self._taking.done() or stop.is_urgent):
            concurrent.futures.wait([self._taking], POLL_INTERVAL)
        if not self._taking.done():
            self._failure = TrainingStopped(
                f"{stop.reason}: the run was stopped while its results were on their way",
                stop.reason,
            )

    def check(self) -> None:
        """Raise the error that kept files from being passed on, if there was one."""
        if self._failure:
            raise self._failure

    def _take_all(self) -> None:
        is_over = False
        while not is_over:
            waiting = [self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            is_over = waiting[-1] is None
            # Files of one node are taken together, because each call to a node takes a while.
            groups: dict[tuple[Nodes, Node], list[Submitted]] = {}
            for nodes, node, submitted in filter(None, waiting):
                groups.setdefault((nodes, node), []).append(submitted)
            for (nodes, node), files in groups.items():
                self._take(nodes, node, files)

    def _take(self, nodes: Nodes, node: Node, files: list[Submitted]) -> None:
        """Pass the files of a node on, in their order."""
        while files:
            try:
                contents = nodes.take_results(node, [each.file for each in files])
            except Exception:
                if node.outcome is not None:  # the node has ended, and may be gone
                    logger.warning("results: %d files are lost with %s", len(files), node)
                    return
                time.sleep(BEAT_INTERVAL)
                continue
            for submitted, data in zip(files, contents, strict=False):
                if data is not None and self._failure is None:
                    self._pass_on(submitted.path, data)
            files = files[len(contents) :]

    def _pass_on(self, path: str, data: bytes) -> None:
        try:
            self._deliver(path, data)
        except BaseException as error:
            self._failure = ConfigError(
                f"results: expected a place or a function that takes {path!r}, got "
                f"{in_one_line(error)}"
            )
            logger.error("no more results are kept, while the run goes on: %s", self._failure)
