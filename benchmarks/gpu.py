"""Compare training on a GPU with plain loops, and measure losses of ranks: `make bench-gpu`.

Each row is a program of its own with a limit, so that all rows end within nine minutes and a row
that fails costs no other. A multilayer perceptron with AdamW trains on noise: it has 298 million
parameters on a GPU; on CPUs it is so small that the rows only show that they run. Needs no set-up
where torch and fsspec are installed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flyte_ddp
from benchmarks.measure import machine
from benchmarks.mnist_like import MnistLike
from flyte_ddp import events
from flyte_ddp.errors import RankFailure, TrainingStopped
from flyte_ddp.events.kinds import Timed
from flyte_ddp.process.devices import num_cores, num_gpus
from flyte_ddp.recipes.prepare import prepare_data

if TYPE_CHECKING:
    import torch
    from torch import nn

LOG_INTERVAL = 10  # steps between two reads of the loss
WARM_UP = 20  # steps that are not measured
STALL_TIMEOUT = 8.0
HUNG_STEP = 5
# Ways to train: precision, and fields of the recipe's config.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "fsdp": ("bf16", {"parallel": "fsdp"}),
    "compile": ("bf16", {"compile": True}),
}


@dataclass(frozen=True)
class Size:
    """The size of the model and of its epochs."""

    width: int  # neurons of a layer
    batch_size: int
    epoch_steps: int
    epoch_seconds: float  # about, to choose the number of epochs
    kill_after: float  # seconds of training before a rank is killed, or the driver gets a notice
    limit: float  # seconds of a row, without this wait


ON_GPU = Size(10_000, 8192, 150, epoch_seconds=4.0, kill_after=60.0, limit=25.0)
ON_CPU = Size(200, 32, 40, epoch_seconds=0.5, kill_after=5.0, limit=120.0)


def size() -> Size:
    if num_gpus():
        return ON_GPU
    return ON_CPU


@dataclass
class Wide(MnistLike):
    """A model that is large for its speed."""

    width: int = ON_CPU.width
    # An empty name means that no rank is killed, or that no peak is written.
    killed: str = ""  # file that is made when the rank is killed
    peak: str = ""  # file with the most bytes that tensors have taken

    def model(self) -> nn.Module:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if self.killed and not Path(self.killed).exists():
            register_optimizer_step_post_hook(functools.partial(die_later, self.killed, []))
        if self.peak:
            register_optimizer_step_post_hook(functools.partial(write_peak, self.peak))
        return make_model(self.width)


def make_model(width: int) -> nn.Module:
    from torch import nn

    sizes = (784, *3 * [width], 9 * width // 10, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def die_later(file: str, first: list[float], *_: Any) -> None:
    """Kill this rank once it has trained long enough."""
    first.append(time.time())
    if time.time() - first[0] > size().kill_after:
        Path(file).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    del first[1:]


def write_peak(file: str, *_: Any) -> None:
    import torch

    Path(file).write_text(str(torch.cuda.max_memory_allocated()))


def train_plainly(mode: str, num_steps: int) -> float:
    """Train a loop of PyTorch in one of the `MODES`, and return the mean seconds of its steps after
    the warm-up.
    """
    import torch
    from torch.nn import functional

    chosen = size()
    on_gpu = bool(num_gpus())
    device = torch.device(("cpu", "cuda")[on_gpu])
    precision = MODES[mode][0]
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.device(device):
        model = make_model(chosen.width)
    if mode == "fsdp":
        model = split(model, device, kind)
    run: Callable[..., Any] = model
    if mode == "compile":
        run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    images = torch.randint(
        0, 256, (2 * chosen.batch_size, 1, 28, 28), dtype=torch.uint8, device=device
    )
    labels = torch.randint(0, 10, (len(images),), device=device)
    started = 0.0
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            synchronize(device)
            started = time.perf_counter()
        drawn = torch.randint(0, len(labels), (chosen.batch_size,), device=device)
        # Modules that FSDP splits have their own precision.
        is_cast = precision != "fp32" and mode != "fsdp"
        with torch.autocast(device.type, kind, enabled=is_cast):
            outputs = run(images[drawn].float() / 255)
            loss = functional.cross_entropy(outputs.float(), labels[drawn])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % LOG_INTERVAL == 0:
            loss.item()
    synchronize(device)
    return (time.perf_counter() - started) / num_steps


def split(model: nn.Module, device: torch.device, kind: torch.dtype) -> nn.Module:
    """Split a model as FSDP2 does, over one rank."""
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = {"cuda": "nccl", "cpu": "gloo"}[device.type]
    store = TCPStore("127.0.0.1", 0, is_master=True)
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass
class Seen(events.Listener):
    """A listener that keeps the times of a run's steps, states and other events."""

    steps: list[tuple[int, float]] = field(default_factory=list)  # step, seconds since the epoch
    stalls: list[float] = field(default_factory=list)  # seconds of each state that is kept
    marks: list[tuple[str, float]] = field(default_factory=list)  # event, seconds since the epoch
    resumed_step: int = 0

    def handle(self, event: events.Event) -> None:
        if isinstance(event, Timed):
            self.marks.append((type(event).__name__, event.at))
        if isinstance(event, events.Reported):
            self.steps.append((event.step, event.at))
        elif isinstance(event, events.CheckpointSaved):
            self.stalls.append(event.seconds)
        elif isinstance(event, events.CheckpointLoaded):
            self.resumed_step = event.step

    def step_seconds(self) -> float:
        """Return the mean seconds of a step in the last epoch, without its evaluation."""
        last = self.steps[-1][0]
        inside = [each for each in self.steps if each[0] > last - size().epoch_steps]
        (first, began), (end, ended) = inside[0], inside[-1]
        return (ended - began) / (end - first)

    def worst_step(self) -> float:
        """Return the seconds of the slowest step within an epoch."""
        pairs = itertools.pairwise(self.steps)
        length = size().epoch_steps
        return max(
            (after[1] - before[1]) / (after[0] - before[0])
            for before, after in pairs
            if before[0] % length
        )


