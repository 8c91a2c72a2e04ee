"""A model in shards trains to the weights of a whole one, and its states are the same files."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import CheckpointSaved, EpochFinished, HistogramsTaken, PredictionsMade, RunStarted
from flyte_ddp.prepare import describe_data
from flyte_ddp.rank.sharding import check_memory, large_blocks
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

CONFIG = {
    "epochs": 2,
    # 12 splits evenly over 1, 2 and 3 ranks, and the last batch is smaller and uneven.
    "global_batch_size": 12,
    "evaluation_batch_size": 7,
    "schedule": "constant",
    "gradient_clip_norm": 0.5,
    "recipe_options": {"layers": 2, "width": 32, "heads": 2, "context": 32},
}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}  # sums over ranks in another order


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Some documents, of which `text` makes 113 windows."""
    directory = tmp_path_factory.mktemp("text")
    for number in range(20):
        lines = [f"{number * step} is {number} times {step}." for step in range(1, 11)]
        (directory / f"{number}.txt").write_text("\n".join(lines))
    return str(directory)


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory):
    return run_text(tmp_path_factory.mktemp("whole")).train(1, source=text, **CONFIG)


def run_text(directory):
    run = new_run(directory)
    run.recipe = "text"
    return run


def weights(state):
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module")
def resharded_run(text, tmp_path_factory):
    """An epoch on two ranks, then one on three, with micro-batches and recomputed activations."""
    directory = tmp_path_factory.mktemp("shards")
    options = {"parallel": "fsdp", "gradient_accumulation": 2, "activation_checkpointing": True}
    first = run_text(directory).train(2, source=text, **{**CONFIG, **options, "epochs": 1})
    return first, run_text(directory).train(3, source=text, **{**CONFIG, **options, "gradient_accumulation": 1})


def test_shards_on_two_and_then_three_ranks_train_to_the_weights_of_one_process(resharded_run, whole_run):
    first, second = resharded_run

    assert (first.started.world_size, second.started.world_size) == (2, 3)
    assert second.started.resumed_step == first.result.finished.step > 0
    torch.testing.assert_close(weights(second.state()), weights(whole_run.state()), **TOLERANCE)
    for ours, theirs in zip(second.result.epochs, whole_run.result.epochs, strict=True):
        assert ours.test_loss == pytest.approx(theirs.test_loss, rel=1e-4)
        assert ours.accuracy == pytest.approx(theirs.accuracy, abs=0.003)


def test_states_of_shards_are_the_files_of_a_whole_model(resharded_run, whole_run, text):
    second = resharded_run[1]
    assert second.state().keys() == whole_run.state().keys()
    assert not any(type(value).__name__ == "DTensor" for value in second.state().values())

    # One process goes on from them, optimizer and all.
    trainer, reference = (new_trainer(run, source=text, **CONFIG) for run in (second, whole_run))
    for each in (trainer, reference):
        each.data_fingerprint = describe_data(whole_run.data(text))["fingerprint"]
    url, _ = trainer.resume()
    assert url == next(event for event in reversed(second.events) if isinstance(event, CheckpointSaved)).url
    reference.resume()
    torch.testing.assert_close(weights(trainer.model.state_dict()), weights(reference.model.state_dict()), **TOLERANCE)
    ours, theirs = trainer.optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, state in theirs.items():
        torch.testing.assert_close(ours[number]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-6)


def test_a_run_of_shards_shows_what_others_show(resharded_run, whole_run):
    def shown(run, kind):
        return [event for event in run.events if isinstance(event, kind)]

    second = resharded_run[1]
    assert second.started.num_parameters == whole_run.started.num_parameters
    names = [(layer.name, layer.output_shape) for layer in whole_run.started.layers]
    assert [(layer.name, layer.output_shape) for layer in second.started.layers] == names
    (histogram,) = shown(second, HistogramsTaken)
    expected = shown(whole_run, HistogramsTaken)[-1]
    assert {name: sum(each.counts) for name, each in histogram.parameters.items()} == {
        name: sum(each.counts) for name, each in expected.parameters.items()
    }
    assert histogram.gradients.keys() == expected.gradients.keys()
    assert len(shown(second, PredictionsMade)[0].predictions) == len(shown(whole_run, PredictionsMade)[0].predictions)
    assert shown(second, EpochFinished)[0].sample
    assert len(second.result.finished.rank_peak_memory_bytes) == 3
    assert shown(second, RunStarted)[0].config["parallel"] == "fsdp"


@pytest.mark.slow
def test_shards_in_bf16_are_close_to_a_whole_model_in_bf16(text, tmp_path):
    whole = run_text(tmp_path / "whole").train(2, source=text, **CONFIG, precision="bf16")
    split = run_text(tmp_path / "split").train(2, source=text, **CONFIG, precision="bf16", parallel="fsdp")

    assert split.result.epochs[-1].test_loss == pytest.approx(whole.result.epochs[-1].test_loss, rel=0.02)


def test_a_model_that_cannot_fit_is_refused_with_what_would_make_it_fit():
    model = nn.Linear(1 << 14, 1 << 14, bias=False, device="meta")  # 1 GiB of weights, 4 GiB with AdamW
    check_memory(model, TrainingConfig(), 1, 5 << 30)
    with pytest.raises(ConfigError, match=r'^parallel: expected "parallel": "fsdp" on at least 3 ranks: .* 4.0 GiB'):
        check_memory(model, TrainingConfig(), 1, 2 << 30)
    with pytest.raises(ConfigError, match=r"^parallel: expected at least 5 ranks, on more GPUs or nodes: .* 2.0 GiB"):
        check_memory(model, TrainingConfig(parallel="fsdp"), 2, 1 << 30)
    check_memory(model, TrainingConfig(parallel="fsdp"), 5, 1 << 30)
    check_memory(model, dataclasses.replace(TrainingConfig(), optimizer="sgd"), 1, 4 << 30)


def test_a_model_without_named_blocks_is_split_by_size():
    layers = [nn.Linear(300, 300) for _ in range(3)]
    assert large_blocks(nn.ModuleDict({"body": nn.ModuleList(layers), "head": nn.Linear(300, 300)})) == layers
    assert large_blocks(nn.Sequential(nn.Linear(4, 300), nn.Sequential(*layers), nn.ReLU())) == layers
    assert large_blocks(nn.Linear(300, 300)) == []
