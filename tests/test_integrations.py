"""The training loops of others: after a kill, at another number of ranks, each sample is trained on
once an epoch.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import flyte_ddp
from flyte_ddp import events, session
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import ConfigError, RankFailure, TrainingStopped
from flyte_ddp.integrations import loaders, training
from flyte_ddp.launch import driver
from flyte_ddp.launch.dask.place import DaskPlace
from flyte_ddp.launch.process.programs import WANDB_VARIABLE, Job, Program
from flyte_ddp.launch.run import Gang, _Call, run_program
from flyte_ddp.launch.signals import StopRequest
from flyte_ddp.rank.sharding import is_split
from tests.support.dask_runs import At, events_of
from tests.support.frameworks import PROGRAMS, Task
from tests.support.gang import session_of
from tests.support.runs import new_run

SLOW = pytest.mark.slow
FRAMEWORKS = (  # of which importing takes ten seconds for each rank; `make test-docs` has all
    *(pytest.param(each, marks=SLOW) for each in PROGRAMS if each not in ("pytorch", "accelerate")),
    "accelerate",
)


class Listener:
    """Keeps the metrics that are reported, and what was loaded."""

    def __init__(self):
        self.metrics = []
        self.loaded = []

    def handle(self, event):
        if isinstance(event, events.Reported):
            self.metrics.append(event.values)
        elif isinstance(event, events.CheckpointLoaded):
            self.loaded.append(event)

    def close(self, error):
        pass


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


class PatientTask(Task):
    """A task whose steps take a while until its gang has grown back."""

    def begin_step(self, step):
        super().begin_step(step)
        time.sleep(0.5 if Path(self.directory, "slow").exists() else 0)


@SLOW
@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_an_announced_loss_growth_and_a_stop_lose_no_step(
    framework, start_worker, scheduler, tmp_path
):
    pytest.importorskip(framework)
    (tmp_path / "slow").touch()
    task, place = (
        PatientTask(str(tmp_path), epochs=40, save_steps=1000),
        str(tmp_path / "checkpoints"),
    )
    nannies = [start_worker(scheduler, f"node-{index}") for index in range(2)]
    config = ClusterConfig(
        "existing", scheduler_address=scheduler, min_nodes=1, node_timeout=60, grow_delay=1
    )
    config = dataclasses.replace(config, max_restarts=0, grow_interval=0)
    run, stop = new_run(tmp_path), StopRequest(grace=120)

    class Stops:
        def handle(self, event):
            if isinstance(event, events.Reported) and len(events_of(run, events.RunStarted)) == 3:
                (tmp_path / "slow").unlink(missing_ok=True)
                if not stop.is_set():
                    stop.set("SIGTERM")

        def close(self, error):
            pass

    faults = [
        At(4, lambda: nannies[1].send_signal(signal.SIGTERM)),
        At(10, lambda: start_worker(scheduler, "node-2")),
    ]
    call = cloudpickle.dumps(_Call(PROGRAMS[framework], (task,)))
    program = Program(framework, call, ("tests",), slow_imports=("torch", framework))
    with open_cluster(config, "test") as client, pytest.raises(TrainingStopped):
        driver.run(
            Job(program, place, time.time()),
            DaskPlace(client, config),
            None,
            [run, *faults, Stops()],
            run.relay,
            stop,
        )
    assert [event.num_nodes for event in events_of(run, events.RunStarted)] == [2, 1, 2]
    ends = [event.step for event in events_of(run, events.AttemptEnded)]
    assert [event.step for event in events_of(run, events.CheckpointLoaded)] == [0, *ends]
    listener = Listener()
    result = flyte_ddp.run(PROGRAMS[framework], task, checkpoints=place, listeners=[listener])
    assert [event.step for event in listener.loaded] == [
        events_of(run, events.CheckpointSaved)[-1].step
    ]
    assert listener.loaded[0].step > ends[1]
    assert result["counts"][0].tolist() == [task.epochs] * task.num_samples


@SLOW
def test_a_data_modules_last_batch_has_its_weight_at_any_number_of_ranks(tmp_path):
    pytest.importorskip("lightning")
    task = Task(str(tmp_path), num_missing=5)  # 11 batches of 8 samples and one of 3
    train = PROGRAMS["lightning data module"]
    found = [flyte_ddp.run(train, task, nproc_per_node=num_ranks) for num_ranks in (1, 2)]
    torch.testing.assert_close(found[0]["weights"], found[1]["weights"])


def train_trl(directory, saves):
    """Fine-tune a small language model by TRL's SFTTrainer; return its weights."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    task = Task(directory)

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            task.begin_step(state.global_step)

    words = {f"w{number}": number for number in range(40)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
        eos_token="w1",
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, pad_token_id=0, eos_token_id=1, **sizes))
    numbers = torch.randint(2, 40, (32, 6), generator=torch.Generator().manual_seed(1))
    arguments = SFTConfig(
        output_dir=f"{directory}/output",
        max_steps=12,
        per_device_train_batch_size=8 // int(os.environ["WORLD_SIZE"]),
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        save_steps=2,
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        gradient_checkpointing=False,
    )
    data = Dataset.from_dict({"input_ids": numbers.tolist()})
    trainer = SFTTrainer(
        model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Steps()]
    )
    if saves:
        from flyte_ddp.integrations.transformers import SessionCallback

        trainer.add_callback(SessionCallback(trainer))
    trainer.train()
    return [each.detach() for each in model.parameters()]