def train(data: Path, epochs: int, seen: Seen, **config: Any) -> None:
    """Train the recipe with one rank."""
    chosen = size()
    options = {"width": chosen.width, **config.pop("recipe_options", {})}
    values = {
        "global_batch_size": chosen.batch_size,
        "epochs": epochs,
        "log_interval": LOG_INTERVAL,
        "recipe_options": options,
        **config,
    }
    flyte_ddp.train(
        "benchmarks.gpu.Wide",
        values,
        prepared=str(data),
        nproc_per_node=1,
        max_restarts=1,
        listeners=[seen],
        progress=False,
    )


def compare_recipe(data: Path, mode: str) -> list[str]:
    plain = train_plainly_apart(mode)
    seen = Seen()
    precision, config = MODES[mode]
    train(data, 2, seen, precision=precision, memory_interval=0, **config)
    return compared(seen.step_seconds(), plain)


def train_plainly_apart(mode: str) -> float:
    """Return what `train_plainly` does in another process, whose memory is free at its end."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--plain", mode]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()[-1])


def compared(ours: float, plain: float) -> list[str]:
    return [f"{1e3 * ours:.1f} ms", f"{1e3 * plain:.1f} ms", f"{ours / plain:.2f}"]


def compare_function(data: Path) -> list[str]:
    """Compare a loop that the launcher runs with the same loop alone."""
    plain = train_plainly_apart("bf16")
    num_steps = size().epoch_steps
    ours = flyte_ddp.run(train_plainly, "bf16", num_steps, nproc_per_node=1, progress=False)
    return compared(ours, plain)


def keep_states(data: Path) -> list[str]:
    """Train with states in memory at the default interval."""
    seen = Seen()
    train(data, 4, seen, precision="bf16")
    stalls = seen.stalls
    if not stalls:
        return ["no state in memory"]
    seconds = seen.steps[-1][1] - seen.steps[0][1]
    first, median = stalls[0], statistics.median(stalls)
    return [
        f"{len(stalls)} states; the first {1e3 * first:.0f} ms, the median {1e3 * median:.0f} ms",
        f"{LOG_INTERVAL} steps at most {1e3 * LOG_INTERVAL * seen.worst_step():.0f} ms",
        f"{sum(stalls) / seconds:.1%} of the time",
    ]


def lose_a_rank(data: Path) -> list[str]:
    """Kill the rank, and show where the time to the next step goes."""
    seen, chosen = Seen(), size()
    epochs = int((chosen.kill_after + 10) / chosen.epoch_seconds) + 1
    with tempfile.TemporaryDirectory() as directory:
        killed = Path(directory) / "killed"
        options = {"killed": str(killed)}
        train(data, epochs, seen, precision="bf16", recipe_options=options, log_interval=1)
        killed_at = float(killed.read_text())
    lost_step = max(step for step, at in seen.steps if at <= killed_at)
    names = ("AttemptEnded", "AttemptStarted", "RunStarted", "CheckpointLoaded", "Reported")
    parts, before = [], killed_at
    for name in names:
        at = min(at for each, at in seen.marks if each == name and at >= before)
        parts.append(f"{name} {at - before:.1f}")
        before = at
    total = f"{before - killed_at:.1f} s to a step"
    return [f"{lost_step - seen.resumed_step} steps again", total, ", ".join(parts)]


def stop_it(data: Path) -> list[str]:
    """Send SIGTERM to the driver in the middle, and measure until it has saved and ended."""
    seen = Seen()
    seconds = min(12.0, size().kill_after)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    began = time.time() + seconds
    with contextlib.suppress(TrainingStopped):
        train(data, 1_000, seen, precision="bf16")
    ended = time.time()
    written = [at for name, at in seen.marks if name == "CheckpointWritten"]
    return [f"saved after {max(written) - began:.1f} s", f"ended after {ended - began:.1f} s"]


def hang_on_one_gpu(data: Path) -> list[str]:
    """Let two ranks share the device over gloo, one of which stops, and show what is said."""
    try:
        flyte_ddp.run(
            hang,
            nproc_per_node=2,
            stall_timeout=STALL_TIMEOUT,
            progress=False,
        )
    except RankFailure as error:
        return ["named" if "rank 1" in str(error) else "not named", str(error).splitlines()[0]]
    return ["no error"]


def hang() -> None:
    """Add up over gloo, until rank 1 does something else."""
    import torch
    from torch import distributed

    from flyte_ddp import session

    distributed.init_process_group("gloo")
    device = ("cpu", "cuda")[torch.cuda.is_available()]
    for step in range(1, 2 * HUNG_STEP):
        if step == HUNG_STEP and distributed.get_rank() == 1:
            time.sleep(1_000)
        value = torch.ones(1_000, device=device)
        distributed.all_reduce(value)
        session.report(step=step, value=value.sum().item())


def estimate_memory(data: Path) -> list[str]:
    """Compare `flyte-ddp estimate` with the peak of a run."""
    chosen = size()
    options = {"width": chosen.width}
    config = {
        "global_batch_size": chosen.batch_size,
        "precision": "bf16",
        "recipe_options": options,
    }
    command = [
        *(sys.executable, "-m", "flyte_ddp", "estimate", "--recipe", "benchmarks.gpu.Wide"),
        *("--config", json.dumps(config), "--data", str(2 * chosen.batch_size)),
    ]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if not num_gpus():
        return [said, "a measured peak needs a GPU"]
    with tempfile.TemporaryDirectory() as directory:
        peak = Path(directory) / "peak"
        train(data, 1, Seen(), precision="bf16", recipe_options={"peak": str(peak)})
        measured = float(peak.read_text()) / 2**30
    return [said, f"measured {measured:.3f} GiB"]


def predict(data: Path) -> list[str]:
    """Compare the rate of predictions with a plain loop over the same images."""
    import torch

    chosen = size()
    part = 8 * chosen.batch_size
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory) / "state.pt"
        torch.save(make_model(chosen.width).state_dict(), state)
        made = flyte_ddp.predict(
            "benchmarks.gpu.Wide",
            str(state),
            str(chosen.epoch_steps * chosen.batch_size),
            f"{directory}/predictions",
            batch_size=chosen.batch_size,
            part_size=part,
            config={"precision": "bf16", "recipe_options": {"width": chosen.width}},
            nproc_per_node=1,
            progress=False,
        )
        times = sorted(os.stat(path).st_mtime for path in made.paths)
    ours = (len(times) - 2) * part / (times[-2] - times[0])  # The last file may be shorter.
    plain = float(predict_plainly())
    return [f"{ours:,.0f}/s", f"{plain:,.0f}/s", f"{ours / plain:.2f}"]


def predict_plainly() -> float:
    """Return the images per second of a loop that moves every batch and brings its result back."""
    import torch

    chosen = size()
    device = torch.device(("cpu", "cuda")[bool(num_gpus())])
    model = make_model(chosen.width).to(device).eval()
    images = torch.randint(0, 256, (4 * chosen.batch_size, 1, 28, 28), dtype=torch.uint8)
    num_rounds, started = 5, 0.0
    for number in range(num_rounds + 1):
        if number == 1:
            synchronize(device)
            started = time.perf_counter()
        for batch in images.split(chosen.batch_size):
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
                model(batch.to(device).float() / 255).float().cpu()
    return num_rounds * len(images) / (time.perf_counter() - started)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    title: str
    measure: Callable[[Path], list[str]]  # given the prepared data, returns the cells
    waits: bool = False  # the row waits for the loss of a rank


ROWS = {
    **{
        f"recipe-{mode}": Row(
            f"a recipe, {mode}: a step, of a plain loop, ratio",
            functools.partial(compare_recipe, mode=mode),
        )
        for mode in MODES
    },
    "function": Row("a function, bf16: a step, of the loop alone, ratio", compare_function),
    "states": Row("states in memory, bf16", keep_states),
    "killed": Row("a rank is killed later", lose_a_rank, waits=True),
    "notice": Row("SIGTERM to the driver", stop_it),
    "hang": Row("two ranks on one device over gloo, one stops", hang_on_one_gpu),
    "memory": Row("estimated and measured peak", estimate_memory),
    "predict": Row("predictions, of a plain loop, ratio", predict),
}


@contextlib.contextmanager
def prepared_data() -> Iterator[Path]:
    chosen = size()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as directory:
        num_samples = chosen.epoch_steps * chosen.batch_size
        prepare_data(Wide(), str(num_samples), Path(directory))
        yield Path(directory)


def measure_apart(name: str, data: Path) -> list[str]:
    """Measure a row in a process of its own, and end that process with all its own in time."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--row", name, "--data", str(data)]
    limit = size().limit + ROWS[name].waits * size().kill_after
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return [f"not done after {limit:.0f} s"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        return ["failed", *errors.strip().splitlines()[-1:]]
    cells: list[str] = json.loads(output.splitlines()[-1])
    return cells


def main(arguments: Sequence[str]) -> int:
    """Print the table; or, called by itself, one row or the seconds of a plain loop's steps."""
    values = dict(zip(arguments[::2], arguments[1::2], strict=True))
    if "--plain" in values:
        print(train_plainly(values["--plain"], size().epoch_steps))
        return 0
    if "--row" in values:
        print(json.dumps(ROWS[values["--row"]].measure(Path(values["--data"]))))
        return 0
    names = values.get("--only", ",".join(ROWS)).split(",")
    num_failed = 0
    print("| | | | |")
    print("|---|---|---|---|")
    with prepared_data() as data:
        for name in names:
            cells = measure_apart(name, data)
            num_failed += cells[0].startswith(("failed", "not done"))
            cells += [""] * (3 - len(cells))
            print(f"| {' | '.join([ROWS[name].title, *cells])} |", flush=True)
    print(f"\n{describe_gpu()} {machine(num_cores())}")
    return int(num_failed > 0)


def describe_gpu() -> str:
    """Return the name of the first GPU, without a context on it in this process."""
    if not num_gpus():
        return "No GPU,"
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True).stdout
    return listed.partition(" (UUID")[0] + ","


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
