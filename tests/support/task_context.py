"""The context of flytekit in which a task runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flytekit.core.context_manager import ExecutionState, FlyteContextManager


@contextlib.contextmanager
def executing(
    mode: ExecutionState.Mode = ExecutionState.Mode.LOCAL_TASK_EXECUTION,
) -> Iterator[None]:
    """Be in a task of a local run or of a pod."""
    context = FlyteContextManager.current_context()
    state = context.execution_state.with_params(mode=mode)
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        yield
