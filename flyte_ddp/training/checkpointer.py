"""The checkpoints of a recipe's run: when one is due, what it holds, and who may go on from it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.checkpoints.state import count_bytes
from flyte_ddp.code.by_value import is_by_value
from flyte_ddp.errors import CheckpointError, ConfigError, in_one_line
from flyte_ddp.events import EpochFinished
from flyte_ddp.rank.agreement import Facts, Read, check_checkpoint
from flyte_ddp.rank.memory_interval import MemoryInterval
from flyte_ddp.rank.session import Session
from flyte_ddp.rank.states import Loaded, check_kind, load_newest
from flyte_ddp.recipes import list_class_names
from flyte_ddp.storage import redact_values
from flyte_ddp.storage.recorded_config import OPTIONS, hash_hidden
from flyte_ddp.training.initial_state import check_same_run, load_initial_state, recorded_config
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.trained_state import TrainedState
from flyte_ddp.training.trial import check_length, check_schedule
from flyte_ddp.world import call_together

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RunNotes:
    """What a checkpoint notes of its run, so that no run on other data goes on from it."""

    parallelism: Parallelism
    data_fingerprint: str = ""
    recipe_version: str = ""  # SHA-256 of the recipe's code
    data_facts: Facts = field(default_factory=dict)  # the value of `describe_samples`
    read_facts: Read = dict  # reads `data_facts` once more
    # Replays need these values too: "recipe" and "data" as they were given, "code" by file,
    # "num_ranks", and each rank's "num_threads".
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.parallelism.config
        self.config = redact_values(dataclasses.asdict(config))
        self.hidden = hash_hidden(dataclasses.asdict(config))

    def to_dict(self) -> dict[str, Any]:
        """Return the notes as a checkpoint has them."""
        return {
            "config": self.config,
            "hidden": self.hidden,
            "data_fingerprint": self.data_fingerprint,
            "recipe": [type(self.parallelism.recipe).__qualname__, self.recipe_version],
            "data_facts": self.data_facts,
            "origin": self.origin,
        }

    def check(self, state: Mapping[str, Any], url: str, trained: TrainedState) -> None:
        """Check that a state, read at `url`, is of a run that this one may continue.

        Raises:
            ConfigError: it is not; names the field.
        """
        recipe, config = self.parallelism.recipe, self.parallelism.config
        check_kind(state, url, is_function=False)
        added = self._list_added_options(state)
        free = {*recipe.changeable_options, *added}
        check_same_run(state, url, config, self.data_fingerprint, free)
        ours = [type(recipe).__qualname__, self.recipe_version]
        if state["recipe"] != ours and is_by_value(type(recipe)):
            raise ConfigError(
                f"recipe: expected {ours[0]} as it was in the run of {url}, got other code or "
                "other values that it refers to: give other checkpoints"
            )
        # A warning is enough, because the change may mend a mistake.
        if state["recipe"] != ours and self.parallelism.world.is_first:
            self._warn_of_code(state, url, ours)
        epochs = state["config"]["epochs"]
        num_steps = trained.schedule.num_steps
        check_length(trained.model, self.parallelism, num_steps, epochs, url)
        theirs, options = recorded_config(state), config.recipe_options
        # The samples may differ where an option such as the augmentation has changed.
        are_same = all(
            name in added or theirs.is_same(f"{OPTIONS}.{name}", each)
            for name, each in options.items()
        )
        check_checkpoint(recipe, self.data_facts, self.read_facts, state, url, not are_same)

    def _list_added_options(self, state: Mapping[str, Any]) -> set[str]:
        """Return the recipe's options that it did not have in the run of a state, if they are at
        their defaults.
        """
        recorded, kind = state["config"]["recipe_options"], type(self.parallelism.recipe)
        options = self.parallelism.config.recipe_options.items()
        return {
            name
            for name, value in options
            if name not in recorded and value == getattr(kind, name, None)
        }

    def _warn_of_code(self, state: Mapping[str, Any], url: str, ours: list[str]) -> None:
        before, now = state["origin"]["code"], self.origin["code"]
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        difference = ""
        if changed:
            difference = f"; changed: {', '.join(changed)}"
        logger.warning(
            "the run of %s goes on with other code: recipe %s %s, before %s %s%s",
            url,
            *ours,
            *state["recipe"],
            difference,
        )


@dataclass(eq=False)
class Checkpointer:
    """Saves the state of a recipe's run, and goes on from it."""

    session: Session  # session with open checkpoints; a split model's ranks are their `peers`
    parallelism: Parallelism
    state: TrainedState
    notes: RunNotes
    is_read_only: bool = False
    num_ranks_before: int = 0  # number of ranks that saved the checkpoint; 0 for a new run
    # the run goes on from the state of the best epoch, which the store lacks
    best_is_unsaved: bool = False

    def __post_init__(self) -> None:
        config = self.parallelism.config
        self.store = self.session.saver.open()
        self.store.returns_to_best = config.model_state == "best"
        self.saved_at = time.monotonic()  # time of the last checkpoint, or of the start
        self.memory_interval = MemoryInterval(
            config.memory_interval, self.session.process, self.parallelism.world, self._count_bytes
        )

    def to_dict(self) -> dict[str, Any]:
        """Return this rank's part of a checkpoint."""
        return {**self.notes.to_dict(), **self.state.to_dict()}

    def _count_bytes(self) -> int:
        """Return how many bytes of a state the ranks of this node save."""
        num_savers = min(self.parallelism.num_shards, self.session.process.node.num_ranks)
        return num_savers * count_bytes(self.to_dict())

    def is_due(self, is_logged: bool) -> bool:
        """Return whether the config asks for a checkpoint after the last step.

        Rank 0 decides by the clock, in steps in which the ranks wait for each other anyway.
        """
        config, world = self.parallelism.config, self.parallelism.world
        interval, minutes = config.checkpoint_interval, config.checkpoint_minutes
        if interval and self.state.progress.step % interval == 0:
            return True
        if not (minutes and is_logged):
            return False
        is_late = world.is_first and time.monotonic() - self.saved_at >= 60 * minutes
        return bool(world.all_reduce(float(is_late))[0])

    def save(self, best: bool, to_store: bool = True) -> bool:
        """Write a checkpoint of the current state. Every rank calls it. The ranks with
        `Parallelism.saves` write.

        Args:
            to_store: write to the store. If False, write to memory alone, which may be skipped.

        Returns:
            True if this rank has written something.
        """
        started = time.perf_counter()
        if to_store:
            self.saved_at = time.monotonic()
        if self.is_read_only or not self.parallelism.saves:
            return False
        in_memory, step = self.memory_interval.is_on, self.state.progress.step
        with self.state.average.trained():
            return self.session.saver.write(
                self.to_dict(), step, best, started, to_store, in_memory
            )

    def save_bad(self, step: int) -> None:
        """Keep the state before a bad step, with which a replay begins."""
        try:
            self.store.save_bad(self.to_dict(), step, self.session.reporter.beat)
        except Exception as error:  # the bad step is what is to be reported
            logger.warning("the state before it is not kept: %s", in_one_line(error))

    def find_newest(self) -> Loaded:
        """Return the newest state, in memory or in the store. Every rank calls it. One rank reads
        each file, and sends the other ranks their parts of it.
        """
        state, process = self.state, self.session.process
        return load_newest(
            self.parallelism.world, process, self.store, state.boxes(), state.needed_step
        )

    def resume(self) -> tuple[str, list[str]]:
        """Go on from the newest state, or start from the configured initial state. Every rank calls
        it.

        Returns:
            The checkpoint's URL, or the nodes with the state in memory; "" for a new run. On rank 0
            also a reason for each newer state that was skipped.

        Raises:
            ConfigError: the checkpoint belongs to a run with other data, other hyperparameters or
                another initial state; the initial state is not one of this model.
            StorageUnavailable: the store has been away for `store_timeout`.
        """
        trained, parallelism = self.state, self.parallelism
        loaded, config = self.find_newest(), parallelism.config
        state = loaded.state
        if state is not None:
            self.notes.check(state, loaded.origin, trained)
            trained.load(state)
            self.num_ranks_before = state["origin"]["num_ranks"]
            is_best = trained.needed_step(state) == trained.progress.step
            self.best_is_unsaved = loaded.is_in_memory and is_best
        elif config.initial_model_state:
            names = list_class_names(parallelism.recipe)
            given = config.initial_model_state, config.store_timeout, config.fresh_layers
            call_together(
                lambda: load_initial_state(trained.model, *given, names), parallelism.world
            )
            trained.average.start()
        check_schedule(
            trained.model, parallelism, trained.optimizer, trained.schedule, trained.progress.step
        )
        return loaded.origin, loaded.skipped

    def load_model_state(self) -> EpochFinished:
        """Go back to the weights that the run returns, and return their epoch. Every rank calls it.

        They are the last epoch's also where the checkpoint of the best one is missing or damaged,
        with a warning.
        """
        state = self.state
        kept, best = state.progress.epochs[-1], state.best
        if self.store.returns_to_best and best is not kept:
            try:
                world = self.parallelism.world
                state.load_weights(self.store.load(best.step, world, state.boxes()))
                kept = best
            except CheckpointError as error:
                logger.warning(
                    "the model state is that of epoch %d, and not of the best: %s",
                    kept.epoch,
                    error,
                )
        state.average.keep()
        return kept
