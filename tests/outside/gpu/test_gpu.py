"""Tests on real GPUs. `make test-gpu` runs these; each skips where there are fewer GPUs than it
needs.
"""

from __future__ import annotations

import pytest

from flyte_ddp.events import CheckpointLoaded, CheckpointSaved, HistogramsTaken, RunStarted
from tests.support.runs import new_run

DIGITS = "flyte_ddp.recipes.digits.Digits"


def num_gpus():
    import torch

    return torch.cuda.device_count()


@pytest.fixture
def gpu():
    """The first GPU."""
    import torch

    if num_gpus() < 1:
        pytest.skip("needs a GPU")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_gpu_learns_the_digits_and_its_state_loads_without_one(gpu, tmp_path, precision):
    import torch

    run = new_run(tmp_path, DIGITS).train(num_processes=1, epochs=5, precision=precision)
    assert run.result.epochs[-1].metrics["accuracy"] > 0.95
    assert run.started.device == torch.cuda.get_device_name(0)
    assert all(value.device.type == "cpu" for value in run.state().values())


def test_a_gpu_and_the_cpu_learn_the_same(gpu, tmp_path, monkeypatch):
    on_gpu = new_run(tmp_path / "gpu", DIGITS).train(num_processes=1, epochs=1, deterministic=True)
    monkeypatch.setattr("flyte_ddp.launch.nodes.local.num_gpus", lambda: 0)
    on_cpu = new_run(tmp_path / "cpu", DIGITS).train(num_processes=1, epochs=1, deterministic=True)
    # Not their weights: AdamW makes whole steps of gradients that only differ in their rounding.
    ((gpu,), (cpu,)) = on_gpu.result.epochs, on_cpu.result.epochs
    assert gpu.train_loss == pytest.approx(cpu.train_loss, abs=0.02)
    assert gpu.test_loss == pytest.approx(cpu.test_loss, abs=0.02)


def test_a_bad_loss_on_a_gpu_ends_the_run_before_a_checkpoint_is_spoiled(
    gpu, tmp_path, monkeypatch
):
    from flyte_ddp.errors import RankFailure

    monkeypatch.setenv("FAULT", "nan 0 3")
    run = new_run(tmp_path)
    with pytest.raises(RankFailure, match="the loss is nan at step 3"):
        run.train(num_processes=1)
    assert not list(run.checkpoints.glob("step-*.json"))


def test_two_gpus_over_nccl_end_in_the_weights_of_one(tmp_path):
    import torch

    if num_gpus() < 2:
        pytest.skip("needs two GPUs")
    one = new_run(tmp_path / "one").train(num_processes=1)
    two = new_run(tmp_path / "two").train(num_processes=2)
    assert two.started.backend == "nccl"
    for name, value in one.state().items():
        torch.testing.assert_close(two.state()[name], value, rtol=1e-4, atol=1e-5)


def test_a_state_is_evaluated_on_the_gpu_with_the_results_of_its_training(gpu, tmp_path):
    from flyte_ddp.recipes import get_recipe
    from flyte_ddp.training.evaluation import evaluate_state

    run = new_run(tmp_path, DIGITS).train(num_processes=1, epochs=1)
    outputs = []
    found = evaluate_state(
        get_recipe(DIGITS),
        run.config,
        run.state(),
        run.data(),
        lambda *batch: outputs.append(batch),
    )
    assert found.metrics["accuracy"] == pytest.approx(run.result.epochs[-1].metrics["accuracy"])
    assert found.loss == pytest.approx(run.result.epochs[-1].test_loss, rel=1e-3)
    assert outputs


def test_a_deterministic_run_repeats_itself_and_shows_its_histograms(gpu, tmp_path):
    import torch

    one, other = (
        new_run(tmp_path / name, DIGITS).train(num_processes=1, epochs=1, deterministic=True)
        for name in "ab"
    )
    for run in (one, other):
        (taken,) = [event for event in run.events if isinstance(event, HistogramsTaken)]
        assert all(sum(histogram.counts) > 0 for histogram in taken.histograms.values())
        assert "gradients" in "".join(taken.histograms)
    for name, value in one.state().items():
        assert torch.equal(other.state()[name], value), name


