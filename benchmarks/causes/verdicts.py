"""Read the verdict of the product about a fault from its events, log, lines and error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

CAUSES = {
    "killed": "was killed by SIGKILL(?!: its container)",
    "out of memory": "(?<!the machine )ran out of memory|OOMKilled",
    "slow cores": r"is slow: \S+ usable cores",
    "slow memory": "is slow: memory",
    "slow disk": "is slow: disk",
    "slow network": "is slow: network",
    "slow rank": "is slow in ",
    "full disk": "disk of .* is full|No space left",
    "store away": r"Slow ?Down|Service ?Unavailable|InternalError|(?<![\d.])503\b",
    "credentials": "ExpiredToken",
    "host name": "name resolution|Name or service not known|getaddrinfo",
    "stall": "no rank made progress(?!.*(now they go on|in different collectives))",
    "wrong collective": "All ranks have to enter the same collectives|in different collectives",
    "bad loss": "the loss is nan|is not finite|found bad",
    "wrong gradient": "computes a wrong gradient",
    "damaged shard": r"\.jsonl.*(damaged|cannot be|expected|not valid|JSON)",
    "node lost": "(?<!the gang )was lost",
}


@dataclass
class Verdict:
    """The causes and nodes that the product has named, and its action."""

    causes: list[str]
    nodes: list[int]
    action: str
    statements: list[str]


def read(said: list[dict[str, Any]]) -> Verdict:
    """Return the verdict of the product about a run."""
    statements = []
    for each in said:
        if each.get("event") == "AttemptEnded" and each["reason"]:
            statements.append(each["reason"])
        elif each.get("event") == "NodesFoundSlow":
            statements += each["names"]
        elif each.get("event") == "StepFoundBad":
            statements.append(f"{each['text']} (found bad)")
        elif "log" in each or "line" in each:
            statements.append(each.get("log", each.get("line")))
        elif "ended" in each and each["ended"][0]:
            statements.append(": ".join(each["ended"]))
    causes: dict[str, None] = {}
    nodes: dict[int, None] = {}
    for text in statements:
        found = [name for name, pattern in CAUSES.items() if re.search(pattern, text)]
        causes |= dict.fromkeys(found)
        if found:
            first = text.partition("\n")[0]
            named = re.findall(r"node-(\d)|\[node (\d)\]", first)
            nodes |= {int(a or b): None for a, b in named}
    return Verdict([*causes], [*nodes], find_action(said), statements)


def find_action(said: list[dict[str, Any]]) -> str:
    """Return what the product has done about a fault."""
    sizes = [each["num_nodes"] for each in said if each.get("event") == "AttemptStarted"]
    if any(each.get("ended", [""])[0] for each in said):
        return "stop"
    has_left = any("goes on without" in each.get("log", "") for each in said)
    if len(sizes) > 1 and (min(sizes[1:]) < sizes[0] or has_left):
        return "leave the node out"
    if len(sizes) > 1:
        return "restart"
    if any(each.get("event") == "StepFoundBad" for each in said):
        return "skip"
    return "go on"
