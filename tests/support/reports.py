"""Reports of made-up runs, also of one whose every text is an attack on its page."""

import dataclasses

from flyte_ddp.errors import RankFailure
from flyte_ddp.events import (
    CheckpointWritten,
    Event,
    LayerDescribed,
    Prediction,
    PredictionsMade,
)
from flyte_ddp.observers.reports.run import Report
from tests.support import sample_run
from tests.support.short_run import feed

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='alert(3)"


def report_of(
    events: list[Event], error: BaseException | None = None, closed: bool = True
) -> Report:
    made = Report()
    made.links["W&B run"] = "https://wandb.ai/team/project/runs/1"
    for event in events:
        feed(made, event)
    if closed:
        made.close(error)
    return made


def rank_failure() -> RankFailure:
    text = "rank 1 failed: ValueError: bad\n\n" + "".join(
        f"  File {'x' * 300}.py, line {line}\n" for line in range(50)
    )
    return RankFailure(text, 1, "exception", "ValueError: bad")


def hostile_run() -> list[Event]:
    return [
        sample_run.started(
            name=HOSTILE,
            data=HOSTILE,
            device=HOSTILE,
            backend=HOSTILE,
            layers=[LayerDescribed(HOSTILE, HOSTILE, [1, 2], 3)],
            versions={HOSTILE: HOSTILE},
        ),
        sample_run.loaded(1, url=HOSTILE, skipped=[HOSTILE]),
        *sample_run.steps(2, 50),
        dataclasses.replace(sample_run.epoch(1), sample=HOSTILE, metrics={HOSTILE: 1.0}),
        CheckpointWritten(50, HOSTILE, True),
        PredictionsMade(
            1,
            [
                Prediction(HOSTILE, "b", {HOSTILE: 1.0}, text=HOSTILE),
                Prediction("a", HOSTILE, {}, b"\x89PNG"),
            ],
        ),
        dataclasses.replace(sample_run.finished(), model_state_url=HOSTILE),
    ]
