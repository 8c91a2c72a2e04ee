"""The events of a run, the state folded from them, and their form as JSON lines. Imports no torch.

Rank 0 emits events, its agent forwards them, and everything a person sees is made from them in
the parent process: kinds.py has the vocabulary, state.py what a run has come to, history.py the
codec.
"""

from __future__ import annotations

from flyte_ddp.events.history import (
    NOT_IN_HISTORY,
    len_of_whole_lines,
    parse_history,
    plain,
    read_history,
    to_line,
)
from flyte_ddp.events.kinds import (
    LOSSES,
    AttemptEnded,
    AttemptStarted,
    BadSample,
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointWritten,
    EpochFinished,
    Event,
    Figures,
    Histogram,
    HistogramsTaken,
    LayerDescribed,
    Listener,
    NodeMeasured,
    NodesAwaited,
    NodesFoundSlow,
    PartStarted,
    PictureShown,
    Prediction,
    PredictionsMade,
    RankReported,
    Reported,
    RunFinished,
    RunStarted,
    SlowNode,
    StepFoundBad,
    Straggler,
    StragglersFound,
    to_utf8,
)
from flyte_ddp.events.state import (
    RunState,
    find_best,
    list_accuracies,
    list_metrics,
)
from flyte_ddp.events.wall_time import (
    TimeSpent,
    split_steps,
)

__all__ = [
    "LOSSES",
    "NOT_IN_HISTORY",
    "AttemptEnded",
    "AttemptStarted",
    "BadSample",
    "CheckpointLoaded",
    "CheckpointSaved",
    "CheckpointWritten",
    "EpochFinished",
    "Event",
    "Figures",
    "Histogram",
    "HistogramsTaken",
    "LayerDescribed",
    "Listener",
    "NodeMeasured",
    "NodesAwaited",
    "NodesFoundSlow",
    "PartStarted",
    "PictureShown",
    "Prediction",
    "PredictionsMade",
    "RankReported",
    "Reported",
    "RunFinished",
    "RunStarted",
    "RunState",
    "SlowNode",
    "StepFoundBad",
    "Straggler",
    "StragglersFound",
    "TimeSpent",
    "find_best",
    "len_of_whole_lines",
    "list_accuracies",
    "list_metrics",
    "parse_history",
    "plain",
    "read_history",
    "split_steps",
    "to_line",
    "to_utf8",
]
