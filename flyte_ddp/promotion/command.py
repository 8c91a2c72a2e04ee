"""`flyte-ddp promotion`: show, list, roll back and prune the champion at a URL."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from typing import Any

from flyte_ddp.config.fields import parse_duration
from flyte_ddp.config.options import Option, add_options
from flyte_ddp.errors import ChampionError
from flyte_ddp.events.history import plain
from flyte_ddp.promotion.champion import LAST_CHALLENGE, LAST_RUN, ChampionStore
from flyte_ddp.promotion.policy import RetrainingResult
from flyte_ddp.storage import SHORT_TIMEOUT

MAX_CLOCK_SECONDS = 300  # largest expected difference between two machines' clocks

COMMANDS = {
    "show": "print the manifest of the version in use, and how the last challenge ended",
    "list": "print all versions, oldest first; * marks the one in use",
    "rollback": "put the version before the one in use, or VERSION, in use again, and keep it "
    "until `release`",
    "release": "let retrainings promote again after a rollback",
    "status": "print when the last retraining ended; exit with 1 if that is too long ago or the "
    "champion is unusable",
    "prune": "delete all versions but the newest --keep, the one in use and its parent",
}
URL: Option = ("url", "of the champion: any fsspec URL or a directory", None)
OPTIONS: dict[str, Option] = {
    "rollback": ("version", "(default: the one before)", ""),
    "status": ("--max-age", "longest time since the end of the last retraining, such as 26h", None),
    "prune": ("--keep", "newest versions to keep (default 10)", 10),
}


def main(arguments: Sequence[str]) -> str:
    """Run a command and return its output. Raises ChampionError if `status` finds that attention is
    needed, and the errors of `ChampionStore`.
    """
    text = "The champion, which is the model in use, and the versions before it."
    parser = argparse.ArgumentParser("flyte-ddp promotion", description=text)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        options = [URL]
        if name in OPTIONS:
            options.append(OPTIONS[name])
        command = commands.add_parser(name, help=text, description=text)
        add_options(command, options)
    given = parser.parse_args(arguments)
    store = ChampionStore(given.url, SHORT_TIMEOUT)
    if given.command == "show":
        shown = {
            "champion": plain(dataclasses.asdict(store.manifest())),
            "last_challenge": store.last(LAST_CHALLENGE),
        }
        return json.dumps(shown, indent=1)
    if given.command == "list":
        return list_versions(store)
    if given.command == "status":
        return describe_status(store, given.max_age)
    if given.command == "prune":
        deleted = store.prune(given.keep)
        return "\n".join([*deleted, f"{len(deleted)} versions deleted"])
    if given.command == "release":
        if store.release():
            return "retrainings promote again"
        return "no rollback holds a version"
    return f"{store.rollback(given.version).version} is in use again, until `release`"


def list_versions(store: ChampionStore) -> str:
    """Return a line for each version, even if `champion.json` is damaged, because a rollback to a
    version mends it.

    Raises:
        NoChampion: none was promoted yet.
    """
    in_use, note = "", ""
    versions = store.versions()
    try:
        in_use = store.parse(store.pointer()).version
    except ChampionError as error:
        if not versions:
            raise
        note = str(error)
    lines = []
    for each in versions:
        mark = " "
        if each.version == in_use:
            mark = "*"
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in each.metrics.items())
        parent = each.parent or "none"
        lines.append(f"{mark} {each.version}  {each.recipe}  {metrics}  over {parent}  {each.data}")
    if note:
        lines.append(note)
    return "\n".join(lines)


def describe_status(store: ChampionStore, max_age: str) -> str:
    """Return the state of the retraining in one line.

    Args:
        max_age: longest time since the end of the last retraining, such as 26h. Its outcome does
            not matter.

    Raises:
        ChampionError: the retraining needs attention, or the champion cannot be used.
    """
    max_seconds = parse_duration("--max-age", max_age)
    run = store.read_record(LAST_RUN)
    if run is None:
        raise ChampionError(
            f"no retraining has ended yet, as far as {store.storage.join(LAST_RUN)} tells"
        )
    ended_at = _read_time(store, run)
    age = (datetime.datetime.now(datetime.timezone.utc) - ended_at).total_seconds()
    execution = run.get("execution") or "a local run"
    promoted_at = "".join(each.created_at for each in store.versions(newest=1))
    line = (
        f"the last retraining ended {age / 3600:.1f} h ago ({run['ended_at']}, {execution}): "
        f"{run.get('outcome')}; the last promotion was {promoted_at or 'never'}"
    )
    if age < -MAX_CLOCK_SECONDS:
        raise ChampionError(
            f"{line}; expected a time in the past: correct the clock of this machine, or of the "
            "one that retrains, whose next run writes the time anew"
        )
    if age > max_seconds:
        raise ChampionError(
            f"{line}; expected one within {max_age}: look at the executions of the launch plan"
        )
    if run.get("outcome") == RetrainingResult.REFUSED:
        raise ChampionError(
            f"{line}. It will end the same way until data, recipe or config are corrected"
        )
    since = store.parse(store.pointer()).held_since
    line += f"; {store.manifest().version} is in use"
    if since:
        line += f", held by a rollback since {since}"
    return line


def _read_time(store: ChampionStore, run: dict[str, Any]) -> datetime.datetime:
    """Return when a retraining ended. Raises ChampionError if its record lacks the time."""
    try:
        ended_at = datetime.datetime.fromisoformat(str(run["ended_at"]).replace("Z", "+00:00"))
    except (KeyError, ValueError) as error:
        raise ChampionError(
            f"{store.storage.join(LAST_RUN)} is damaged: ended_at: expected a time such as "
            f"2026-01-02T03:04:05Z, got {run.get('ended_at')!r}"
        ) from error
    if ended_at.tzinfo:
        return ended_at
    return ended_at.replace(tzinfo=datetime.timezone.utc)
