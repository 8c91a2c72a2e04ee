"""Find out which workers of a Dask cluster a gang can use. Starts nothing."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
from collections.abc import Collection
from dataclasses import dataclass, field

from distributed import Client

from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.dask import worker
from flyte_ddp.launch.dask.calls import call_workers, listed_workers
from flyte_ddp.launch.dask.placement import Worker

SILENT_ANSWER_TIMEOUT = 0.5  # seconds for a worker that has been silent before to answer

logger = logging.getLogger(__name__)


@dataclass
class RollCall:
    """The workers that answer and run the same versions as this process. Sets of workers are of
    their addresses.
    """

    client: Client
    plugin: str  # the name of the run's plugin in the workers
    # raise for a worker with other versions; later, in mid-run, leave it out
    is_strict: bool = True
    known: set[str] = field(default_factory=set)  # were found to have our versions
    # were lost without a report; asked with less patience
    silent: set[str] = field(default_factory=set)
    # why a worker cannot take part, by its address
    unfit: dict[str, str] = field(default_factory=dict)

    def present_workers(self, leave_out: Collection[str] = ()) -> list[Worker]:
        """Return the workers that answer, stay and are not known to be unfit, but for the addresses
        in `leave_out`.

        Raises:
            ConfigError: one of them runs other versions than this process; only while this
                `is_strict`.
        """
        names = {
            address: name
            for address, name in listed_workers(self.client).items()
            if address not in leave_out
        }
        self._check_versions(names)
        asked = (self.known & set(names)) - self.unfit.keys()
        answers = call_workers(self.client, asked - self.silent, worker.introduce, self.plugin)
        answers |= call_workers(
            self.client,
            asked & self.silent,
            worker.introduce,
            self.plugin,
            timeout=SILENT_ANSWER_TIMEOUT,
        )
        present = {
            address: facts for address, facts in answers.items() if not isinstance(facts, Exception)
        }
        self.silent -= present.keys()
        present = {
            address: facts for address, facts in present.items() if not facts.pop("is_leaving")
        }
        hosts = [facts["host"] for facts in present.values()]
        return [
            Worker(address, names[address], shares_host=hosts.count(facts["host"]) > 1, **facts)
            for address, facts in present.items()
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
        for package, ours in own_versions().items():
            # Python's own functions: one of ours could not even be unpickled by another Python.
            if package == "python":
                answers = call_workers(self.client, new, platform.python_version)
            else:
                answers = call_workers(self.client, new, importlib.metadata.version, package)
            for address, theirs in answers.items():
                if isinstance(theirs, importlib.metadata.PackageNotFoundError):
                    theirs = "none"
                if isinstance(theirs, Exception):
                    new.discard(address)  # it does not answer, and is asked again
                elif _comparable(package, theirs) != _comparable(package, ours):
                    why = (
                        f"cluster: expected workers with {package} {ours}, as in this process and "
                        "its image, got "
                        f"{theirs} on worker {names[address]} at {address}"
                    )
                    if self.is_strict:
                        raise ConfigError(why)
                    new.discard(address)
                    self.mark_unfit(address, why)
        self.known |= new


def own_versions() -> dict[str, str]:
    """Return what must be the same here and in the workers, because pickles and collectives cross
    between them.
    """
    packages = ("torch", "distributed", "cloudpickle")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in packages
    }


def _comparable(package: str, version: str) -> str:
    if package == "python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]  # torch for CPUs and for GPUs is the same torch
