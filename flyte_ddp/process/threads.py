"""Threads of the driver, an agent and a rank. All are daemons, because a thread that hangs must not
outlive a run that was stopped. Imports no torch.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def call_in_background(function: Callable[[], T]) -> Future[T]:
    """Call `function` in a thread that sees the caller's context variables, such as Flyte's
    context.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    start_thread("background", work)
    return future


def start_thread(name: str, function: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Call `function` in a thread with this name."""
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