# On a GPU the ranks check their own losses only in the steps that they report.
@pytest.mark.parametrize(
    ("fault", "num_processes"), [("nan 1 14", 2), ("infinite-gradient 0 14", 1)]
)
def test_no_checkpoint_is_written_of_spoiled_weights(
    gpu, tmp_path, monkeypatch, fault, num_processes
):
    import torch

    from flyte_ddp.checkpoints.store import CheckpointStore
    from flyte_ddp.errors import RankFailure

    if num_gpus() < num_processes:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("FAULT", fault)
    run = new_run(tmp_path)
    with pytest.raises(RankFailure, match="NonFiniteLoss"):
        run.train(num_processes, checkpoint_interval=1)
    assert max(event.step for event in run.events if isinstance(event, CheckpointSaved)) == 13
    state, _, skipped = CheckpointStore(str(run.checkpoints), 2).load_latest()
    assert skipped == []
    if state:  # all of them may have been on their way to the store
        assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_batches_of_data_too_large_for_the_gpu_do_not_wait_for_it(gpu, monkeypatch):
    import torch
    from torch.utils.data import TensorDataset

    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.rank.data import open_samples
    from flyte_ddp.rank.plan import epoch_shards
    from flyte_ddp.world import World
    from tests.support.recipes import Sequences

    monkeypatch.setattr("flyte_ddp.rank.data.MAX_GPU_MEMORY_FRACTION", 0.0)
    dataset = TensorDataset(torch.rand(100, 8), torch.zeros(100, 4, dtype=torch.int64))
    config, world = TrainingConfig(global_batch_size=10), World(0, 1, gpu)
    (samples,) = open_samples([dataset], Sequences(), config, world)
    shards = epoch_shards(samples, config, world, epoch=1)
    batches = samples.batches([index for shard in shards for index in shard.micro_batches], epoch=1)
    next(batches)  # allocates pinned memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        for shard, (inputs, _) in zip(shards[1:], batches, strict=True):
            assert inputs.device == gpu
            inputs.sum() * (1 / shard.num_targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_training_and_held_out_data_lie_on_the_gpu_where_they_fit(gpu):
    import torch
    from torch.utils.data import TensorDataset

    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.rank.data import open_samples
    from flyte_ddp.world import World
    from tests.support.recipes import Tiny

    datasets = [
        TensorDataset(torch.rand(100, 8), torch.zeros(100, dtype=torch.int64)) for _ in range(2)
    ]
    for samples in open_samples(datasets, Tiny(), TrainingConfig(), World(0, 1, gpu)):
        assert samples.index_device == gpu


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_rank_goes_on_from_its_state_in_memory(gpu, tmp_path, monkeypatch, parallel):
    import torch

    # 27 steps; each attempt but the last is killed in its twelfth
    config = {"parallel": parallel, "memory_interval": 2, "deterministic": True}
    undisturbed = new_run(tmp_path / "undisturbed", "Normed").train(1, **config)
    monkeypatch.setenv("FAULT", "kill 0 12")
    run = new_run(tmp_path / "lost", "Normed").train(1, max_restarts=9, **config)
    resumed = [
        event.url for event in run.events if isinstance(event, CheckpointLoaded) and event.step
    ]
    assert resumed == ["this node's memory"] * 2
    torch.testing.assert_close(run.state(), undisturbed.state(), rtol=0, atol=0)


# 103 samples in batches of 12 leave 7: of micro-batches of 3, rank 0 needs two for its 4 samples,
# rank 1 one for its 3.
def test_batch_norm_over_all_ranks_does_not_hang_at_an_uneven_last_batch(tmp_path):
    if num_gpus() < 2:
        pytest.skip("needs two GPUs")
    run = new_run(tmp_path, "Normed").train(
        2, sync_batch_norm=True, gradient_accumulation=2, collective_timeout=60
    )
    assert len(run.result.epochs) == 3


@pytest.mark.parametrize("recipe", ["NormedWithOneLeft", "Volumes"])
def test_one_sample_under_batch_norm_and_3d_convolutions_train(gpu, tmp_path, recipe):
    assert len(new_run(tmp_path, recipe).train(1).result.epochs) == 3


def test_a_gpu_that_runs_out_of_memory_restarts_with_smaller_micro_batches(
    gpu, tmp_path, monkeypatch
):
    monkeypatch.setenv("FAULT", "cuda-oom 0 3")
    run = new_run(tmp_path).train(1, grow_accumulation_on_oom=True)
    started = [event for event in run.events if isinstance(event, RunStarted)]
    assert [event.config["gradient_accumulation"] for event in started] == [1, 2, 4]
