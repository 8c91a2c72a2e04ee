"""Every exception that crosses a room: who reports one need not import the room that raises it."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """What the user gave cannot be run. The message names the field, the value and what would be accepted."""


class DataError(ValueError):
    """The data given cannot be used. The message names the file or URL, what is wrong and what would be accepted."""


class StorageDenied(ConfigError):
    """The store refuses: no credentials, wrong ones, no permission, or no such bucket. A retry would not help."""


class StorageUnavailable(RuntimeError):
    """The store cannot be reached for now. The same work may succeed later."""


class FileChanged(RuntimeError):
    """A file was replaced by another process since it was read. Nothing was written."""


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite: nothing that follows could be of use."""


class StopRequested(Exception):
    """The supervisor wanted the run to end early. What was done so far is in a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged."""


class RankFailure(RuntimeError):
    """A rank ended the run: with an exception, by a signal, or because nothing moved any more.

    Attributes:
        rank: of the whole gang; -1 where no single one is to blame (a stall).
        kind: exception, signal, exit or stall.
        cause: the exception's class name and message, or the signal's name: equal for the same bug in two attempts.
        is_consequence: it is what a rank says whose peer has died, so another failure is to blame.
    """

    def __init__(self, message: str, rank: int, kind: str, cause: str, is_consequence: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.cause = cause
        self.is_consequence = is_consequence

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.kind, self.cause, self.is_consequence)


class TrainingStopped(RuntimeError):
    """The run was asked to end early, by a signal for example, and did. Its last checkpoint has what was done."""


class NodeLost(RuntimeError):
    """A node died, fell silent or could not run its ranks: what another attempt may well survive.

    Attributes:
        worker: the name of its worker; "" for one that nothing more can be heard of, not even its pod's log.
    """

    def __init__(self, message: str, worker: str) -> None:
        super().__init__(message)
        self.worker = worker

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.worker)


class GangLost(RuntimeError):
    """The gang was lost for good: its restarts are used up, or the nodes it needs did not come back.

    Its checkpoints have what was done; the same run on another cluster goes on from them.
    """


class WorkersLost(GangLost):
    """The nodes that the gang needs did not come back."""


class ClusterError(RuntimeError):
    """The cluster did not come up, or could not be reached. The message says what it was waiting for."""


class PreflightError(ConfigError):
    """All that was found, one finding per line."""

    def __init__(self, findings: list[str]) -> None:
        self.findings = findings
        super().__init__("the Dask cluster cannot be started:\n" + "\n".join(f"- {finding}" for finding in findings))


class SweepFailed(RuntimeError):
    """Not one model could be trained to its end. The message has the error of each.

    Attributes:
        may_succeed: whether workers were lost, so that the same sweep may end better another time.
    """

    def __init__(self, message: str, may_succeed: bool) -> None:
        super().__init__(message)
        self.may_succeed = may_succeed

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.may_succeed)


class ChampionError(RuntimeError):
    """The champion cannot be read. The message names what is wrong and where."""


class NoChampion(ChampionError):
    """None has been promoted yet."""


class MissingChampion(ChampionError):
    """Files of the version in use are gone."""


class CorruptChampion(ChampionError):
    """A file of the version in use is not what was written."""


class ChampionChanged(RuntimeError):
    """Another version was put in use meanwhile, by another promotion or a rollback. Nothing was done."""
