"""Find out which workers of a Dask cluster a gang can use. Starts nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from distributed import Client
from distributed.versions import get_versions

from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.nodes.dask import worker
from flyte_ddp.launch.nodes.dask.assignment import Worker
from flyte_ddp.launch.nodes.dask.calls import call_workers, listed_workers

logger = logging.getLogger(__name__)


@dataclass
class WorkerDiscovery:
    """The workers that answer and run the same versions as this process. A set of workers contains
    their addresses.
    """

    client: Client
    plugin: str = ""  # the name of the run's plugin in the workers
    # raise for a worker with other versions; in the middle of a run, leave it out instead
    is_strict: bool = True
    known: set[str] = field(default_factory=set)  # workers with our versions
    # why a worker cannot take part, by its address
    unfit: dict[str, str] = field(default_factory=dict)
    # the answer of each worker to `introduce`, by the identity of its process
    _facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    # slow workers, and names of the Kubernetes nodes that they are on
    slow: set[str] = field(default_factory=set)

    def present_workers(
        self, leave_out: Collection[str] = (), present: Collection[str] = ()
    ) -> list[Worker]:
        """Return the workers that answer, stay and are not known to be unfit, but for the addresses
        in `leave_out`. Those in `present` have just ended an attempt of the run, and are not asked
        again.

        Raises:
            ConfigError: one of them runs other versions than this process; only while this
                `is_strict`.
        """
        listed = listed_workers(self.client, self.plugin)
        names = {
            address: name for address, (name, *_) in listed.items() if address not in leave_out
        }
        self._check_versions(names)
        found, asked = {}, []
        for address in (self.known & set(names)) - self.unfit.keys():
            _, identity, is_busy = listed[address]
            if address in present and identity in self._facts:
                found[address] = self._facts[identity] | {"is_busy": is_busy}
            else:
                asked.append(address)
        answers = call_workers(self.client, asked, worker.introduce, self.plugin)
        for address, answer in answers.items():
            if not isinstance(answer, Exception) and not answer.pop("is_leaving"):
                found[address] = answer
                self._facts[listed[address][1]] = answer | {"has_plugin": True, "has_agent": True}
        num_on_host = Counter(each["host"] for each in found.values())
        return [
            Worker(
                address,
                names[address],
                shares_host=num_on_host[each["host"]] > 1,
                is_slow=not self.slow.isdisjoint((address, each["machine"])),
                **each,
            )
            for address, each in found.items()
        ]

    def mark_unfit(self, address: str, why: str) -> None:
        """Leave a worker out from now on, and log why."""
        if address not in self.unfit:
            self.unfit[address] = why
            logger.warning("the run continues without a worker: %s", why)

    def _check_versions(self, names: dict[str, str]) -> None:
        """Compare the versions of new workers among `names` with ours, before any of our code goes
        there.
        """
        new = set(names) - self.known - self.unfit.keys()
        if not new:
            return
        ours = own_versions()
        # Dask's own function: one of ours could not even be unpickled by another Python.
        for address, answer in call_workers(self.client, new, get_versions, ["torch"]).items():
            if isinstance(answer, Exception):
                continue  # a worker that does not answer is asked again
            theirs = _comparable(answer)
            differing = [package for package in ours if theirs[package] != ours[package]]
            if differing:
                why = (
                    f"cluster: expected workers with {differing[0]} {ours[differing[0]]}, as in "
                    f"this process and its image, got {theirs[differing[0]]} on worker "
                    f"{names[address]} at {address}"
                )
                if self.is_strict:
                    raise ConfigError(why)
                self.mark_unfit(address, why)
            else:
                self.known.add(address)


def own_versions() -> dict[str, str]:
    """Return the versions that must be the same here and in the workers, because pickles and
    collectives cross between them.
    """
    return _comparable(get_versions(["torch"]))


def _comparable(versions: dict[str, Any]) -> dict[str, str]:
    packages = versions["packages"]
    python = ".".join(packages["python"].split(".")[:2])
    # torch for CPUs and for GPUs is the same torch
    others = ("torch", "distributed", "cloudpickle")
    return {"python": python} | {name: str(packages[name]).partition("+")[0] for name in others}
