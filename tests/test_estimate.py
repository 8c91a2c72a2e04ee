"""The estimate of a rank's memory: exact where arithmetic tells it, and near what a real rank takes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from flyte_ddp.__main__ import main
from flyte_ddp.rank.estimate import Estimate, parse_memory
from flyte_ddp.recipes import Recipe, config_of, get_recipe
from tasks.inputs import ClusterInput
from tasks.prepare import prepare

WIDTH = 256
FLOAT = 4


class Wide(Recipe):
    """Linear layers, whose activations are known."""

    def model(self):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 10))


class ByValue(Wide):
    def losses(self, outputs, targets):
        rows = outputs[outputs.sum(1) > 0]  # as many as the data have
        return rows.sum(1) if len(rows) else outputs.sum(1)


def read_batch(size):
    return torch.ones(size, WIDTH), torch.zeros(size, dtype=torch.long)


def config(**overrides):
    return config_of("digits", {"optimizer": "adamw", "evaluation_batch_size": 1, **overrides})


def test_what_arithmetic_tells_is_exact():
    made = Estimate(Wide(), config(), read_batch)
    assert made.num_parameters == made.num_trained == 4 * (WIDTH * WIDTH + WIDTH) + 10 * WIDTH + 10
    memory = made.memory("ddp", 8, 64)
    assert memory.weights == memory.gradients == FLOAT * made.num_parameters
    assert memory.optimizer == pytest.approx(2 * memory.weights, rel=1e-3)  # and a step counter of each
    assert memory.checkpoint_copy == memory.weights + memory.optimizer
    split = made.memory("fsdp", 8, 64)
    assert split.weights == memory.weights / 8
    assert split.checkpoint_copy == memory.checkpoint_copy / 8
    assert split.activations > memory.activations, "gathered blocks"
    # Of each layer the output stays until the backward pass has passed it.
    assert 4 * WIDTH * FLOAT <= made.training.per_sample <= 8 * WIDTH * FLOAT
    frozen = Estimate(Wide(), config(frozen_layers=["0", "1"]), read_batch)
    assert frozen.num_trained == frozen.num_parameters - 2 * (WIDTH * WIDTH + WIDTH)
    sgd = Estimate(Wide(), config(optimizer="sgd"), read_batch)
    assert sgd.optimizer_bytes == memory.weights
    assert made.problem == ""


def test_checkpointing_and_precision_change_the_activations():
    class Deep(Wide):
        def model(self):
            block = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))  # noqa: E731
            return nn.Sequential(nn.ModuleList([block()])[0], *(block() for _ in range(3)), nn.Linear(WIDTH, 10))

        def blocks(self, model):
            return list(model)[:4]

    plain = Estimate(Deep(), config(), read_batch).training.per_sample
    saved = Estimate(Deep(), config(activation_checkpointing=True), read_batch).training.per_sample
    assert saved < 0.7 * plain


def test_the_largest_batch_fits_and_the_next_one_does_not():
    made = Estimate(Wide(), config(), read_batch)
    for parallel in ("ddp", "fsdp"):
        device_bytes = 64 * 2**20
        largest = made.largest_batch(parallel, 4, device_bytes)
        assert made.memory(parallel, 4, largest).device <= made.allowed(device_bytes)
        assert made.memory(parallel, 4, largest + 1).device > made.allowed(device_bytes)
    assert made.largest_batch("ddp", 4, 2**20) == 0


def test_shapes_that_depend_on_the_data_are_said():
    made = Estimate(ByValue(), config(), read_batch)
    assert made.problem.startswith("the shapes depend on the data (")
    assert made.training.per_sample > 0


class ByContents(Wide):
    def losses(self, outputs, targets):
        assert len(outputs.detach().numpy()) == len(targets)
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_a_step_that_reads_tensors_is_measured_on_real_ones():
    made = Estimate(ByContents(), config(), read_batch)
    assert made.problem.startswith("it needs real tensors (")
    assert made.problem.endswith("activations are those of a step on 16 samples; other samples may take more")
    on_fake_tensors = Estimate(Wide(), config(), read_batch)
    assert made.training.per_sample == pytest.approx(on_fake_tensors.training.per_sample, rel=0.1)


def test_a_recipe_that_raises_is_one_line(capsys, monkeypatch):
    def losses(self, outputs, targets):
        raise LookupError("no such\nclass")

    monkeypatch.setattr("flyte_ddp.recipes.digits.Digits.losses", losses)
    assert main(["estimate", "--recipe", "digits"]) == 2
    expected = "error: recipe: expected one whose step runs on a CPU, got LookupError: no such\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(("gib", "is_said"), [(80, False), (1 / 1024, True), (0, False)])
def test_a_run_that_exceeds_the_labels_of_the_nodes_is_warned_before_it_has_a_cluster(
    monkeypatch, caplog, gib, is_said
):
    monkeypatch.setattr("tasks.prepare.gpu_memory", lambda cluster: gib * 2**30)
    prepare(recipe="digits", cluster=ClusterInput(kind="kubernetes", gpus_per_node=1))
    assert len(caplog.messages) == is_said
    if is_said:
        assert re.match(
            r"memory: a rank is estimated to take [\d.]+ MiB, with \d+ samples in a forward pass, of a GPU with "
            "1.0 MiB, of which 0.9 MiB count: at most 0 fit with ddp. See flyte-ddp estimate$",
            caplog.messages[0],
        )


@pytest.mark.parametrize("text", ["80", "", "GiB", "-1GiB", "80 parsecs", "1e999GiB"])
def test_memory_without_a_unit_is_one_line(text, capsys):
    assert parse_memory("80GiB") == 80 * 2**30
    assert parse_memory("512MB") == 512e6
    assert main(["estimate", "--recipe", "digits", f"--gpu-memory={text or '?'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --gpu-memory: expected a number above 0 with a unit, such as 80GiB, got ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--recipe", "digit"], "error: recipe: expected"),
        (["--recipe", "digits", "--gpus", "0"], "error: --gpus: expected a whole number of at least 1, got 0"),
        (["--recipe", "digits", "--config", '{"epoch": 1}'], "error: config: expected one of the fields"),
    ],
)
def test_a_mistake_is_one_line(arguments, expected, capsys):
    assert main(["estimate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(expected)
    assert error.count("\n") == 1


def test_the_command_shows_a_row_for_each_way_to_train(capsys):
    assert main(["estimate", "--recipe", "digits", "--gpus", "8", "--gpu-memory", "80GiB"]) == 0
    first, heads, *rows = capsys.readouterr().out.splitlines()
    num_parameters = sum(each.numel() for each in get_recipe("digits").model().parameters())
    assert first.startswith(f"{num_parameters:,} parameters")
    assert heads.split()[:3] == ["parallel", "accumulation", "batch"]
    assert [row.split()[:2] for row in rows[:4]] == [["ddp", "1"], ["ddp", "2"], ["fsdp", "1"], ["fsdp", "2"]]
    assert int(rows[0].split()[-1].replace(",", "")) > 1000
    (process,) = re.findall(r"^on CPUs: .*, Python, torch and the data, (\d+)\.\d MiB more$", "\n".join(rows), re.M)
    assert 100 < int(process) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", ["digits", "images"])
def test_the_estimate_is_near_what_a_rank_takes(case, parallel):
    from benchmarks.memory import measure

    estimated, measured = measure(case, parallel)
    assert 0.85 < estimated / measured < 1.15
