"""A language model trained by `pyflyte run`, and the text that is generated with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flytekit.types.file import FlyteFile

from flyte_ddp.events import EpochFinished, RunState, read_history
from flyte_ddp.flyte.inputs import InputError
from flyte_ddp.recipes.text.model import generate_text
from tests.support.commands import run_command
from tests.support.foreign_states import FOREIGN
from tests.support.text_recipe import prepared
from workflows.text import generate_text_wf

REPOSITORY = Path(__file__).parents[2]
SMALL = {
    "epochs": 2,
    "global_batch_size": 64,
    "learning_rate": 0.01,
    "recipe_options": {"layers": 1, "width": 32, "heads": 2, "context": 64, "prompt": "The "},
}


@pytest.fixture
def model(tmp_path):
    """A fresh model with a context of 8 tokens, in training."""
    recipe, _, _ = prepared(tmp_path)
    return recipe.model().train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two epochs on Python's own topics on two ranks: (what `pyflyte run` printed, model state,
    report, history).
    """
    directory = tmp_path_factory.mktemp("first")
    command = ["pyflyte", "run", "workflows/single_node.py", "single_node_training_wf"]
    flags = ["--recipe", "text", "--num_processes", "2", "--output", str(directory)]
    flags += ["--config", json.dumps(SMALL)]
    code, output, errors = run_command(*command, *flags, cwd=REPOSITORY, WANDB_MODE="disabled")
    assert code == 0, output + errors
    files = (directory / name for name in ("model_state.pt", "report.html", "history.jsonl"))
    return output + errors, *files


@pytest.mark.long
def test_a_run_on_pythons_topics_learns_and_reports_nats_per_byte_speed_and_text(trained):
    output, _, report, history = trained
    state = RunState.of(read_history(history))
    assert "reference topics that come with Python (pydoc_data.topics)" in output
    assert "tokens of 256 kinds to train" in state.started.data
    first, last = state.epochs
    # Guessing has log(256) = 5.5 nats per byte; the frequencies of letters alone have about 3.
    assert last.metrics["nats_per_byte"] < first.metrics["nats_per_byte"] < 3
    # Tokens are bytes here, apart from the ends of the documents.
    assert last.metrics["nats_per_byte"] == pytest.approx(last.test_loss, rel=0.01)
    assert last.metrics["train_nats_per_byte"] == pytest.approx(last.train_loss, rel=0.01)
    assert last.metrics["tokens_per_second"] == pytest.approx(64 * last.samples_per_second)
    assert "model_flops_utilization" not in last.metrics, "no table has this machine's processor"
    assert last.sample.startswith("The ")
    assert len(last.sample) > 20
    page = report.read_text()
    assert "Generated text" in page
    assert "nats per byte" in page


@pytest.mark.long
def test_the_state_alone_continues_a_text_as_its_run_did(trained):
    _, state_file, _, history = trained
    text = generate_text_wf(model_state=FlyteFile(str(state_file)), prompt="The ", max_tokens=200)
    last = [event for event in read_history(history) if isinstance(event, EpochFinished)][-1]
    assert text == last.sample
    other = generate_text_wf(
        model_state=FlyteFile(str(state_file)), prompt="The ", max_tokens=200, seed=1
    )
    assert other != text
    assert other.startswith("The ")


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (
            {"max_tokens": 0},
            "max_tokens: expected a whole number of at least 1 and of at most 100000, got 0",
        ),
        ({"temperature": -1.0}, "temperature: expected a finite number of at least 0, got -1.0"),
        ({"top_p": 0.0}, "top_p: expected a finite number of at most 1 and above 0, got 0.0"),
        ({"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
    ],
)
def test_bad_input_is_refused_in_one_line(model, tmp_path, inputs, expected):
    file = tmp_path / "model_state.pt"
    torch.save(model.state_dict(), file)
    with pytest.raises(InputError) as caught:
        generate_text_wf(model_state=FlyteFile(str(file)), **inputs)
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("contents", [b"junk", {"conv1.weight": torch.zeros(3)}, "cut"])
def test_a_file_that_is_no_language_model_is_refused_in_one_line(contents, model, tmp_path):
    file = tmp_path / "model_state.pt"
    if contents == "cut":  # This model claims more layers than it has.
        contents = model.state_dict()
        contents["_extra_state"]["config"]["num_hidden_layers"] = 3
    file.write_bytes(contents) if isinstance(contents, bytes) else torch.save(contents, file)
    with pytest.raises(InputError, match="^model_state: expected .* of .*recipe text, got [^\n]+$"):
        generate_text_wf(model_state=FlyteFile(str(file)))


@pytest.mark.parametrize("form", ["script", "pickle"])
def test_a_state_that_another_program_has_saved_generates_the_same_text(form, model, tmp_path):
    given = tmp_path / "given.pt"
    given.write_bytes(FOREIGN[form](model.state_dict()))
    text = generate_text_wf(model_state=FlyteFile(str(given)), prompt="The ", max_tokens=20)
    assert text == generate_text(model, "The ", 20)


def test_a_text_goes_on_beyond_the_context_and_ends_where_the_model_ends_it(model):
    text = generate_text(model, "The list is ", 50, temperature=0.0)
    assert text.startswith("The list is ")
    with torch.no_grad():
        # the likeliest token alone
        assert text == generate_text(model, "The list is ", 50, top_p=1e-6)
        assert len(model.tokenizer.encode([generate_text(model, "", 50)])[0]) > 8
        logits = torch.full((1, 1, 256), -1.0)
        logits[..., model.tokenizer.end] = 1.0
        model.model.lm_head.register_forward_hook(
            lambda module, inputs, outputs: logits.expand_as(outputs)
        )
        assert generate_text(model, "abc", 50, temperature=0.0) == "abc"


def test_generating_leaves_the_random_numbers_of_a_training_alone(model):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert generate_text(model, "a", 5) == generate_text(model, "a", 5)
    assert generate_text(model, "a", 5) != generate_text(model, "a", 5, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
