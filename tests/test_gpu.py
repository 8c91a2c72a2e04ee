"""What only a GPU can show. `make test-gpu` runs these; each skips where there are fewer GPUs than it needs."""

from __future__ import annotations

import pytest

from tests.support.runs import new_run

pytestmark = pytest.mark.gpu
DIGITS = "flyte_ddp.recipes.digits.Digits"


def num_gpus():
    import torch

    return torch.cuda.device_count()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_gpu_learns_the_digits_and_its_state_loads_without_one(tmp_path, precision):
    import torch

    if num_gpus() < 1:
        pytest.skip("needs a GPU")
    run = new_run(tmp_path, DIGITS).train(num_processes=1, epochs=5, precision=precision)
    assert run.result.epochs[-1].accuracy > 0.95
    assert run.started.device == torch.cuda.get_device_name(0)
    assert all(value.device.type == "cpu" for value in run.state().values())


def test_a_gpu_and_the_cpu_learn_the_same(tmp_path, monkeypatch):
    import torch

    if num_gpus() < 1:
        pytest.skip("needs a GPU")
    on_gpu = new_run(tmp_path / "gpu", DIGITS).train(num_processes=1, epochs=1, deterministic=True)
    monkeypatch.setattr("flyte_ddp.launch.spawn.num_gpus", lambda: 0)
    on_cpu = new_run(tmp_path / "cpu", DIGITS).train(num_processes=1, epochs=1, deterministic=True)
    for name, value in on_cpu.state().items():
        torch.testing.assert_close(on_gpu.state()[name], value, rtol=0.05, atol=0.02)
    assert abs(on_gpu.result.epochs[0].train_loss - on_cpu.result.epochs[0].train_loss) < 0.05


def test_a_bad_loss_on_a_gpu_ends_the_run_before_a_checkpoint_is_spoiled(tmp_path, monkeypatch):
    if num_gpus() < 1:
        pytest.skip("needs a GPU")
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
