"""A task's changes to its process: the keys in the environment, and the handler of log records.

Flyte 2 runs several tasks in one process at the same time. The first task makes the change, and the
last task takes it back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator

from flyte_ddp.observers.mlflow import KEY_VARIABLES as MLFLOW_VARIABLES

KEYS = ("WANDB_API_KEY", *MLFLOW_VARIABLES)  # variables with the keys of trackers
# copies of the keys, in a pod to which Flyte passes secrets as variables
COPIES_OF_KEYS = ("_FSEC_WANDB_API_KEY", "_FSEC_MLFLOW_TOKEN", "MLFLOW_TOKEN")

logger = logging.getLogger("flyte_ddp")

_lock = threading.Lock()
_hiding: list[object] = []  # the tasks that keep the keys out of the environment
_hidden: dict[str, str] = {}


@contextlib.contextmanager
def tracker_keys(hides: bool) -> Iterator[dict[str, str]]:
    """Yield the keys of W&B and MLflow by their variables.

    Args:
        hides: keep the keys out of the environment for the length of the block.
    """
    task = object()
    with _lock:
        if hides:
            _hiding.append(task)
            for name in (*KEYS, *COPIES_OF_KEYS):
                if name in os.environ:
                    _hidden[name] = os.environ.pop(name)
        known = {**os.environ, **_hidden}
    try:
        yield {name: known[name] for name in KEYS if name in known}
    finally:
        with _lock:
            if hides:
                _hiding.remove(task)
            if not _hiding:
                os.environ.update(_hidden)
                _hidden.clear()


@contextlib.contextmanager
def launcher_log(say: Callable[[str], None]) -> Iterator[None]:
    """Pass the launchers' log records, for example about a restart, to `say` alone for the length
    of the block.

    If several tasks run in this process, the newest task's `say` gets the records of all.
    """
    with _lock:
        if not _lines.receivers:
            _lines.before = logger.level, logger.propagate
            logger.addHandler(_lines)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        _lines.receivers.append(say)
    try:
        yield
    finally:
        with _lock:
            _lines.receivers.remove(say)
            if not _lines.receivers:
                logger.removeHandler(_lines)
                level, logger.propagate = _lines.before
                logger.setLevel(level)


class _Lines(logging.Handler):
    """Prints each record as a line. In a sweep the line begins with the trial, which is the name of
    the record's thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.receivers: list[Callable[[str], None]] = []  # the newest task's is the last
        self.before = logger.level, logger.propagate

    def emit(self, record: logging.LogRecord) -> None:
        thread = record.threadName or ""
        try:
            line = self.format(record)
            if thread.startswith("trial "):
                line = f"[{thread}] {line}"
            self.receivers[-1](line)
        except Exception:
            self.handleError(record)


_lines = _Lines()
