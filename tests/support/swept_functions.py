"""Functions that tests sweep over. Imports little: each rank does too."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from flyte_ddp import session


def train(experiment):
    """Train as a script does that knows nothing of this library."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    batch_size, learning_rate = experiment
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    classes = torch.arange(256) % 10
    images = torch.rand(256, 1, 28, 28) + torch.eye(28)[classes][:, None, None]
    data = DataLoader(TensorDataset(images, classes), batch_size, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    rows = []
    for epoch in range(3):
        loss_sum = num_correct = 0
        for inputs, targets in data:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(targets)
            num_correct += (outputs.argmax(dim=1) == targets).sum().item()
        accuracy = num_correct / 256
        rows.append(
            {"experiment": experiment, "epoch": epoch, "loss": loss_sum / 256, "accuracy": accuracy}
        )
    return rows


def misbehave(kind, directory, num_reports=3):
    """Report a loss, lower for other kinds than "bad", which ends when it is asked to."""
    Path(directory, f"{kind}-{os.getpid()}").touch()
    if kind == "raise":
        raise ValueError("broken on purpose")
    if kind == "silent":
        return {"accuracy": 1.0}
    step = 0
    while step < (600 if kind == "bad" else num_reports) and not session.stop_requested:
        step += 1
        time.sleep(0.05)
        session.report(step=step, loss=100.0 if kind == "bad" else 1 / step)
    return None


def count_ranks(factor, shift=0):
    return factor * int(os.environ["WORLD_SIZE"]) + shift


def count_to_four(driver):
    """Report steps from the saved one on. The first call stops the sweep after step 2."""
    state = session.load()
    for step in range(state["step"] + 1 if state else 1, 5):
        session.report(step=step, loss=step)
        session.save({"step": step}, step)
        if not state and step == 2:
            os.kill(driver, signal.SIGINT)
            while not session.stop_requested:
                time.sleep(0.01)
            return


def leave(x):
    """End the process in one of the trials, as a library of the user's may."""
    if x == 2:
        os._exit(0)
    return x


def find_torch(x):
    """Return whether torch was there before the trial, and its number of threads."""
    had_torch = "torch" in sys.modules
    import torch

    return {"loss": float(not had_torch), "threads": torch.get_num_threads(), "x": x}


def describe(x):
    """Return a number, a whole one, a text and a list."""
    return {
        "loss": 0.5 * x,
        "count": x,
        "device": "cpu",
        "sizes": [1, 2],
        "mixed": x if x > 1 else "-",
    }


def add_up(values):
    """Return the sum of an array; NaN without values."""
    return float(sum(values)) if len(values) else float("nan")


def report_apart(lr):
    """Report the loss of each step, and another figure alone, which is best in the middle."""
    if lr > 1:
        raise ValueError(f"diverges with {lr}")
    for epoch in range(3):
        session.report(train_loss=1 / (epoch + 1))
        session.report(test_loss=lr + abs(epoch - 1))
        session.save({"epoch": epoch}, epoch + 1)


def meet(number, directory):
    """Return after the other one of two trials has begun as well."""
    Path(directory, str(number)).touch()
    deadline = time.monotonic() + 60
    while not Path(directory, str(3 - number)).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the other trial has not begun")
        time.sleep(0.05)
    return float(number)
