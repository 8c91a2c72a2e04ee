"""The training loops of others: after a kill, at another number of ranks, each sample is trained on
once an epoch.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader

import flyte_ddp
from flyte_ddp import events, session
from flyte_ddp.errors import ConfigError, RankFailure, TrainingStopped
from flyte_ddp.integrations import loaders
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.run import _Call
from tests.support.frameworks import PROGRAMS, Task
from tests.support.gang import session_of

SLOW = pytest.mark.slow
FRAMEWORKS = (  # of which importing takes ten seconds for each rank; `make test-docs` has all
    *(pytest.param(each, marks=SLOW) for each in PROGRAMS if each != "accelerate"),
    "accelerate",
)


class Listener(events.Listener):
    """Keeps the metrics that are reported, and what was loaded."""

    def __init__(self):
        self.metrics = []
        self.loaded = []

    def handle(self, event):
        if isinstance(event, events.Reported):
            self.metrics.append(event.values)
        elif isinstance(event, events.CheckpointLoaded):
            self.loaded.append(event)


@pytest.mark.long
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_kill_in_mid_epoch_loses_and_doubles_no_sample(framework, tmp_path):
    pytest.importorskip(framework.split()[0])
    train, task = PROGRAMS[framework], Task(str(tmp_path))
    # in the middle of the second epoch; the last checkpoint is of step 16
    fault = tmp_path / "step-17-1-9"
    fault.touch()
    options = {"checkpoints": str(tmp_path / "checkpoints")}
    with pytest.raises(RankFailure, match="SIGKILL"):
        flyte_ddp.run(train, task, nproc_per_node=2, **options)
    assert not fault.exists()
    expected = "number of samples: expected 96, with which the checkpoint was written, got 95"
    with pytest.raises(RankFailure, match=expected):
        flyte_ddp.run(train, dataclasses.replace(task, num_missing=1), **options)
    listener = Listener()
    result = flyte_ddp.run(train, task, nproc_per_node=1, listeners=[listener], **options)
    assert result["counts"][0].tolist() == [task.epochs] * task.num_samples
    assert any("loss" in each for each in listener.metrics)
    expected = flyte_ddp.run(train, Task(str(tmp_path / "plain"), save_steps=0), nproc_per_node=2)
    torch.testing.assert_close(result["weights"], expected["weights"])


@pytest.mark.long
@pytest.mark.parametrize(
    "framework",
    [
        "accelerate",
        pytest.param("lightning", marks=SLOW),
        pytest.param("lightning data module", marks=SLOW),
    ],
)
def test_a_limit_of_steps_ends_an_epoch_also_after_a_kill(framework, tmp_path):
    pytest.importorskip(framework.split()[0])
    train, task = PROGRAMS[framework], Task(str(tmp_path), limit=6)
    fault = tmp_path / "step-6-0-9"  # before the second epoch's first step
    fault.touch()
    options = {"checkpoints": str(tmp_path / "checkpoints"), "max_restarts": 1}
    listener = Listener()
    result = flyte_ddp.run(train, task, listeners=[listener], **options)
    assert not fault.exists()
    assert [each.step for each in listener.loaded] == [0, 6]
    plain = dataclasses.replace(task, directory=str(tmp_path / "plain"))
    expected = flyte_ddp.run(train, plain)
    assert expected["counts"][0].sum() == task.epochs * task.limit * task.batch_size
    assert result["counts"][0].tolist() == expected["counts"][0].tolist()
    torch.testing.assert_close(result["weights"], expected["weights"])


@pytest.mark.long
@pytest.mark.parametrize(
    "framework",
    ["accelerate", *(pytest.param(each, marks=SLOW) for each in ("transformers", "lightning"))],
)
def test_a_stop_loses_no_step(framework, tmp_path):
    pytest.importorskip(framework.split()[0])
    task = Task(str(tmp_path), save_steps=1000, step_seconds=0.5)
    stop, listener = StopRequest(120), Listener()

    class Stops(Listener):
        def handle(self, event):
            if isinstance(event, events.Reported) and event.step >= 5 and not stop.is_set():
                stop.set("SIGTERM")

    call = cloudpickle.dumps(_Call(PROGRAMS[framework], (task,)))
    job = Job(Program(framework, call, ("tests",)), str(tmp_path / "checkpoints"), time.time())
    with pytest.raises(TrainingStopped):
        driver.run(job, LocalPlace(2), None, [Stops()], stop=stop)
    task = dataclasses.replace(task, step_seconds=0)
    result = flyte_ddp.run(
        PROGRAMS[framework], task, checkpoints=job.checkpoints, listeners=[listener]
    )
    assert listener.loaded[0].step >= 5
    assert result["counts"][0].tolist() == [task.epochs] * task.num_samples


@SLOW
def test_a_data_modules_last_batch_has_its_weight_at_any_number_of_ranks(tmp_path):
    pytest.importorskip("lightning")
    task = Task(str(tmp_path), num_missing=5)  # 11 batches of 8 samples and one of 3
    train = PROGRAMS["lightning data module"]
    found = [flyte_ddp.run(train, task, nproc_per_node=num_ranks) for num_ranks in (1, 2)]
    torch.testing.assert_close(found[0]["weights"], found[1]["weights"])


def train_twice():
    from accelerate import Accelerator

    from flyte_ddp.integrations.accelerate import prepare

    for _ in range(2):
        prepare(Accelerator(cpu=True), torch.nn.Linear(1, 1), DataLoader(torch.ones(2, 1)))


def test_a_second_training_in_a_run_is_one_line(tmp_path):
    pytest.importorskip("accelerate")
    expected = (
        "prepare: expected one call in a run, which has the checkpoints of one training, got a "
        "second one"
    )
    with pytest.raises(RankFailure, match=expected):
        flyte_ddp.run(train_twice, checkpoints=str(tmp_path))


@pytest.mark.parametrize("framework", ["accelerate", pytest.param("transformers", marks=SLOW)])
def test_another_way_to_split_a_model_is_one_line_before_the_first_step(framework, monkeypatch):
    types = pytest.importorskip("accelerate.utils").DistributedType
    monkeypatch.setattr(session, "_current", session_of()[0])
    integration = importlib.import_module(f"flyte_ddp.integrations.{framework}")

    def begin(kind, is_fsdp2=False, layout=None):
        accelerator = SimpleNamespace(
            distributed_type=kind, is_fsdp2=is_fsdp2, parallelism_config=layout
        )
        if framework == "accelerate":
            integration.prepare(accelerator, torch.nn.Linear(1, 1), DataLoader([1]))
        else:
            integration.SessionCallback(SimpleNamespace(accelerator=accelerator, train=None))

    split_twice = SimpleNamespace(tp_size=2, non_data_parallel_size=2)
    for arguments, name in [
        ((types.FSDP,), "FSDP1"),
        ((types.DEEPSPEED,), "DEEPSPEED"),
        ((types.MEGATRON_LM,), "MEGATRON_LM"),
        ((types.FSDP, True, split_twice), ".*tp_size=2.*"),
    ]:
        with pytest.raises(
            ConfigError, match=f"^accelerator: expected DDP, or FSDP2 .*, got {name}$"
        ):
            begin(*arguments)


def test_data_without_a_length_are_not_compared():
    kept, share = loaders.share_batch(iter([1, 2]), {"num_samples": None}, None, 4, 2)
    assert (kept, share) == ({"num_samples": None, "global_batch_size": 8}, 4)


@pytest.mark.slow  # of which importing takes ten seconds
def test_lightning_refuses_batches_that_ranks_with_the_same_samples_would_share(monkeypatch):
    callback = importlib.import_module("flyte_ddp.integrations.lightning").SessionCallback()
    trainer = SimpleNamespace(
        reload_dataloaders_every_n_epochs=1,
        current_epoch=0,
        distributed_sampler_kwargs={"num_replicas": 1},
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = "session.batches: ranks of its mesh: expected 1 under Lightning, got 2$"
    with pytest.raises(ConfigError, match=expected):
        callback._check_batches(trainer, session.batches(range(8), 4, 0))
    mesh = SimpleNamespace(shape=(1,), get_coordinate=lambda: [0], size=lambda: 1)
    batches = session.batches(range(8), 4, 0, mesh=mesh)
    assert callback._check_batches(trainer, batches) is batches


def train_logging():
    """Train two epochs of three steps, which log values of all kinds."""
    import lightning

    from flyte_ddp.integrations.lightning import SessionCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, index):
            self.log("constant", 0.5)
            if index == 1:
                self.log("rare", float(self.current_epoch))
            self.log("per_epoch", 1.0, on_step=False, on_epoch=True)
            return self.layer(batch).mean()

        def validation_step(self, batch, index):
            self.log("val_loss", 2.0)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = DataLoader(torch.ones(3, 1))
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "log_every_n_steps": 1,
    }
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[SessionCallback()], **options
    )
    trainer.fit(Model(), loader, loader)


@SLOW
def test_what_lightning_logs_is_reported():
    pytest.importorskip("lightning")
    listener = Listener()
    flyte_ddp.run(train_logging, listeners=[listener])
    names = [name for each in listener.metrics for name in each]
    assert {name: names.count(name) for name in names if name != "rare"} == {
        "constant": 6,
        "per_epoch": 2,
        "val_loss": 2,
    }
    assert {each["rare"] for each in listener.metrics if "rare" in each} == {0.0, 1.0}


def test_the_trainers_own_times_and_counts_are_no_figures_of_the_run(monkeypatch):
    pytest.importorskip("transformers")
    from flyte_ddp.integrations import transformers

    reported = {}
    monkeypatch.setattr(transformers.session, "report", lambda **values: reported.update(values))
    own = (
        "eval_runtime",
        "eval_samples_per_second",
        "eval_steps_per_second",
        "train_runtime",
        "total_flos",
    )
    figures = {
        "loss": 1.0,
        "eval_loss": 2.0,
        "eval_f1": 0.5,
        "learning_rate": 0.1,
        "grad_norm": 3.0,
        "runtime_error": 1.0,
    }
    state = SimpleNamespace(global_step=3, epoch=0.5)
    callback = object.__new__(transformers.SessionCallback)
    callback.on_log(
        None,
        state,
        None,
        {**dict.fromkeys(own, 1.0), "eval_model_preparation_time": 1.0, **figures},
    )
    assert reported == {"step": 3, "epoch": 0.5, **figures}
