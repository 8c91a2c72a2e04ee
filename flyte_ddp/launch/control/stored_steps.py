"""The checkpoints in the store, as the driver knows them from the events of the ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from flyte_ddp import events


@dataclass(eq=False)
class StoredSteps:
    """The steps of the checkpoints of a run, and the step from which its latest attempt started.

    Args:
        has_store: the run keeps checkpoints.
        is_kept: the checkpoints outlive the run.
    """

    has_store: bool
    is_kept: bool
    steps: set[int] | None = None  # None before the first event about them
    resumed: int = -1  # step from which the latest attempt started; -1 if unknown
    _has_loaded: bool = False  # the latest attempt has reported `resumed` itself

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint in the store; 0 for none, -1 if that is not known."""
        if self.steps is None:
            if self.has_store:
                return -1
            return 0
        return max(self.steps, default=0)

    def begin_attempt(self) -> None:
        """Note that an attempt begins. It resumes the newest checkpoint unless it reports another
        one.
        """
        self.resumed, self._has_loaded = self.newest, False

    def note(self, event: events.Event, is_in_memory: bool) -> events.Event:
        """Note what an event of an attempt says of the store. Return the event for listeners.

        Args:
            is_in_memory: the attempt was to load a state from memory.
        """
        steps = self.steps or set()
        match event:
            case events.CheckpointLoaded(step) if not self._has_loaded:
                self.resumed, self._has_loaded = step, True
                # Newer checkpoints are damaged.
                self.steps = {each for each in steps if each <= step}
                if step and not is_in_memory:
                    self.steps.add(step)
            case events.CheckpointWritten(step):
                # this checkpoint replaces later ones that were saved before it
                self.steps = {*(each for each in steps if each < step), step}
                if not self.is_kept:  # nobody finds it there when the run has ended
                    return dataclasses.replace(event, url="")
        return event
