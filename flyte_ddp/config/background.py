"""A call in a thread whose result is wanted later: of the driver and of an agent.
Imports no torch.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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

    # A daemon: a download that hangs must not outlive a run that was stopped.
    threading.Thread(target=work, name="background", daemon=True).start()
    return future
