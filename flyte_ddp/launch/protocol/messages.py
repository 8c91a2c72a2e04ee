"""Every message between the processes of a run, and the memory that a rank shares with its agent.

A message is a pickled object of one of these classes. `PartSaved` is in checkpoints/memory.py,
because agents keep it. The receiver matches the class, and never parses a text. A new message is a
class here, a line in the table, and a `case` where it arrives.

| message     | sender        | receiver      | when                                               |
|-------------|---------------|---------------|----------------------------------------------------|
| `NodeJob`   | driver        | agent         | an attempt begins elsewhere, or may soon           |
| `Go`        | driver        | agent         | every 1 to 4 s until another command: it is there  |
| `Stop`      | driver, agent | agent, rank   | ranks have to save their state and end             |
| `Inspect`   | driver, agent | agent, rank   | where is each rank? Nothing moves, or a user asks  |
| `Profile`   | driver, agent | agent, rank   | a user asks for a profile of a rank's next steps   |
| `Check`     | driver        | agent         | a gang begins that has a node of unknown speed     |
| `Kill`      | driver        | agent         | ranks have to end at once                          |
| `Leaving`   | Dask worker   | driver        | its machine goes away                              |
| `Beat`      | agent         | driver        | every second, and when one of its `news` changes   |
| `Emitted`   | rank, agent   | agent, driver | something happened that observers show             |
| `Lines`     | agent         | driver        | ranks have printed them                            |
| `Failed`    | agent         | driver        | a rank failed, or the agent cannot run its ranks   |
| `Inspected` | agent         | driver        | answers `Inspect`                                  |
| `Profiled`  | rank, agent   | agent, driver | answers `Profile`, once its files are in the store |
| `Checked`   | agent         | driver        | answers `Check`                                    |
| `End`       | agent         | driver        | last: all processes of its ranks are gone          |
| `Prepared`  | agent         | rank          | the data are there                                 |
| `Entered`   | rank          | agent         | answers `Inspect`, once its stacks are written     |
| `Device`    | rank          | agent         | it has chosen its GPU                              |
| `PartSaved` | rank          | agent         | its part of a state is in the memory of the node   |
| `Resumed`   | rank          | agent         | older states in the memory of the node may go      |
| `Returned`  | rank          | agent         | its program has ended                              |
| `Submitted` | rank, agent   | agent, driver | a file for the caller of the run is on its node    |
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.checkpoints.memory import PartSaved as PartSaved
from flyte_ddp.errors import NodeLost, RankFailure
from flyte_ddp.events import Event
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.protocol.ranks import NodeRanks

# seconds for the kernel to end killed processes, and for their new parent to reap them
DEATH_GRACE = 2.0
# Seconds for an agent to notice that it has to end its ranks, and to do it. A killed process that
# uses GPUs takes seconds to give their memory back. An agent that gives up earlier loses the state
# in its own memory.
KILL_GRACE = DEATH_GRACE + 13.0
# phases of a rank's own time in a step; the last is the whole step of a function
PHASES = ("data", "forward", "backward", "step")


class Outcome(enum.Enum):
    """How the program of a rank ended, or the ranks of a node."""

    DONE = "done"
    STOPPED = "stopped"  # ended as requested
    FAILED = "failed"
    KILLED = "killed"  # killed by the agent


class RankBeat(ctypes.Structure):
    """The position of a rank, in memory that it shares with its agent.

    There is no lock: the rank writes it, and after its death the agent. The clock is the monotonic
    one, which is the same for all processes of a machine.
    """

    progress_at: float
    step: int
    has_ended: bool
    waits_since: float
    num_steps: int
    seconds: Any
    is_stoppable: bool
    is_writing: bool
    _fields_ = (
        ("progress_at", ctypes.c_double),  # time of the last progress; 0: none was reported
        ("step", ctypes.c_longlong),  # optimizer steps since the start of the run
        ("has_ended", ctypes.c_bool),  # whether its function has ended
        ("waits_since", ctypes.c_double),  # start of a wait for other ranks; 0: no wait
        ("num_steps", ctypes.c_longlong),  # steps in this attempt
        (
            "seconds",
            ctypes.c_double * len(PHASES),
        ),  # time of the rank itself in these steps, by phase
        ("is_stoppable", ctypes.c_bool),  # rank 0: all ranks save their state when asked to stop
        ("is_writing", ctypes.c_bool),  # rank 0: a checkpoint is being written
    )


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has entered, and that has not ended."""

    number: int  # position among the collectives of its group
    operation: str
    what: str  # description for people
    since: float  # start of the wait, in seconds since the epoch
    num_elements: int = 0  # elements of the rank's own tensors


@dataclass(frozen=True)
class Group:
    """A process group, and how many of its collectives a rank has entered."""

    name: str
    ranks: tuple[int, ...]
    entered: int  # number of collectives
    pending: list[Collective] = field(default_factory=list)  # the oldest unfinished ones


@dataclass(frozen=True)
class NodeJob:
    """Everything that an agent needs to start its ranks."""

    job: Job
    ranks: NodeRanks  # the agent chooses its interface
    # seconds without a command from the driver after which the ranks are killed
    driver_timeout: float
    # variables for the agent and its ranks, in addition to the worker's own
    environment: dict[str, str]
    # the driver's storage environment; it contains secrets and must not be logged
    storage: dict[str, str] = field(repr=False)
    data: str  # directory of the prepared data if this machine has it; otherwise ""
    data_archive: str  # URL of a zip of the prepared data; "" for a program that needs no data
    prints_lines: bool  # print the ranks' output into the worker's own log as well
    # seconds for which the next attempt may wait for nodes; the agent keeps its memory meanwhile
    start_timeout: float = 0.0
    is_ahead: bool = False  # the job only imports and fetches what its ranks will need


