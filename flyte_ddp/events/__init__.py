"""The events of a run, the state folded from them, and their form as JSON lines. Imports no torch.

Rank 0 emits events, its supervisor forwards them, and everything a person sees is made from them in
the parent process: kinds.py has the vocabulary, state.py what a run has come to, history.py the
codec.
"""

from __future__ import annotations

from flyte_ddp.events.history import NOT_IN_HISTORY as NOT_IN_HISTORY
from flyte_ddp.events.history import from_dict as from_dict
from flyte_ddp.events.history import len_of_whole_lines as len_of_whole_lines
from flyte_ddp.events.history import parse_history as parse_history
from flyte_ddp.events.history import plain as plain
from flyte_ddp.events.history import read_history as read_history
from flyte_ddp.events.history import to_dict as to_dict
from flyte_ddp.events.history import to_line as to_line
from flyte_ddp.events.kinds import AttemptEnded as AttemptEnded
from flyte_ddp.events.kinds import AttemptStarted as AttemptStarted
from flyte_ddp.events.kinds import CheckpointLoaded as CheckpointLoaded
from flyte_ddp.events.kinds import CheckpointSaved as CheckpointSaved
from flyte_ddp.events.kinds import CheckpointWritten as CheckpointWritten
from flyte_ddp.events.kinds import EpochFinished as EpochFinished
from flyte_ddp.events.kinds import Event as Event
from flyte_ddp.events.kinds import Figures as Figures
from flyte_ddp.events.kinds import Histogram as Histogram
from flyte_ddp.events.kinds import HistogramsTaken as HistogramsTaken
from flyte_ddp.events.kinds import LayerDescribed as LayerDescribed
from flyte_ddp.events.kinds import Listener as Listener
from flyte_ddp.events.kinds import Prediction as Prediction
from flyte_ddp.events.kinds import PredictionsMade as PredictionsMade
from flyte_ddp.events.kinds import Reported as Reported
from flyte_ddp.events.kinds import RunFinished as RunFinished
from flyte_ddp.events.kinds import RunStarted as RunStarted
from flyte_ddp.events.kinds import Straggler as Straggler
from flyte_ddp.events.kinds import StragglersFound as StragglersFound
from flyte_ddp.events.kinds import to_utf8 as to_utf8
from flyte_ddp.events.state import RunState as RunState
from flyte_ddp.events.state import find_best as find_best
from flyte_ddp.events.wall_time import TimeSpent as TimeSpent
