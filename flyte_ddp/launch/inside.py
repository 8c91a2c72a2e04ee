"""`flyte-ddp status`, `profile` and `stacks`: look into a run through its store, from anywhere.

The run's driver keeps its status there, and looks there for requests: see launch/control/inside.py.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError, FileChanged, NoAnswer
from flyte_ddp.launch.protocol.requests import (
    MAX_PROFILE_SECONDS,
    MAX_STEPS,
    PROFILE,
    REQUEST,
    STACKS,
    STATUS,
    WAITING,
    Request,
    RunStatus,
    read_json,
    to_json,
)
from flyte_ddp.observers.formats import duration, format_count
from flyte_ddp.storage import SHORT_TIMEOUT, Storage, redact_url

RUN = "directory or URL of the run's checkpoints"
MAX_SILENCE = 35.0  # seconds without a write of the driver: three are missing
ANSWER_LIMIT = 2 * MAX_PROFILE_SECONDS  # seconds for the answer
POLL_INTERVAL = 0.5  # seconds between two looks for the answer


def open_run(place: str) -> tuple[Storage, RunStatus]:
    """Return the store of a run, and what the run does.

    Raises:
        ConfigError: there is no run at `place`, or a run of another version.
        StorageDenied, StorageUnavailable: the place cannot be read.
    """
    storage = Storage(place, "RUN", SHORT_TIMEOUT)
    status = read_json(RunStatus, storage.read_if_there(STATUS))
    if status is None:
        raise ConfigError(
            f"RUN: expected the {RUN}, got {redact_url(place)!r}, without a {STATUS} of this "
            "version"
        )
    return storage, status


def is_silent(status: RunStatus) -> bool:
    """Return whether the run should have written again."""
    return not status.has_ended and time.time() - status.written_at > MAX_SILENCE


def print_status(arguments: Sequence[str]) -> str:
    """Return what a run does, for people or as JSON."""
    options = make_parser(
        "status",
        "Show what a run does now, here or on a cluster.",
        (("run", RUN, None), ("--json", "print it as JSON", False)),
    ).parse_args(arguments)
    status = open_run(options.run)[1]
    if options.json:
        return to_json(status).decode()
    return describe(status)


def describe(status: RunStatus) -> str:
    """Return what a run does, in one line for people."""
    what = status.phase
    if is_silent(status):
        what = f"silent, before that {status.phase}"
    texts = [f"{status.name}: {what}"]
    if status.reason:
        texts[0] += f" ({status.reason})"
    if status.step:
        texts.append(f"step {status.step:,}")
    if status.step and status.num_steps:
        texts[-1] += f" of {status.num_steps:,}"
    if status.steps_per_second:
        texts.append(f"{status.steps_per_second:.3g} steps/s")
    if status.world_size:
        texts.append(format_count(status.world_size, "rank"))
    texts.append(f"written {duration(max(0.0, time.time() - status.written_at))} ago")
    return ", ".join(texts)


def print_profile(arguments: Sequence[str]) -> str:
    """Let a run profile some steps, and return where the files are."""
    options = make_parser(
        "profile",
        "Trace some steps of a run that goes on. Nothing is lost, and nothing stays in its ranks.",
        (
            ("run", RUN, None),
            ("--rank", "rank to profile (default 0)", 0),
            ("--steps", f"optimizer steps, at most {MAX_STEPS} (default 5)", 5),
        ),
    ).parse_args(arguments)
    return "\n".join(ask(options.run, PROFILE, options.rank, options.steps))


def print_stacks(arguments: Sequence[str]) -> str:
    """Return where each rank of a run is."""
    options = make_parser(
        "stacks",
        "Show the stacks of all threads of a run's ranks, which may hang.",
        (("run", RUN, None),),
    ).parse_args(arguments)
    url = ask(options.run, STACKS)[0]
    directory, _, name = url.rpartition("/")
    return Storage(directory, "RUN", SHORT_TIMEOUT).read(name).decode(errors="replace") + url


def ask(place: str, action: str, rank: int = 0, num_steps: int = 1) -> list[str]:
    """Put a request into a run's store, wait for the answer, and return where its files are.

    Raises:
        ConfigError: the run does not go on, or another request waits there.
        StorageDenied: this user may not write there.
        NoAnswer: the run does not answer, or could not do it.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
    request = Request(action, name, rank, num_steps)
    storage, status = open_run(place)
    if status.has_ended or status.phase == WAITING or is_silent(status):
        raise ConfigError(f"RUN: expected a run that goes on, got {describe(status)}")
    storage.check_access()
    try:
        storage.replace(REQUEST, to_json(request), b"")
    except FileChanged:
        raise ConfigError(
            "RUN: expected no other request: wait for its end, or delete "
            f"{redact_url(storage.join(REQUEST))}"
        ) from None
    try:
        done = wait_for_answer(storage, name)
    finally:
        storage.delete(REQUEST)
    if done.problem:
        raise NoAnswer(f"{action}: {done.problem}")
    return [redact_url(storage.join(f"{done.folder}/{each}")) for each in done.files]


def wait_for_answer(storage: Storage, name: str) -> Request:
    """Return the request `name` with its answer. Raises NoAnswer if none comes."""
    deadline = time.monotonic() + ANSWER_LIMIT
    while time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
        request: Request | None = read_json(Request, storage.read_if_there(REQUEST))
        if request and request.id == name and request.is_done:
            return request
    raise NoAnswer(f"the run has not answered within {ANSWER_LIMIT:g} s")
