"""The loops that are compared on recipe text, each in its own process: `python -m benchmarks.text ours`.

Both train the recipe's model at its own sizes. `loop` is a plain loop in the form of nanoGPT's, on one batch that is in
memory: a training can only be slower. On several ranks, which torchrun starts for `loop`, both use FSDP2.

`python -m benchmarks.text quality --ranks 2 --minutes 10` is no comparison: it prints the held-out nats per byte of the
recipe's defaults after ten minutes, with as many epochs as fit into them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from flyte_ddp.events import EpochFinished, Event, Listener, RunStarted, RunState
from flyte_ddp.launch import driver
from flyte_ddp.launch.devices import num_cores
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.programs import Job, recipe_program
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data

NUM_BATCHES = 40  # per epoch
NUM_EPOCHS = 2  # the second is measured
LOG_INTERVAL = 20  # steps between two reads of the loss


def ours(num_ranks: int) -> None:
    parallel = "fsdp" if num_ranks > 1 else "ddp"
    config = {"epochs": NUM_EPOCHS, "log_interval": LOG_INTERVAL, "parallel": parallel}
    launched_at = time.time()
    with tempfile.TemporaryDirectory() as directory:
        result = _train(num_ranks, config, str(_text(directory)))
    _report(launched_at + result.finished.first_step_seconds, result.epochs[-1].metrics["tokens_per_second"])


def loop(num_ranks: int) -> None:
    import torch
    from torch.nn import functional

    config = config_of("text", {"epochs": NUM_EPOCHS})
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    recipe = get_recipe("text", config.recipe_options)
    with tempfile.TemporaryDirectory() as directory:
        prepare_data(recipe, str(_text(directory)), Path(directory))
        inputs, targets = recipe.datasets(Path(directory))[0].tensors
        inputs, targets = (part[: config.global_batch_size].long() for part in (inputs, targets))
    num_tokens = inputs.numel()
    torch.manual_seed(config.seed)
    model = recipe.model()
    if num_ranks > 1:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        inputs, targets = (part.chunk(num_ranks)[dist.get_rank()] for part in (inputs, targets))
        for block in recipe.blocks(model):
            fully_shard(block)
        fully_shard(model)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.learning_rate,
        fused=True,
    )
    num_steps = NUM_EPOCHS * NUM_BATCHES
    first_step_at = started = 0.0
    model.train()
    for step in range(num_steps):
        if step == num_steps - NUM_BATCHES:
            started = time.perf_counter()
        rate = config.learning_rate * (1 + math.cos(math.pi * step / num_steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = model(inputs)
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        first_step_at = first_step_at or time.time()
        if step % LOG_INTERVAL == 0:
            loss.item()
    loss.item()
    if int(os.environ.get("RANK", 0)) == 0:
        _report(first_step_at, NUM_BATCHES * num_tokens / (time.perf_counter() - started))
    if num_ranks > 1:
        dist.destroy_process_group()


def quality(num_ranks: int, minutes: float, **overrides: Any) -> None:
    """Train the recipe on its own text for as many epochs as `minutes` allow, and print the result of each.

    An epoch that is not counted shows how long they take.
    """
    probe = _Epochs()
    _train(num_ranks, {**overrides, "epochs": 1}, listeners=[probe])
    _, seconds = probe.finished[0]
    epochs = num_epochs_within(60 * minutes, seconds - probe.started_after, probe.started_after)
    print(f"an epoch takes {seconds - probe.started_after:.1f} s: {epochs} epochs", flush=True)
    counted = _Epochs(log=True)
    _train(num_ranks, {**overrides, "epochs": epochs}, listeners=[counted])
    finished, seconds = counted.finished[-1]
    late = "" if seconds <= 60 * minutes else f", which is more than {minutes:g}: something else ran here"
    print(
        f"{finished.metrics['nats_per_byte']:.3f} held-out nats per byte after {seconds / 60:.1f} minutes{late}; "
        f"{epochs} epochs, {num_ranks} ranks, {machine(num_cores())}"
    )


def num_epochs_within(budget: float, epoch_seconds: float, start_seconds: float) -> int:
    """Return how many epochs fit into `budget` seconds, of which a twentieth is a margin; at least one."""
    return max(1, int((0.95 * budget - start_seconds) / epoch_seconds))


class _Epochs:
    """A listener that notes each epoch's result and the seconds since the run was launched."""

    def __init__(self, log: bool = False) -> None:
        self.finished: list[tuple[EpochFinished, float]] = []
        self.started_after = 0.0
        self._launched_at = time.time()
        self._log = log

    def handle(self, event: Event) -> None:
        seconds = time.time() - self._launched_at
        if isinstance(event, RunStarted):
            self.started_after = seconds
        elif isinstance(event, EpochFinished):
            self.finished.append((event, seconds))
            if self._log:
                print(f"epoch {event.epoch}, {seconds:.0f} s: {event.metrics['nats_per_byte']:.3f}", flush=True)

    def close(self, error: BaseException | None) -> None:
        pass


def _train(num_ranks: int, config: Mapping[str, Any], source: str = "", listeners: Sequence[Listener] = ()) -> RunState:
    resolved = config_of("text", config)
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        data.mkdir()
        prepare_data(get_recipe("text", resolved.recipe_options), source, data)
        job = Job(recipe_program("text", resolved), f"{directory}/checkpoints", time.time())
        return driver.run(job, LocalPlace(num_ranks), lambda: str(data), listeners)


def _text(directory: str) -> Path:
    """Write as much of Python's own topics as the steps need, with a little to hold out."""
    from pydoc_data.topics import topics

    config = config_of("text", {})
    size = NUM_BATCHES * config.global_batch_size * config.recipe_options["context"]
    file = Path(directory, "topics.txt")
    # A single document, of which the last tenth is held out.
    file.write_bytes("".join(topics[name] for name in sorted(topics)).encode()[: math.ceil(size / 0.9)])
    return file


def _report(first_step_at: float, tokens_per_second: float) -> None:
    print(json.dumps({"first_step_at": first_step_at, "tokens_per_second": tokens_per_second}), flush=True)


VARIANTS = {variant.__name__: variant for variant in (ours, loop, quality)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="of quality (%(default)s)")
    arguments = parser.parse_args()
    options = {"minutes": arguments.minutes} if arguments.variant == "quality" else {}
    VARIANTS[arguments.variant](arguments.ranks, **options)
