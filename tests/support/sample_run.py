"""The events of a made-up run with numbers as of a real one, for pages and figures. short_run.py
has exact ones.
"""

import dataclasses
import io
import math
import random
from typing import Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import (
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointWritten,
    EpochFinished,
    Event,
    LayerDescribed,
    Prediction,
    PredictionsMade,
    Reported,
    RunFinished,
    RunStarted,
)

STEPS_PER_EPOCH = 50


def started(epochs: int = 4, world_size: int = 2, **changes: Any) -> RunStarted:
    config = TrainingConfig(
        epochs=epochs, global_batch_size=128, learning_rate=2e-3, log_interval=5
    )
    event = RunStarted(
        name="mnist",
        world_size=world_size,
        data="MNIST, 60,000 training and 10,000 held-out images of 28x28",
        config=dataclasses.asdict(config),
        device="cpu",
        backend="gloo",
        num_threads=1,
        num_parameters=431_080,
        num_train_samples=60_000,
        num_test_samples=10_000,
        num_steps=epochs * STEPS_PER_EPOCH,
        layers=[
            LayerDescribed("conv1", "Conv2d", [1, 20, 24, 24], 520),
            LayerDescribed("pool", "MaxPool2d", [1, 20], 0),
        ],
        versions={"python": "3.11.2", "torch": "2.15.0"},
    )
    return dataclasses.replace(event, **changes)


def loaded(step: int = 0, **changes: Any) -> CheckpointLoaded:
    epochs = [epoch(number) for number in range(1, step // STEPS_PER_EPOCH + 1)]
    url = f"s3://bucket/run/step-{step:010d}.pt" if step else ""
    return dataclasses.replace(CheckpointLoaded(step, url, epochs), **changes)


def steps(first: int, last: int, every: int = 5) -> list[Reported]:
    noise = random.Random(first)
    return [
        Reported(
            step=step,
            epoch=step / STEPS_PER_EPOCH,
            values={
                "loss": (0.01 + 2.3 * math.exp(-step / 40)) * noise.lognormvariate(0, 0.3),
                "learning_rate": 2e-3 * abs(math.sin(step / 70)),
                "gradient_norm": noise.lognormvariate(0, 0.5),
                "samples_per_second": noise.gauss(8000, 300),
            },
        )
        for step in range(first, last + 1, every)
    ]


def epoch(number: int, world_size: int = 2) -> EpochFinished:
    return EpochFinished(
        epoch=number,
        step=number * STEPS_PER_EPOCH,
        train_loss=2.0 / number**2,
        test_loss=1.5 / number**2,
        learning_rate=2e-3 / number,
        seconds=7.5,
        samples_per_second=8000.0 + number,
        evaluation_seconds=0.6,
        rank_losses=[0.5] * world_size,
        metrics={"accuracy": 1 - 0.2 / number},
        rank_step_seconds=[0.006 + 0.0001 * rank for rank in range(world_size)],
    )


def training(epochs: int = 4, world_size: int = 2) -> list[Event]:
    """From the start to the last epoch's end, without what follows that."""
    events: list[Event] = [started(epochs, world_size), loaded()]
    for number in range(1, epochs + 1):
        events += steps(1 + (number - 1) * STEPS_PER_EPOCH, number * STEPS_PER_EPOCH)
        events.append(epoch(number, world_size))
        step = number * STEPS_PER_EPOCH
        url, best = f"s3://bucket/run/step-{step:010d}.pt", number != 3
        events += [
            CheckpointSaved(step, url, best, seconds=0.03),
            CheckpointWritten(step, url, best),
        ]
    return events


def predictions(number: int = 320, side: int = 28, every_wrong: int = 40) -> PredictionsMade:
    """Square noise, the worst there is to compress; each `every_wrong`-th guess is wrong."""
    from PIL import Image

    noise = random.Random(0)
    shown = []
    for index in range(number):
        file = io.BytesIO()
        Image.frombytes("L", (side, side), noise.randbytes(side * side)).save(file, "PNG")
        truth = index % 10
        guess = (truth + 1) % 10 if index % every_wrong == 7 else truth
        scores = {str(label): 0.91 if label == guess else 0.01 for label in range(10)}
        shown.append(Prediction(str(truth), str(guess), scores, file.getvalue()))
    return PredictionsMade(epoch=4, predictions=shown)


def finished(epochs: int = 4) -> RunFinished:
    return RunFinished(
        step=epochs * STEPS_PER_EPOCH,
        model_state_url="s3://bucket/run/model_state.pt",
        seconds=93.0,
        best_epoch=epochs,
        best={"test_loss": 1.5 / epochs**2},
        model_state_epoch=epochs,
        peak_memory_bytes=600 * 2**20,
        first_step_seconds=6.2,
        rank_num_parameters=[215_600, 215_480],
    )


def whole_run(epochs: int = 4, world_size: int = 2) -> list[Event]:
    return [*training(epochs, world_size), predictions(), finished(epochs)]
