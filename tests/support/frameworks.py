"""Trainings in the loops of others, which count how often each sample is trained on, as functions for ranks.

The model has a parameter for each sample, whose gradient is the same each time the sample is seen.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from flyte_ddp import session

NUM_SAMPLES, BATCH, EPOCHS, RATE = 96, 8, 3, 0.05
STEPS = NUM_SAMPLES // BATCH * EPOCHS


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        inputs = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "number": torch.tensor(index), "labels": torch.tensor(index % 3)}


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen = nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, inputs, number, labels):
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        return {"loss": loss - (self.seen[number] - self.seen[number].detach()).mean()}

    def result(self):
        """How often each sample was seen, and the weights."""
        counts = (self.seen.detach() / (RATE / BATCH)).round().long().tolist()
        return {"counts": counts, "weights": [each.detach().tolist() for each in self.layers.parameters()]}


def after_step(directory, step):
    """Do what the files `step-STEP-RANK-SIGNAL` say, once, and wait where there is a file `slow`."""
    time.sleep(0.15 if Path(directory, "slow").exists() else 0)
    for fault in Path(directory).glob(f"{step}-{os.environ['RANK']}-*"):
        fault.unlink()
        session.current().wait()
        os.kill(os.getpid(), int(fault.name.rpartition("-")[2]))
        time.sleep(30)


def train_transformers(directory, adds_lines=True, **options):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Faults(TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            after_step(directory, state.global_step)

    model = Counting()
    arguments = {
        "output_dir": f"{directory}/output",
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH // int(os.environ.get("WORLD_SIZE", 1)),
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 4,
        "save_steps": 2,
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "report_to": "none",
    }
    trainer = Trainer(model, TrainingArguments(**arguments | options), train_dataset=Samples(), callbacks=[Faults()])
    if adds_lines:
        from flyte_ddp.integrations.transformers import SessionCallback

        trainer.add_callback(SessionCallback(trainer))
    trainer.train()
    assert not adds_lines or not list(Path(arguments["output_dir"]).glob("checkpoint-*"))
    return model.result()


def train_lightning(directory, adds_lines=True):
    import lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Counting()

        def training_step(self, batch, index):
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    class Faults(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            after_step(directory, trainer.global_step)

    callbacks = [Faults()]
    if adds_lines:
        from flyte_ddp.integrations.lightning import SessionCallback

        callbacks.append(SessionCallback(save_steps=2))
    module = Module()
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=EPOCHS,
        log_every_n_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, DataLoader(Samples(), BATCH // int(os.environ["WORLD_SIZE"]), shuffle=True))
    return module.model.result()


def train_accelerate(directory, adds_lines=True):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from flyte_ddp.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = Counting()
    objects = model, torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(Samples(), BATCH // int(os.environ["WORLD_SIZE"]), shuffle=True)
    if adds_lines:
        wrapped, optimizer, loader = prepare(accelerator, *objects, loader, save_steps=2)
    else:
        wrapped, optimizer, loader = accelerator.prepare(*objects, loader)
    for epoch in range(EPOCHS):
        for index, batch in enumerate(loader, len(loader) - NUM_SAMPLES // BATCH):
            after_step(directory, loader.step if adds_lines else epoch * len(loader) + index)
            loss = wrapped(**batch)["loss"]
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"loss": loss.item()})
    return model.result()
