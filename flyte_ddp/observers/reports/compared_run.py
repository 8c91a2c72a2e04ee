"""A run that is compared: what is known of it, its curves, and what differs from another run.

It comes from a history or from a run card. A night of a schedule is a run card.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flyte_ddp.config import Monitor
from flyte_ddp.errors import ConfigError, StorageUnavailable, in_one_line
from flyte_ddp.events import RunState, parse_history
from flyte_ddp.events.nights import NIGHTS, find_end
from flyte_ddp.observers.reports.plots import Curve, find_axis
from flyte_ddp.observers.reports.run_card import CARD_JSON, UNKNOWN, run_card
from flyte_ddp.storage import SHORT_TIMEOUT, Storage, read_file, redact_url
from flyte_ddp.storage.recorded_config import OPTIONS, flatten

FILES = ("history.jsonl", CARD_JSON, f"export/{CARD_JSON}")  # files of a run, the best first
# parts of a run card with facts that explain a result
SECTIONS = ("config", "versions", "origin", "data", "ranks")
# facts that explain no result, or are in another section too
NOT_COMPARED = (
    "origin: execution",
    "origin: initial_model_state",
    "origin: parent_champion",
    "ranks: restarts",
    "ranks: announced_losses",
)

logger = logging.getLogger(__name__)

Changes = dict[str, tuple[Any, Any]]  # facts before and after, by their names


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs."""

    name: str
    card: Mapping[str, Any]  # see `run_card`
    # curves under the names of their figure and of their x axis
    curves: Mapping[tuple[str, str], Curve]
    problem: str = ""  # why it has not finished, or has nothing to draw; one line

    @property
    def facts(self) -> dict[str, Any]:
        """The known facts about the run, by names such as "config: learning_rate"."""
        facts = {"program": self.card["recipe"]}
        for section in SECTIONS:
            for name, value in flatten(self.card[section]).items():
                is_known = section == "config" or value not in (None, "", UNKNOWN)
                if is_known and f"{section}: {name}" not in NOT_COMPARED:
                    facts[f"{section}: {name}"] = value
        return facts

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went. The time of the steps is split if the phases of the ranks are
        known.
        """
        seconds = {}
        for name, spent in self.card["seconds"].items():
            seconds[name] = spent
            if name == "stepping":
                shares = self.card.get("step_shares", {})
                seconds |= {f"steps: {each}": share * spent for each, share in shares.items()}
        return seconds

    def find_score(self, monitor: Monitor) -> float:
        """Return the figure at the end of the run, lower for better; NaN without its curve, and
        infinite if the figure is not finite.
        """
        for (figure, _), curve in self.curves.items():
            if figure == monitor.metric:
                return monitor.score({figure: find_end([y for _, y in curve])})
        return math.nan


def find_changes(before: ComparedRun, after: ComparedRun) -> Changes:
    """Return the facts that differ. A fact that one of the runs does not know is no change, but a
    recipe's option is.
    """
    one, other = before.facts, after.facts
    return {
        name: (one.get(name), other.get(name))
        for name in {**one, **other}
        if (name in one and name in other) or name.startswith(f"config: {OPTIONS}")
        if one.get(name) != other.get(name)
    }


def find_usual(runs: Sequence[ComparedRun]) -> set[str]:
    """Return the names of the facts that change between most neighbors, such as the data of a
    schedule.
    """
    changes = [find_changes(*pair) for pair in itertools.pairwise(runs)]
    counts = Counter(itertools.chain(*changes))
    return {name for name, count in counts.items() if 2 * count > len(changes)}


def read_runs(place: str) -> list[ComparedRun]:
    """Return the run at a place, or the nights of a champion, the oldest first.

    Args:
        place: path or URL of a history, a run card, or a directory with one of these; or that of a
            champion.

    Raises:
        ConfigError: there is no run, or one that this version cannot read.
    """
    shown = redact_url(place)
    try:
        if place.endswith((".jsonl", ".json")):
            return [parse_run(shown, read_file(place, "RUN", SHORT_TIMEOUT))]
        storage = Storage(place, "RUN", SHORT_TIMEOUT)
        for name in FILES:
            contents = storage.read_if_there(name)
            if contents:
                return [parse_run(shown, contents)]
        return read_nights(storage)
    except (OSError, StorageUnavailable, ValueError) as error:
        reason = in_one_line(error).removeprefix("ValueError: ")
        raise ConfigError(f"RUN: {shown}: {reason}") from error


def read_nights(storage: Storage) -> list[ComparedRun]:
    """Return the nights of a champion that can be read. Raises ValueError if there are none."""
    nights = Storage(storage.join(NIGHTS), "RUN", storage.timeout)
    names = sorted(name for name in nights.names() if name.endswith(".json"))
    if not names:
        raise ValueError(f"expected a run with {' or '.join(FILES)}, or a champion with {NIGHTS}/")
    runs = []
    for name in names:
        try:
            runs.append(parse_run(name.removesuffix(".json"), nights.read(name)))
        except ValueError as error:
            logger.warning("%s is left out: %s", nights.join(name), error)
    return runs


def parse_run(name: str, contents: bytes) -> ComparedRun:
    """Return the run of a history or a run card. Raises ValueError if it is neither."""
    if contents.startswith(b'{"time"'):
        return _parse_history(name, contents)
    try:
        card = json.loads(contents)
        run = ComparedRun(name, card, _list_curves(card))
        _ = run.facts, run.seconds, card["hidden"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError("expected a history or a run card of this version") from error
    return run


def _parse_history(name: str, contents: bytes) -> ComparedRun:
    state = RunState.of(parse_history(contents, "history"))
    if state.started is None:
        raise ValueError("expected a run whose ranks have started")
    card = run_card(state)
    axis, lines = find_axis(state)
    curves = _list_curves(card) | {(figure, axis): line for figure, line in lines.items()}
    problem = ""
    if not state.finished:
        problem = "it has not finished"
        if state.ended:
            reason, _, _ = state.ended.reason.partition("\n")
            problem += f"; its ranks ended: {reason}"
    if not curves:
        problem = "; ".join(filter(None, [problem, "it has no steps to draw"]))
    return ComparedRun(name, card, curves, problem)


def _list_curves(card: Mapping[str, Any]) -> dict[tuple[str, str], Curve]:
    """Return the curves of a card's epochs. JSON has null in place of NaN."""
    curves: dict[tuple[str, str], Curve] = {}
    for epoch in card["epochs"]:
        for figure, value in epoch.items():
            y = value
            if value is None:
                y = math.nan
            if figure != "epoch":
                curves.setdefault((figure, "epoch"), []).append((epoch["epoch"], y))
    return curves