@SLOW
def test_trls_trainer_goes_on_in_mid_epoch_at_another_number_of_ranks(tmp_path):
    pytest.importorskip("trl")
    (tmp_path / "step-7-1-9").touch()
    options = {"checkpoints": str(tmp_path / "checkpoints")}
    with pytest.raises(RankFailure, match="SIGKILL"):
        flyte_ddp.run(train_trl, str(tmp_path), True, nproc_per_node=2, **options)
    listener = Listener()
    found = flyte_ddp.run(
        train_trl, str(tmp_path), True, nproc_per_node=1, listeners=[listener], **options
    )
    # of 12 steps it goes on behind the sixth, and it reports once at the end
    assert len(listener.metrics) < 10
    expected = flyte_ddp.run(train_trl, str(tmp_path / "plain"), False, nproc_per_node=2)
    torch.testing.assert_close(found, expected)


def train_recorded(framework, directory):
    """Train where the framework records in W&B too."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": directory, "WANDB_SILENT": "true"}
    torch.manual_seed(0)
    if framework == "accelerate":
        from accelerate import Accelerator
        from torch.utils.data import DataLoader

        from flyte_ddp.integrations.accelerate import prepare

        accelerator, model = Accelerator(cpu=True, log_with="wandb"), torch.nn.Linear(1, 1)
        accelerator.init_trackers("once")
        for batch in prepare(accelerator, model, DataLoader(torch.ones(2, 1)))[1]:
            accelerator.log({"loss": model(batch).item()})
        accelerator.end_training()
    elif framework == "lightning":
        import lightning
        from lightning.pytorch.demos.boring_classes import BoringModel
        from lightning.pytorch.loggers import WandbLogger

        from flyte_ddp.integrations.lightning import SessionCallback

        files = {"enable_checkpointing": False, "default_root_dir": directory}
        logger = WandbLogger(project="once", save_dir=directory)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=2,
            logger=logger,
            callbacks=[SessionCallback()],
            limit_val_batches=0,
            **files,
        )
        trainer.fit(BoringModel())
    else:
        from transformers import Trainer, TrainingArguments

        from flyte_ddp.integrations.transformers import SessionCallback
        from tests.support.frameworks import Counting, Samples

        arguments = TrainingArguments(
            directory, max_steps=2, report_to="wandb", use_cpu=True, disable_tqdm=True
        )
        trainer = Trainer(Counting(8), arguments, train_dataset=Samples(8))
        trainer.add_callback(SessionCallback(trainer))
        trainer.train()


@pytest.mark.long
@pytest.mark.parametrize(
    "framework",
    [*(pytest.param(each, marks=SLOW) for each in ("transformers", "lightning")), "accelerate"],
)
def test_a_run_that_is_recorded_in_wandb_is_not_recorded_twice(framework, tmp_path):
    pytest.importorskip(framework)
    found = []
    for is_recorded in (True, False):
        place = tmp_path / str(is_recorded)
        place.mkdir()
        call = cloudpickle.dumps(_Call(train_recorded, (framework, str(place))))
        variables = {WANDB_VARIABLE: "1"} if is_recorded else {}
        run_program(Program("recorded", call, ("tests",), variables=variables), Gang())
        # Accelerate's own recording began before ours could end it.
        files = [
            each
            for each in place.rglob("*.wandb")
            if framework != "accelerate" or b"loss" in each.read_bytes()
        ]
        found.append(len(files))
    assert found == [0, 1]


def continue_training(splits, num_steps):
    """Train the steps that are left, the model split by FSDP2 or not; return its weights and the
    optimizer's state.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    if splits:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    found = training.load(model, [optimizer])
    for step in range(found["step"] if found else 0, num_steps):
        model(
            torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        training.save(model, [optimizer], step + 1, {"step": step + 1})
        session.current().wait()  # a newer state replaces one that waits
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [
        each.full_tensor() if is_split(each) else each.detach()
        for each in [*model.parameters(), *moments]
    ]


@SLOW
def test_a_model_is_split_or_not_as_the_number_of_ranks_changes(tmp_path):
    options = {"checkpoints": str(tmp_path)}
    for splits, num_ranks, num_steps in [(True, 2, 2), (False, 1, 4), (True, 2, 6)]:
        found = flyte_ddp.run(
            continue_training, splits, num_steps, nproc_per_node=num_ranks, **options
        )
    torch.testing.assert_close(found, flyte_ddp.run(continue_training, False, 6))


@SLOW
def test_a_damaged_checkpoint_of_a_split_model_is_reported(tmp_path):
    options, listener = {"nproc_per_node": 2, "checkpoints": str(tmp_path)}, Listener()
    flyte_ddp.run(continue_training, True, 2, **options)
    for file in tmp_path.glob("step-0000000002*.pt"):
        file.write_bytes(file.read_bytes()[:-100])
    flyte_ddp.run(continue_training, True, 2, listeners=[listener], **options)
    (loaded,) = listener.loaded
    assert loaded.step == 1
    assert "step-0000000002" in str(loaded.skipped)


def train_twice(framework, directory):
    """Call twice what trains in each framework."""
    from torch.utils.data import DataLoader

    if framework == "accelerate":
        from accelerate import Accelerator

        from flyte_ddp.integrations.accelerate import prepare

        for _ in range(2):
            prepare(Accelerator(cpu=True), torch.nn.Linear(1, 1), DataLoader(torch.ones(2, 1)))
    elif framework == "lightning":
        import lightning
        from lightning.pytorch.demos.boring_classes import BoringModel

        from flyte_ddp.integrations.lightning import SessionCallback

        files = {"enable_checkpointing": False, "logger": False, "default_root_dir": directory}
        for _ in range(2):
            trainer = lightning.Trainer(
                accelerator="cpu",
                max_steps=2,
                callbacks=[SessionCallback()],
                limit_val_batches=0,
                **files,
            )
            trainer.fit(BoringModel())
    else:
        from transformers import Trainer, TrainingArguments

        from flyte_ddp.integrations.transformers import SessionCallback
        from tests.support.frameworks import Counting, Samples

        arguments = TrainingArguments(
            directory, max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True
        )
        trainer = Trainer(Counting(8), arguments, train_dataset=Samples(8))
        trainer.add_callback(SessionCallback(trainer))
        for _ in range(2):
            trainer.train()


@pytest.mark.parametrize(
    ("framework", "call"),
    [
        pytest.param("transformers", "trainer.train", marks=SLOW),
        pytest.param("lightning", "trainer.fit", marks=SLOW),
        ("accelerate", "prepare"),
    ],
)
def test_a_second_training_in_a_run_is_one_line(framework, call, tmp_path):
    pytest.importorskip(framework)
    expected = (
        f"{call}: expected one call in a run, which has the checkpoints of one training, "
        "got a second one"
    )
    with pytest.raises(RankFailure, match=expected):
        flyte_ddp.run(
            train_twice, framework, str(tmp_path), checkpoints=str(tmp_path / "checkpoints")
        )


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

    for kind, name in [
        (types.FSDP, "FSDP1"),
        (types.DEEPSPEED, "DEEPSPEED"),
        (types.MEGATRON_LM, "MEGATRON_LM"),
    ]:
        with pytest.raises(
            ConfigError, match=f"^accelerator: expected DDP, or FSDP2 .*, got {name}$"
        ):
            begin(kind)
    with pytest.raises(
        ConfigError, match="parallelism_config: expected DDP or FSDP2 alone, .*tp_size=2"
    ):
        begin(types.FSDP, True, SimpleNamespace(tp_size=2, non_data_parallel_size=2))


def test_data_without_a_length_are_not_compared():
    loaders.check_length(None, [1, 2])
    loaders.check_length({"num_samples": 2}, [1, 2])
    loaders.check_length({}, [1, 2])
    loaders.check_length({"num_samples": None}, iter([1, 2]))


@pytest.mark.slow  # of which importing takes ten seconds
def test_lightning_refuses_batches_that_ranks_with_the_same_samples_would_share(monkeypatch):
    callback = importlib.import_module("flyte_ddp.integrations.lightning").SessionCallback()
    trainer = SimpleNamespace(
        reload_dataloaders_every_n_epochs=1,
        current_epoch=0,
        distributed_sampler_kwargs={"num_replicas": 1},
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = (
        r"session.batches: mesh: expected 1 ranks, as of "
        r'strategy.device_mesh\["data_parallel"\], got 2$'
    )
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
