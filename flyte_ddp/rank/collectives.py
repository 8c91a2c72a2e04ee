"""The collectives that this rank has entered, and its waits in them. Imports no torch, because a
program may not use it.

torch's flight recorder is on by default, for gloo and NCCL. It counts the collectives of each
process group, so the rank with the smallest number is the one that the others wait for.
"""

from __future__ import annotations

import math
import pickle
import sys
import threading
import time
from typing import Any

from flyte_ddp.launch.protocol.messages import Collective, Group, RankBeat
from flyte_ddp.process.threads import start_thread

# The most collectives of a group that a report lists, of the collectives that have not ended. The
# oldest comes first: it is the collective that hangs.
MAX_PENDING = 4
BACKENDS = ("gloo", "nccl")
PLACES = ("torch.distributed", "torch.autograd")  # modules whose calls wait for other ranks
MAX_CPU_SECONDS = 0.001  # the CPU time of a waiting thread between two looks
NUM_LOOKS = 10  # looks within the timeout


def entered_collectives(only_pending: bool = False, has_failed: bool = False) -> list[Group]:
    """Return the collectives that this rank has entered, for each process group. Returns none if
    torch has no flight recorder.

    Args:
        only_pending: look at pending collectives alone, which costs less; the number `entered` then
            counts pending collectives.
        has_failed: the rank has lost a peer, so torch takes the pending collectives for ended ones.
            The latest collectives are listed in their place.
    """
    torch_c10d = sys.modules.get("torch.distributed.distributed_c10d")
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace", None)
    if torch_c10d is None or dump is None:
        return []
    try:
        entries = []
        for backend in BACKENDS:
            entries += _entries(dump, backend, only_pending)
        groups = {group.group_name: group for group in torch_c10d._world.pg_map}
        return [_describe(each, torch_c10d, entries, has_failed) for each in groups.values()]
    except Exception:  # torch's internals may change, and a report without them is better than none
        return []


def watch_main_thread(position: RankBeat, timeout: float) -> None:
    """Start a thread that keeps `position.waits_since`: the time since which the main thread waits
    for other ranks.

    This serves functions that report no progress. The main thread waits in two cases. First, the
    flight recorder shows a collective that has not ended, or a wait for a GPU. Second,
    torch.distributed or a backward pass has called the code that runs now, and the main thread has
    used no processor time since the last look. The time is taken from this process's monotonic
    clock, because the recorder's clock jumps when the machine's clock is set.

    Args:
        timeout: seconds of waiting that matter.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return
    main = threading.main_thread().ident
    assert main is not None
    clock = time.pthread_getcpuclockid(main)

    def watch() -> None:
        since, used, pending = 0.0, time.clock_gettime(clock), 0.0
        while True:
            time.sleep(timeout / NUM_LOOKS)
            before, used = used, time.clock_gettime(clock)
            earlier, pending = pending, _waiting_since()
            if pending:
                if pending != earlier:
                    since = time.monotonic()
            elif used - before > MAX_CPU_SECONDS or not _is_in_collective(main):
                since = 0.0
            else:
                since = since or time.monotonic() - timeout / NUM_LOOKS
            position.waits_since = since

    start_thread("waiting", watch)


def _waiting_since() -> float:
    """Return the time at which this rank began to wait in a collective, in seconds since the epoch;
    0 if it does not wait.
    """
    groups = entered_collectives(only_pending=True)
    return min((each.since for group in groups for each in group.pending), default=0.0)


def _is_in_collective(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame:
        if frame.f_globals.get("__name__", "").startswith(PLACES):
            return True
        frame = frame.f_back
    return False


def _entries(dump: Any, backend: str, only_pending: bool) -> list[dict[str, Any]]:
    # Stacks are left out: torch would look up their lines for seconds.
    contents = dump(True, False, only_pending, backend)
    return [each for each in pickle.loads(contents).get("entries", ()) if not each["is_p2p"]]


def _describe(
    group: Any, torch_c10d: Any, entries: list[dict[str, Any]], has_failed: bool
) -> Group:
    own = [each for each in entries if each["process_group"][0] == group.group_name]
    name = f"group {group.group_desc}"
    if group.group_desc == "default_pg":
        name = "the default group"
    ranks = tuple(sorted(torch_c10d._world.pg_group_ranks[group]))
    entered = max((each["collective_seq_id"] for each in own), default=0)
    pending = [each for each in own if not each["retired"]][:MAX_PENDING]
    if has_failed:
        pending = own[-MAX_PENDING:]
    return Group(name, ranks, entered, [_describe_entry(each) for each in pending])


def _describe_entry(entry: dict[str, Any]) -> Collective:
    name = entry["profiling_name"]
    operation = name.partition(":")[2].removeprefix("_") or name
    tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    inputs = ", ".join(f"{kind.lower()} {sizes}" for kind, sizes in tensors)
    what = operation
    if inputs and len(inputs) < 80:
        what = f"{operation} of {inputs}"
    since = entry["time_created_ns"] / 1e9
    num_elements = sum(map(math.prod, entry["input_sizes"]))
    return Collective(entry["collective_seq_id"], operation, what, since, num_elements)