@dataclass(frozen=True)
class Go:
    """The driver is there."""


@dataclass(frozen=True)
class Stop:
    """Save the state and end."""

    reason: str  # the name of a signal, or a text
    seconds: float  # seconds until the ranks are killed


@dataclass(frozen=True)
class Inspect:
    """Tell where the ranks are."""

    number: int = 0  # number of the question: commands are repeated


@dataclass(frozen=True)
class Profile:
    """Profile the next steps of a rank, and go on."""

    id: str  # identifies the request
    rank: int
    num_steps: int
    place: str  # URL of the directory for its files


@dataclass(frozen=True)
class Check:
    """Measure the machine, and how fast the bytes of its neighbours arrive."""

    number: int  # number of the question
    is_machine: bool  # measure cores, memory and disk
    # where each node serves bytes, in the order of the nodes; empty: fetch none
    addresses: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Kill:
    """End at once."""


@dataclass(frozen=True)
class Leaving:
    """The machine goes away."""

    seconds: float  # seconds until then


@dataclass(frozen=True)
class Pace:
    """The steps of a rank, the seconds of each phase of them, and where it runs."""

    rank: int
    num_steps: int
    seconds: list[float]
    device: str = ""  # name of the rank's GPU, for people
    node: str = ""  # name of the node, for people; the driver sets it


@dataclass(frozen=True)
class Beat:
    """The state of a node's ranks."""

    step: int = 0  # latest step of any rank
    is_writing: bool = False  # rank 0 writes a checkpoint
    is_stoppable: bool = False  # they save their state when they are asked to stop
    is_ending: bool = False  # a rank that failed calls its exit handlers
    has_reported: bool = False  # any rank has reported progress since its start
    # seconds since their last progress; 0 if they have reported none, or wait for data
    silent_for: float = 0.0
    paces: list[Pace] = field(default_factory=list)
    # seconds of waiting of each rank that waits for other ranks
    waits: list[float] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # ranks whose function has ended

    @property
    def news(self) -> tuple[Any, ...]:
        """The fields that the driver must know at once."""
        return self.is_writing, self.is_stoppable, self.is_ending, self.ended


@dataclass(frozen=True)
class Emitted:
    """An event of the run."""

    event: Event


@dataclass(frozen=True)
class Lines:
    """Lines that ranks have printed."""

    lines: list[str]


@dataclass(frozen=True)
class Failed:
    """A failure of a rank or of the node. The driver decides which of several is the cause."""

    failure: RankFailure | NodeLost


@dataclass
class InspectedRank:
    """A rank, and where its threads are."""

    number: int
    step: int
    silent_for: float | None  # seconds since its last progress; None if it has reported none
    stack: list[str] = field(default_factory=list)  # lines of its main thread
    groups: list[Group] | None = None  # None if it did not answer
    stacks: str = ""  # stacks of all threads
    node: str = ""  # name of the node, for people; the driver sets it

    @property
    def pending(self) -> list[Collective]:
        """The collectives in which the rank waits."""
        return [each for group in self.groups or () for each in group.pending]


@dataclass(frozen=True)
class Inspected:
    """The ranks of a node."""

    number: int  # number of the question
    ranks: list[InspectedRank]


@dataclass(frozen=True)
class Profiled:
    """The profile of a rank."""

    id: str = ""  # identifies the request
    files: list[str] = field(default_factory=list)  # names in its place
    problem: str = ""  # why there are fewer files than asked for; one line


@dataclass(frozen=True)
class Checked:
    """The speed of a node."""

    number: int  # number of the question
    rates: dict[str, float]  # operations or bytes per second, by the name of the probe
    links: dict[int, float]  # bytes per second from other nodes, by their index
    problems: list[str]  # a line for each probe that failed
    address: tuple[str, int]  # where this node serves bytes
    model: str  # model of its CPU
    # shares of the bytes from other nodes that were lost and sent again, by the nodes' index
    losses: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """The ranks are gone."""

    outcome: Outcome
    how: str = ""  # details of the end, for people
    # parts of states in the memory of the node, in the form of `NodeMemory.held`
    parts: list[tuple[int, int, int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """The data are there."""

    directory: str


@dataclass(frozen=True)
class Entered:
    """The collectives that the rank has entered."""

    groups: list[Group]


@dataclass(frozen=True)
class Device:
    """The device that the rank computes on."""

    name: str


@dataclass(frozen=True)
class Resumed:
    """The ranks go on from this state, or from none in memory."""

    attempt: int
    turn: int


@dataclass(frozen=True)
class Submitted:
    """A file for the caller of the run, which the driver takes away from the node."""

    file: str  # name in the node's directory for such files
    path: str  # path under which the caller gets the file


@dataclass(frozen=True)
class RaisedError:
    """The exception that ended a rank."""

    name: str  # name of the exception's class
    message: str
    trace: str  # traceback; "" where the message is enough
    is_consequence: bool  # the rank lost a peer
    # the latest collectives of a rank that lost a peer, in the place of the pending ones
    groups: list[Group] = field(default_factory=list)


@dataclass(frozen=True)
class Returned:
    """The program of the rank has ended."""

    outcome: Outcome
    error: RaisedError | None = None
