"""The training loops of others: after a kill, at another number of ranks, each sample is trained on
once an epoch.
"""

from __future__ import annotations

import dataclasses
import functools
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
from flyte_ddp.integrations import loaders, training
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.run import FunctionCall
from flyte_ddp.rank.sharding import find_changed_value
from tests.support.errors import raises_one_line
from tests.support.frameworks import PROGRAMS, Task, require
from tests.support.gang import session_of
from tests.support.own_optimizers import FreeSgd, Slow
from tests.training.test_trial import Counting, Forgetful, Hooked, Unloadable

# The example scripts test the same frameworks in fresh ranks.
pytestmark = pytest.mark.usefixtures("forked_functions")
SLOW = pytest.mark.slow
FRAMEWORKS = (  # Some take seconds for each rank; `make test-docs` has all of them.
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
    require(framework.split()[0])
    train, task = PROGRAMS[framework], Task(str(tmp_path))
    # The fault comes in the middle of the second epoch; the last checkpoint is of step 16. It ends
    # the rank that writes it, which waits for it.
    fault = tmp_path / "step-17-0-9"
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
        pytest.param("transformers", marks=SLOW),
    ],
)
def test_a_limit_of_steps_ends_an_epoch_also_after_a_kill(framework, tmp_path):
    require(framework.split()[0])
    train, task = PROGRAMS[framework], Task(str(tmp_path), limit=6)
    # At the second epoch's first step: before it Accelerate and Lightning have saved, in it the
    # Trainer saves.
    fault = tmp_path / f"step-{7 if framework == 'transformers' else 6}-0-9"
    fault.touch()
    options = {"checkpoints": str(tmp_path / "checkpoints"), "max_restarts": 1}
    listener = Listener()
    result = flyte_ddp.run(train, task, listeners=[listener], **options)
    assert not fault.exists()
    assert [listener.loaded[0].step, listener.loaded[-1].step] == [0, 6]
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
    require(framework.split()[0])
    task = Task(str(tmp_path), save_steps=1000, step_seconds=0.5)
    stop, listener = StopRequest(120), Listener()

    class Stops(Listener):
        def handle(self, event):
            if isinstance(event, events.Reported) and event.step >= 5 and not stop.is_set():
                stop.set("SIGTERM")

    call = cloudpickle.dumps(FunctionCall(PROGRAMS[framework], (task,)))
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
@pytest.mark.parametrize("num_missing", [0, 4])
def test_a_trainer_of_data_without_a_length_goes_on_in_a_later_epoch(num_missing, tmp_path):
    require("transformers")
    # Four samples fewer end each epoch with one batch of two of an optimizer step.
    task = Task(str(tmp_path), num_missing=num_missing, save_steps=1)
    train = functools.partial(PROGRAMS["transformers"], streams=True, num_batches=2)
    fault = tmp_path / "step-17-0-9"
    fault.touch()
    listener = Listener()
    result = flyte_ddp.run(
        train,
        task,
        checkpoints=str(tmp_path / "checkpoints"),
        max_restarts=1,
        listeners=[listener],
    )
    assert not fault.exists()
    assert listener.loaded[-1].step == 16
    plain = Task(str(tmp_path / "plain"), num_missing=num_missing, save_steps=0)
    expected = flyte_ddp.run(train, plain)
    assert result["counts"][0].tolist() == expected["counts"][0].tolist()
    torch.testing.assert_close(result["weights"], expected["weights"])


@SLOW
@pytest.mark.parametrize("streams", [False, True])
def test_a_trainer_at_its_last_step_trains_no_other_one(streams, tmp_path):
    require("transformers")

    def train(max_steps):
        function = functools.partial(PROGRAMS["transformers"], streams=streams, max_steps=max_steps)
        return flyte_ddp.run(function, Task(str(tmp_path)), checkpoints=str(tmp_path / "saved"))

    first, second = train(18), train(18)
    assert first["counts"][0].sum() == 18 * 8
    assert second["counts"][0].tolist() == first["counts"][0].tolist()
    longer = train(24)
    assert longer["counts"][0].tolist() == [2] * 96


@SLOW
def test_a_data_modules_last_batch_has_its_weight_at_any_number_of_ranks(tmp_path):
    require("lightning")
    task = Task(str(tmp_path), num_missing=5)  # 11 batches of 8 samples and one of 3
    train = PROGRAMS["lightning data module"]
    found = [flyte_ddp.run(train, task, nproc_per_node=num_ranks) for num_ranks in (1, 2)]
    torch.testing.assert_close(found[0]["weights"], found[1]["weights"])


