"""A language model trained by `pyflyte run`, and the text that is generated with it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished, RunState, read_history
from flyte_ddp.recipes.text.generate import generate_text, load_model, pick_token, predict_next
from flyte_ddp.recipes.text.model import Shape, TextModel
from flyte_ddp.recipes.text.tokens import Tokenizer
from tasks.inputs import InputError
from tests.support.commands import run_command
from workflows.text import generate_text_wf

REPOSITORY = Path(__file__).parents[1]
SMALL = {
    "epochs": 2,
    "global_batch_size": 64,
    "learning_rate": 0.01,
    "recipe_options": {"layers": 1, "width": 32, "heads": 2, "context": 64, "prompt": "The "},
}


def new_model(**shape):
    model = TextModel(Shape(**{"vocabulary": 256, "context": 16, "layers": 2, "width": 16, "heads": 2, **shape}))
    model.reset_parameters(0)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two epochs on Python's own topics on two ranks: (what `pyflyte run` printed, model state, report, history)."""
    command = ["pyflyte", "run", "workflows/single_node.py", "single_node_training_wf", "--recipe", "text"]
    flags = ["--num_processes", "2", "--config", json.dumps(SMALL), "--output", str(tmp_path_factory.mktemp("first"))]
    code, output, errors = run_command(*command, *flags, cwd=REPOSITORY, WANDB_MODE="disabled")
    assert code == 0, output + errors
    outputs = re.search(r"model_state=(\S+), report=(\S+), history=(\S+?), export=", output.replace("\n", " "))
    return output + errors, *map(Path, outputs.groups())


@pytest.mark.long
def test_a_run_on_pythons_topics_learns_and_reports_nats_per_byte_speed_and_text(trained):
    output, _, report, history = trained
    state = RunState.of(read_history(history))
    assert "reference topics that come with Python (pydoc_data.topics)" in output
    assert "bytes to train" in state.started.data
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


def test_the_state_alone_continues_a_text_as_its_run_did(trained):
    _, state_file, _, history = trained
    text = generate_text_wf(model_state=FlyteFile(str(state_file)), prompt="The ", max_tokens=200)
    last = [event for event in read_history(history) if isinstance(event, EpochFinished)][-1]
    assert text == last.sample
    other = generate_text_wf(model_state=FlyteFile(str(state_file)), prompt="The ", max_tokens=200, seed=1)
    assert other != text
    assert other.startswith("The ")


def test_transformers_loads_a_runs_output_as_the_page_says(trained):
    pytest.importorskip("transformers")
    _, state_file, _, _ = trained
    page = (REPOSITORY / "docs/outputs.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "from_pretrained" in block)
    names = {}
    exec(code.replace("runs/first", str(state_file.parent)), names)
    model, tokenizer = names["model"].eval(), names["tokenizer"]
    ours = load_model(torch.load(state_file, weights_only=True)).eval()
    tokens = tokenizer(tokenizer.bos_token + "The list", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"max_tokens": 0}, "max_tokens: expected a whole number of at least 1 and of at most 100000, got 0"),
        ({"temperature": -1.0}, "temperature: expected a finite number of at least 0, got -1.0"),
        ({"top_p": 0.0}, "top_p: expected a finite number of at most 1 and above 0, got 0.0"),
        ({"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
    ],
)
def test_bad_input_is_refused_in_one_line(trained, inputs, expected):
    with pytest.raises(InputError) as caught:
        generate_text_wf(model_state=FlyteFile(str(trained[1])), **inputs)
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("contents", [b"junk", {"conv1.weight": torch.zeros(3)}, "cut"])
def test_a_file_that_is_no_language_model_is_refused_in_one_line(contents, tmp_path):
    file = tmp_path / "model_state.pt"
    if contents == "cut":  # of a model that says it has more layers
        contents = new_model().state_dict()
        contents["_extra_state"]["shape"]["layers"] = 3
    file.write_bytes(contents) if isinstance(contents, bytes) else torch.save(contents, file)
    with pytest.raises(InputError, match="^model_state: expected .* of .*recipe text, got [^\n]+$"):
        generate_text_wf(model_state=FlyteFile(str(file)))


def test_token_by_token_equals_full_passes_also_where_the_context_is_full():
    model, tokens = new_model().eval(), [255, *b"a text that is long"]
    predictor = predict_next(model, tokens)
    last = tokens[-16:]
    with torch.no_grad():
        torch.testing.assert_close(next(predictor), model(torch.tensor([last]))[0, -1], atol=1e-5, rtol=1e-5)
        for number in range(20):
            tokens.append(97 + number)
            # The context was full, so it starts again with its last half, and grows until it is full again.
            seen = tokens[-8 - number % 9 :]
            expected = model(torch.tensor([seen]))[0, -1]
            torch.testing.assert_close(next(predictor), expected, atol=1e-5, rtol=1e-5)


def test_a_text_is_drawn_from_the_likeliest_tokens_in_proportion():
    logits = torch.tensor([0.5, 0.1, 0.3, 0.1]).log()
    draws = [(number + 0.5) / 1000 for number in range(1000)]

    def shares(temperature, top_p):
        picked = [pick_token(logits, temperature, top_p, draw) for draw in draws]
        return [picked.count(token) / 1000 for token in range(4)]

    assert shares(1.0, 1.0) == pytest.approx([0.5, 0.1, 0.3, 0.1], abs=0.002)
    assert shares(1.0, 0.8) == pytest.approx([0.625, 0, 0.375, 0], abs=0.002)
    assert shares(1.0, 0.1) == shares(0.0, 1.0) == [1, 0, 0, 0]
    squares = [0.25, 0.01, 0.09, 0.01]
    assert shares(0.5, 1.0) == pytest.approx([square / 0.36 for square in squares], abs=0.002)


def test_the_model_ends_a_text_and_any_bytes_are_shown():
    model = new_model()
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.norm.weight.fill_(1.0)
    model.forward = lambda tokens, caches: script(tokens)  # one token after the other

    def script(tokens):
        follows = {Tokenizer.end: 65, 65: 0xC3, 0xC3: 66, 66: Tokenizer.end}
        logits = torch.full((1, 1, 256), -math.inf)
        logits[0, 0, follows[int(tokens[0, -1])]] = 0.0
        return logits

    assert generate_text(model, "", max_tokens=50) == "A\ufffdB"
    assert generate_text(model, "", max_tokens=1) == "A"
    assert generate_text(model, "xA", max_tokens=50) == "xA\ufffdB"


def test_generating_leaves_the_random_numbers_of_a_training_alone():
    model = new_model().train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert generate_text(model, "a", 5) == generate_text(model, "a", 5)
    assert torch.equal(torch.rand(3), expected)
    assert model.training


def test_a_state_has_its_tokenizer_and_sizes():
    model = new_model(width=32, heads=4)
    again = load_model(model.state_dict())
    assert again.shape == model.shape
    assert generate_text(again, "abc", 20) == generate_text(model, "abc", 20)
    with pytest.raises(ConfigError, match="another model's"):
        load_model({"a": 1})
