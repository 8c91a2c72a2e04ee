"""Loops of others over `flyte_ddp.data.loader`, under torchrun.

    torchrun --nproc-per-node 2 -m tests.support.loader_loops DIRECTORY STEPS WORKERS PROGRAM...

Each program goes on from the newest checkpoint of its directory, saves every fourth step, and ends
after STEPS steps of the run as a killed one does: what it trained on since the last checkpoint does
not count. Each rank writes the samples that count to a file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.data import loader

NUM_SAMPLES, BATCH, EPOCHS, SAVE_STEPS = 90, 12, 2, 4  # 8 batches, and 6 samples in the last one


class Killed(Exception):
    pass


class Numbers:
    def __init__(self, size=NUM_SAMPLES):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"numbers": torch.tensor(index)}


class Model(nn.Module):
    """Notes the samples that it is trained on."""

    def __init__(self, place, max_steps):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.place, self.max_steps = place, max_steps
        self.seen, self.is_counted = [], True

    def forward(self, numbers):
        if self.is_counted:
            self.seen += numbers.tolist()
        return {"loss": self.layer(numbers.view(-1, 1).float()).mean()}

    def begin_step(self, step):
        if step == self.max_steps:
            raise Killed

    def keep(self):
        """Count what was trained on: a checkpoint has it."""
        with self.place.joinpath(f"{os.getpid()}.seen").open("a") as file:
            file.write(json.dumps(self.seen) + "\n")
        self.seen.clear()


def newest(place, pattern):
    """The newest checkpoint of a directory; None without one."""
    found = sorted(place.glob(pattern), key=lambda path: int(path.stem.rpartition("-")[2]))
    return found[-1] if found else None


def train_plainly(model, place, num_workers):
    replica = DistributedDataParallel(model)
    batches, step = loader(Numbers(97), 10, weights=True, num_workers=num_workers), 0
    if found := newest(place, "state-*.json"):
        state = json.loads(found.read_text())
        batches.load_state_dict(state["data"])
        step = state["step"]
    for _ in range(batches.epoch, EPOCHS):
        for batch, weight in batches:
            model.begin_step(step)
            model.is_counted = weight > 0
            (weight * replica(**batch)["loss"]).backward()
            step += 1
            if step % SAVE_STEPS == 0:
                state = {"data": batches.state_dict(), "step": step}
                if dist.get_rank() == 0:
                    (place / f"state-{step}.json").write_text(json.dumps(state))
                model.keep()


def train_accelerate(model, place, num_workers):
    from accelerate import Accelerator

    accelerator, step = Accelerator(cpu=True), 0
    batches = loader(Numbers(), BATCH, num_workers=num_workers)
    replica, batches = accelerator.prepare(model, batches)
    accelerator.register_for_checkpointing(batches)
    if found := newest(place, "step-*"):
        accelerator.load_state(found)
        step = int(found.name.rpartition("-")[2])
    for _ in range(batches.epoch, EPOCHS):
        for batch in batches:
            model.begin_step(step)
            accelerator.backward(replica(**batch)["loss"])
            step += 1
            if step % SAVE_STEPS == 0:
                accelerator.save_state(place / f"step-{step}")
                model.keep()


def train_titan(model, place, num_workers):
    """With TorchTitan's base class where it is installed, and the checkpoints that its checkpointer
    writes.
    """
    import torch.distributed.checkpoint as dcp

    try:
        from torchtitan.components.dataloader import BaseDataLoader
    except ImportError:
        from torch.distributed.checkpoint.stateful import Stateful as BaseDataLoader

    class Batches(BaseDataLoader):
        def __init__(self, dp_rank, dp_world_size):
            self.own = loader(
                Numbers(),
                BATCH,
                num_workers=num_workers,
                rank=dp_rank,
                num_ranks=dp_world_size,
            )

        def __iter__(self):
            for _ in range(self.own.epoch, EPOCHS):
                yield from self.own

        def state_dict(self):
            return self.own.state_dict()

        def load_state_dict(self, state):
            self.own.load_state_dict(state)

    replica = DistributedDataParallel(model)
    batches, step = Batches(dist.get_rank(), dist.get_world_size()), 0
    if found := newest(place, "step-*"):
        dcp.load({"dataloader": batches}, checkpoint_id=str(found))
        step = int(found.name.rpartition("-")[2])
    for batch in batches:
        model.begin_step(step)
        replica(**batch)["loss"].backward()
        step += 1
        if step % SAVE_STEPS == 0:
            dcp.save({"dataloader": batches}, checkpoint_id=str(place / f"step-{step}"))
            model.keep()


def train_lightning(model, place, num_workers):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Data(lightning.LightningDataModule):
        batches = None

        def train_dataloader(self):
            return self.open()

        def open(self):
            if self.batches is None:
                self.batches = loader(Numbers(), BATCH, num_workers=num_workers)
            return self.batches

        def state_dict(self):
            model.keep()
            return self.open().state_dict()

        def load_state_dict(self, state):
            self.open().load_state_dict(state)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            model.begin_step(self.trainer.global_step)
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    checkpoints = ModelCheckpoint(
        place,
        "step-{step}",
        every_n_train_steps=SAVE_STEPS,
        save_top_k=-1,
        auto_insert_metric_name=0,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints],
    )
    trainer.fit(Module(), datamodule=Data(), ckpt_path=newest(place, "step-*.ckpt"))


def train_transformers(model, place, num_workers):
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

    batches = loader(Numbers(), BATCH, num_workers=num_workers)

    class Position(TrainerCallback, ExportableState):
        def state(self):
            return {"args": {}, "attributes": {"position": batches.state_dict()}}

        def on_save(self, *arguments, **given):
            model.keep()

        def on_step_begin(self, args, state, control, **given):
            model.begin_step(state.global_step)

    class OwnTrainer(Trainer):
        def get_train_dataloader(self):
            return batches

    arguments = TrainingArguments(
        str(place),
        num_train_epochs=EPOCHS,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        ignore_data_skip=True,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    found = newest(place, "checkpoint-*")
    if found:
        saved = TrainerState.load_from_json(str(found / "trainer_state.json"))
        position = saved.stateful_callbacks["Position"]["attributes"]["position"]
        batches.load_state_dict(position)
    trainer = OwnTrainer(model, arguments, train_dataset=Numbers(), callbacks=[Position()])
    trainer.train(resume_from_checkpoint=str(found) if found else None)


PROGRAMS = {
    "plain": train_plainly,
    "accelerate": train_accelerate,
    "titan": train_titan,
    "lightning": train_lightning,
    "transformers": train_transformers,
}


def main():
    directory, max_steps, num_workers, *programs = sys.argv[1:]
    for name in programs:
        if name in ("plain", "titan") and not dist.is_initialized():
            dist.init_process_group("gloo")
        place = Path(directory, name)
        place.mkdir(exist_ok=True)
        model = Model(place, int(max_steps))
        try:
            PROGRAMS[name](model, place, int(num_workers))
        except Killed:
            continue
        model.keep()


if __name__ == "__main__":
    main()
