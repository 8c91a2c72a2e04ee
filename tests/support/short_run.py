"""The events of a made-up run of three epochs with four steps each, with numbers that tests can
name.
"""

from __future__ import annotations

import io
import weakref
from dataclasses import replace
from typing import Any

from flyte_ddp.events import (
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointWritten,
    EpochFinished,
    Event,
    Histogram,
    HistogramsTaken,
    LayerDescribed,
    Listener,
    Prediction,
    PredictionsMade,
    Reported,
    RunFinished,
    RunStarted,
    RunState,
)
from flyte_ddp.launch.control.driver import takes_state

STEPS_PER_EPOCH = 4


def started(**changes: Any) -> RunStarted:
    event = RunStarted(
        name="digits",
        world_size=2,
        data="scikit-learn's digits (1,797 images)",
        config={"epochs": 3, "learning_rate": 0.1},
        device="cpu",
        backend="gloo",
        num_threads=1,
        num_parameters=431080,
        num_train_samples=1437,
        num_test_samples=360,
        num_steps=3 * STEPS_PER_EPOCH,
        layers=[
            LayerDescribed("conv", "Conv2d", [1, 20, 8, 8], 520),
            LayerDescribed("fc", "Linear", [1, 10], 650),
        ],
        versions={"torch": "2.15.0"},
    )
    return replace(event, **changes)


def loaded(step: int = 0, **changes: Any) -> CheckpointLoaded:
    epochs = [epoch_finished(epoch) for epoch in range(1, step // STEPS_PER_EPOCH + 1)]
    return replace(CheckpointLoaded(step, f"/c/step-{step}.pt" if step else "", epochs), **changes)


def reported(step: int) -> Reported:
    values = {
        "loss": 1 / step,
        "learning_rate": 0.1,
        "gradient_norm": 2.5,
        "samples_per_second": 1234.5,
    }
    return Reported(step, step / STEPS_PER_EPOCH, values)


def epoch_finished(epoch: int) -> EpochFinished:
    return EpochFinished(
        epoch=epoch,
        step=epoch * STEPS_PER_EPOCH,
        train_loss=1 / epoch,
        test_loss=2 / epoch,
        learning_rate=0.1,
        seconds=1.5,
        samples_per_second=1000.0,
        evaluation_seconds=0.5,
        rank_losses=[0.1, 0.2],
        rank_step_seconds=[0.01, 0.02],
        metrics={"accuracy": 1 - 0.1 / epoch},
    )


def epoch_of_events(epoch: int) -> list[Event]:
    last = epoch * STEPS_PER_EPOCH
    histogram = Histogram([3, 1], [-1.0, 0.0, 1.0])
    return [
        *(reported(step) for step in range(last - STEPS_PER_EPOCH + 1, last + 1)),
        epoch_finished(epoch),
        HistogramsTaken(
            last, {"parameters/fc.weight": histogram, "gradients/fc.weight": histogram}
        ),
        CheckpointSaved(last, f"/checkpoints/{last}.pt", True, 0.1),
        CheckpointWritten(last, f"/checkpoints/{last}.pt", True),
    ]


def predictions_made() -> PredictionsMade:
    from PIL import Image

    png = io.BytesIO()
    Image.new("L", (8, 8), 200).save(png, "PNG")
    prediction = Prediction(
        truth="3", guess="8", scores={"3": 0.25, "8": 0.75}, image=png.getvalue()
    )
    return PredictionsMade(3, [prediction, replace(prediction, guess="3")])


def run_finished(model_state_url: str = "/state/model.pt") -> RunFinished:
    return RunFinished(12, 4.5, b"", model_state_url, 3, {"test_loss": 0.6667}, 3, 10**8, 2.5)


def with_model() -> list[Event]:
    """A whole run that ends with a model to be stored."""
    config = {"epochs": 3, "learning_rate": 0.1, "model_artifact": "model-digits"}
    return [started(config=config), *whole_run()[1:]]


def whole_run() -> list[Event]:
    return [
        started(),
        loaded(),
        *epoch_of_events(1),
        *epoch_of_events(2),
        *epoch_of_events(3),
        predictions_made(),
    ]


def replay(listener: Listener, events: list[Event], error: BaseException | None = None) -> None:
    feed(listener, *events)
    listener.close(error)


_states = weakref.WeakKeyDictionary[Listener, RunState]()


def feed(listener: Listener, *events: Event) -> None:
    """Pass the next events to a listener, each with the state that the run has then."""
    state = _states.setdefault(listener, RunState())
    for event in events:
        state.handle(event)
        if takes_state(listener):
            listener.handle(event, state)
        else:
            listener.handle(event)