def in_training_mode(parameters, lr):
    optimizer = FreeSgd(parameters, lr)
    optimizer.train()
    return optimizer


def take_steps(kind, count, place, monkeypatch):
    """Load what is saved, take steps, and save; return the optimizer's state."""
    current, _ = session_of(checkpoints=place)
    monkeypatch.setattr(session, "_current", current)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    first = (training.load(model, [optimizer], []) or {"step": 0})["step"]
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    step = first + count
    training.save(model, [optimizer], [], step, {"step": step})
    current.saver.wait()
    return optimizer.state_dict()


@pytest.mark.parametrize("kind", [Counting, Hooked, Slow, in_training_mode, torch.optim.AdamW])
def test_all_that_an_optimizer_saves_in_a_frameworks_training_comes_back(
    kind, tmp_path, monkeypatch
):
    for _ in range(3):
        found = take_steps(kind, 1, tmp_path / "resumed", monkeypatch)
    whole = take_steps(kind, 3, tmp_path / "whole", monkeypatch)
    assert not find_changed_value(found, whole)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Forgetful, r"Forgetful: expected a state_dict\(\) that .* value of .*\['count'\]"),
        (
            Unloadable,
            "Unloadable: expected one that loads what its .* got AttributeError: ",
        ),
    ],
)
def test_an_optimizer_that_does_not_come_back_in_a_frameworks_training_is_one_line(
    kind, expected, tmp_path, monkeypatch
):
    take_steps(kind, 1, tmp_path, monkeypatch)
    with raises_one_line(ConfigError, match=f"optimizer: {expected}"):
        take_steps(kind, 1, tmp_path, monkeypatch)


class Restarting(torch.optim.lr_scheduler.StepLR):
    """Begins again after a restart."""

    def load_state_dict(self, state):
        pass


def test_a_schedule_that_does_not_come_back_in_a_frameworks_training_is_one_line(
    tmp_path, monkeypatch
):
    def train(kind):
        current, _ = session_of(checkpoints=tmp_path)
        monkeypatch.setattr(session, "_current", current)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = kind(optimizer, step_size=1)
        training.load(model, [optimizer], [schedule])
        optimizer.step()
        schedule.step()
        training.save(model, [optimizer], [schedule], schedule.last_epoch, {})
        current.saver.wait()
        return schedule.last_epoch

    assert train(torch.optim.lr_scheduler.StepLR) == 1
    assert train(torch.optim.lr_scheduler.StepLR) == 2
    with raises_one_line(
        ConfigError, match=r"schedule: Restarting: expected a state_dict\(\) that"
    ):
        train(Restarting)


def train_with_a_wrapper():
    """Train two epochs of two steps with an optimizer around another one; return its steps, and
    the steps that have ended.
    """
    from accelerate import Accelerator

    from flyte_ddp.integrations.accelerate import prepare

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = Slow(model.parameters(), lr=0.1)
    objects = model, optimizer, DataLoader(torch.ones(3, 1))
    model, prepared, loader = prepare(Accelerator(cpu=True), *objects)
    for _ in range(2):
        for number, batch in enumerate(loader, 1):
            model(batch).mean().backward()
            prepared.step()
            prepared.zero_grad()
            if number == 2:
                break
    return optimizer.count, session.current().reporter.step


def test_accelerate_counts_the_steps_of_an_optimizer_around_another_one(tmp_path):
    require("accelerate")
    assert flyte_ddp.run(train_with_a_wrapper, checkpoints=str(tmp_path)) == (4, 3)


def train_twice():
    from accelerate import Accelerator

    from flyte_ddp.integrations.accelerate import prepare

    for _ in range(2):
        prepare(Accelerator(cpu=True), torch.nn.Linear(1, 1), DataLoader(torch.ones(2, 1)))


def test_a_second_training_in_a_run_is_one_line(tmp_path):
    require("accelerate")
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


@pytest.mark.slow  # Importing Lightning takes ten seconds.
def test_lightning_refuses_batches_that_ranks_with_the_same_samples_would_share(monkeypatch):
    # Lightning sets this variable. Without it again, later ranks are forked.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
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
    require("lightning")
    listener = Listener()
    flyte_ddp.run(train_logging, listeners=[listener])
    names = [name for each in listener.metrics for name in each]
    assert {name: names.count(name) for name in names if name != "rare"} == {
        "constant": 6,
        "per_epoch": 2,
        "val_loss": 2,
    }
    assert {each["rare"] for each in listener.metrics if "rare" in each} == {0.0, 1.0}


@pytest.mark.long
def test_the_trainers_own_times_and_counts_are_no_figures_of_the_run(monkeypatch):
    require("transformers")
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
