"""The cost of keeping states, and what a loss costs: `python -m benchmarks.states`, on a GPU where
there is one.

A multilayer perceptron with AdamW trains in a plain loop of PyTorch, and as a recipe: without any
state, with states in memory at the automatic interval, with a checkpoint every 50 steps, and with
states in memory and a rank that is killed once. On a GPU it has 298 million parameters, a state of
3.6 GB, and trains in bf16; on CPUs 101 million, 1.2 GB, and fp32.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import machine
from benchmarks.mnist_like import MnistLike
from flyte_ddp.events import CheckpointLoaded, CheckpointSaved, Event, Reported
from flyte_ddp.launch.agent.devices import num_cores

if TYPE_CHECKING:
    from torch import nn

# width, batch size, precision, steps: the first half is not measured, in which memory is allocated
# and the interval found
ON_GPU, ON_CPU = (10_000, 8192, "bf16", 600), (5830, 128, "fp32", 200)
KILLED_STEP = 120
CHECKPOINT_INTERVAL = 50
PROGRAMS: dict[str, dict[str, Any]] = {
    "without states": {"memory_interval": 0},
    "states in memory": {},
    "a checkpoint every 50 steps": {
        "memory_interval": 0,
        "checkpoint_interval": CHECKPOINT_INTERVAL,
    },
    "states in memory, killed at step 120": {"killed": True},
}


@dataclass
class Wide(MnistLike):
    """A model that is large for its speed."""

    width: int = ON_CPU[0]
    killed: str = ""  # a file that is made when the rank is killed; "": it never is

    def model(self) -> nn.Module:
        from torch import nn
        from torch.optim.optimizer import register_optimizer_step_post_hook

        sizes = (784, *3 * [self.width], 9 * self.width // 10, 10)
        layers: list[nn.Module] = [nn.Flatten()]
        for size, next_size in itertools.pairwise(sizes):
            layers += [nn.Linear(size, next_size), nn.ReLU()]
        steps = itertools.count(1)

        def die(*_: Any) -> None:
            if next(steps) == KILLED_STEP:
                Path(self.killed).write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        if self.killed and not Path(self.killed).exists():
            register_optimizer_step_post_hook(die)
        return nn.Sequential(*layers[:-1])


@dataclass
class Seen:
    """A listener that keeps what a run tells of its steps and states."""

    batch_size: int
    step_seconds: list[float] = field(default_factory=list)
    ends: list[tuple[int, float]] = field(default_factory=list)  # of steps, seconds of the epoch
    stalls: list[float] = field(default_factory=list)  # seconds
    resumed_step: int = 0

    def handle(self, event: Event) -> None:
        if isinstance(event, Reported):
            self.step_seconds.append(self.batch_size / event.values["samples_per_second"])
            self.ends.append((event.step, event.at))
        elif isinstance(event, CheckpointSaved):
            self.stalls.append(event.seconds)
        elif isinstance(event, CheckpointLoaded):
            self.resumed_step = event.step

    def close(self, error: BaseException | None) -> None:
        pass


def train_plainly() -> None:
    """Print the mean seconds of a step of a plain loop."""
    import torch
    from torch import nn

    on_gpu = torch.cuda.is_available()
    width, batch_size, _, num_steps = ON_GPU if on_gpu else ON_CPU
    device = "cuda" if on_gpu else "cpu"
    model = Wide(width=width).model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images = torch.randint(0, 256, (batch_size * 2, 1, 28, 28), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (batch_size * 2,), device=device)
    seconds = []
    for _ in range(num_steps // 2):
        started = time.perf_counter()
        drawn = torch.randint(0, len(labels), (batch_size,), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            outputs = model(images[drawn].float() / 255)
            loss = nn.functional.cross_entropy(outputs, labels[drawn])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as often as the recipe reports it
        seconds.append(time.perf_counter() - started)
    print(json.dumps(statistics.fmean(seconds[num_steps // 4 :])))


def train(on_gpu: bool, directory: Path, killed: bool = False, **config: Any) -> Seen:
    """Train the recipe with one rank."""
    from flyte_ddp.config import resolve
    from flyte_ddp.launch.control import driver
    from flyte_ddp.launch.nodes.local import LocalPlace
    from flyte_ddp.launch.protocol.programs import Job, recipe_program
    from flyte_ddp.recipes.prepare import prepare_data

    width, batch_size, precision, num_steps = ON_GPU if on_gpu else ON_CPU
    options = {"width": width, "killed": str(directory / "killed") if killed else ""}
    values = {
        "global_batch_size": batch_size,
        "precision": precision,
        "epochs": 1,
        "log_interval": 1,
        "recipe_options": options,
        **config,
    }
    program = recipe_program("benchmarks.states.Wide", resolve(Wide.defaults, values))
    data, seen = directory / "data", Seen(batch_size)
    data.mkdir()
    prepare_data(Wide(), str(num_steps * batch_size), data)
    job = Job(program, str(directory / "run"), time.time())
    driver.run(job, LocalPlace(1, max_restarts=1), lambda: str(data), [seen])
    return seen


def main() -> None:
    command = [sys.executable, "-m", "benchmarks.states", "plain"]
    plain = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    # Not by torch.cuda, which would make a context on the GPU in this process.
    gpus = subprocess.run(["sh", "-c", "nvidia-smi -L"], stdout=subprocess.PIPE).stdout
    on_gpu = bool(gpus)
    print("| program | a step: mean | / plain loop | states | stall of one: first, median | loss |")
    print("|---|---|---|---|---|---|")
    print(f"| a plain loop | {1e3 * plain:.1f} ms | 1 | | | |", flush=True)
    for name, options in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as directory:
            seen = train(on_gpu, Path(directory), **options)
            mean, loss = statistics.fmean(seen.step_seconds[len(seen.step_seconds) // 2 :]), ""
            if "killed" in options:
                killed_at = float((Path(directory) / "killed").read_text())
                next_step = min(at for _, at in seen.ends if at > killed_at) - killed_at
                loss = f"{KILLED_STEP - seen.resumed_step} steps again, {next_step:.1f} s to a step"
        stalls = seen.stalls
        stall = f"{stalls[0]:.2f} s, {1e3 * statistics.median(stalls):.0f} ms" if stalls else ""
        row = (name, f"{1e3 * mean:.1f} ms", f"{mean / plain:.2f}", len(stalls), stall, loss)
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    print(f"\n{gpus.decode().partition(' (UUID')[0]} {machine(num_cores())}")


if __name__ == "__main__":
    train_plainly() if sys.argv[1:] == ["plain"] else main()
