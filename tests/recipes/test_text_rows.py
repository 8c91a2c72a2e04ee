"""Recipe text on rows of whole documents, and on chats."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.recipes import config_of
from flyte_ddp.recipes.prepare import describe_data, prepare_data
from flyte_ddp.recipes.shards_command import main
from flyte_ddp.recipes.text import corpus, documents
from flyte_ddp.recipes.text.tokens import SETTINGS, read_tokenizer, train_tokenizer
from tests.support.errors import raises_one_line
from tests.support.runs import Run
from tests.support.text_recipe import TINY, new_recipe, prepared
from tests.support.trainers import new_trainer

CONTEXT = 32
DEFAULT_SIZES = {"layers": 4, "width": 128, "heads": 4}  # the sizes that `pretrained` allows
DOCUMENTS = [
    f"{number}: " + "über " * (number % 9 * (1 + 9 * (number == 8))) for number in range(60)
]
TEMPLATE = (
    "{% for each in messages %}<{{ each.role }}>{{ each.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_chat(number, turns=2):
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is {number} + {turn}?"})
        messages.append({"role": "assistant", "content": f"It is {number + turn}."})
    return {"messages": messages}


def write_chats(directory, chats):
    lines = [each if isinstance(each, str) else json.dumps(each) for each in chats]
    (directory / "chats.jsonl").write_text("\n".join(lines))
    return str(directory / "chats.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a model whose tokenizer has a chat template."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(iter(["What is it? It is it."]), 300)
    settings = json.loads(tokenizer.files[SETTINGS])
    tokenizer.files[SETTINGS] = json.dumps({**settings, "chat_template": TEMPLATE})
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=tokenizer.size, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(directory)
    return str(directory)


def prepare_documents(directory, **options):
    directory.mkdir(exist_ok=True)
    (directory / "one.txt").write_text("\f".join(DOCUMENTS))
    given = {"samples": "documents", "context": CONTEXT, "separator": "\f", **options}
    return prepared(directory, directory / "one.txt", **given)


def texts_of(rows, tokenizer):
    """The documents that whole rows have, and each target with the token before it."""
    found, pairs = [], []
    for inputs, labels in (rows[number] for number in range(len(rows))):
        starts = (inputs[1] == 0).nonzero().flatten().tolist()
        for begin, end in zip(starts, [*starts[1:], CONTEXT], strict=True):
            found.append(tokenizer.decode(inputs[0][begin:end].tolist()))
        learned = labels != -100
        pairs += zip(inputs[0][learned].tolist(), labels[learned].tolist(), strict=True)
    return found, pairs


@pytest.mark.parametrize("size", [50, 1 << 13])
def test_rows_have_whole_documents_and_each_token_of_text_is_learned_once(
    size, tmp_path, monkeypatch
):
    monkeypatch.setattr(corpus, "MAX_PIECE", size)
    monkeypatch.setattr(documents, "RECORD", size)
    recipe, splits, described = prepare_documents(tmp_path / "a")
    tokenizer, texts, pairs = recipe._tokenizer, [], []
    for rows in splits:
        found = texts_of(rows, tokenizer)
        texts, pairs = texts + found[0], pairs + found[1]
    end, expected = tokenizer.end, []
    for each in DOCUMENTS:
        expected += itertools.pairwise([end, *each.encode(), end])
    assert sorted(pairs) == sorted(expected)
    short = [each for each in DOCUMENTS if len(each.encode()) < CONTEXT - 1]
    assert len(short) > 20
    assert set(short) <= set(texts)
    assert described.startswith("documents from ")
    size = {"train": 0, "held_out": 0} | recipe._bytes_per_token
    assert all(0.9 < each <= 1 for each in size.values())
    again, _, _ = prepare_documents(tmp_path / "b")
    prints = [describe_data(tmp_path / name / "data")["fingerprint"] for name in "ab"]
    assert prints[0] == prints[1]
    # a copy, as on another node
    shutil.copytree(tmp_path / "a" / "data", tmp_path / "c")
    shutil.rmtree(tmp_path / "a" / "data")
    copied = again.datasets(tmp_path / "c")
    assert torch.equal(copied[0][0][0], again.datasets(tmp_path / "b" / "data")[0][0][0])


def test_losses_of_a_row_are_those_of_its_documents_alone(tmp_path):
    recipe, (rows, _), _ = prepare_documents(tmp_path)
    model, num_shared = recipe.model().eval(), 0
    for number in range(len(rows)):
        inputs, targets = (each[None] for each in rows[number])
        starts, expected = (inputs[0, 1] == 0).nonzero().flatten().tolist(), 0.0
        with torch.no_grad():
            losses = recipe.losses(model(recipe.inputs(inputs)), targets)
            for begin, end in zip(starts, [*starts[1:], CONTEXT], strict=True):
                logits, own = model(inputs[:, 0, begin:end])[0], targets[0, begin:end]
                expected += functional.cross_entropy(logits, own, reduction="sum")
        torch.testing.assert_close(losses[0], expected)
        num_shared += len(starts) > 2
        learned = (targets != -100).sum(1)
        assert recipe.num_targets(targets).tolist() == learned.tolist()
        outputs = functional.one_hot(targets.clamp(min=0), 256)
        assert recipe.num_correct(outputs, targets).tolist() == learned.tolist()
    assert num_shared > 3


def test_a_run_weighs_targets_in_training_and_held_out_loss(tmp_path):
    options = {**TINY, "samples": "documents", "context": CONTEXT, "separator": "\f"}
    (tmp_path / "one.txt").write_text("\f".join(DOCUMENTS))
    config = config_of("text", {"recipe_options": options})
    run = Run(tmp_path, "text", config=config)
    run.data = lambda source="": directory
    directory = tmp_path / "data"
    directory.mkdir()
    prepare_data(new_recipe(**options), str(tmp_path / "one.txt"), directory)
    trainer = new_trainer(run, recipe_options=options, epochs=1, global_batch_size=8)
    (finished,) = trainer.fit().epochs
    model, recipe = trainer.evaluated_model.eval(), trainer.parallelism.recipe
    sums = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in trainer.test.batches([torch.arange(len(trainer.test))], 0):
            losses = recipe.losses(model(recipe.inputs(inputs)), targets)
            sums += torch.tensor([losses.sum(), recipe.num_targets(targets).sum()])
    assert finished.test_loss == pytest.approx(float(sums[0] / sums[1]), rel=1e-5)
    assert finished.metrics["tokens_seen"] == CONTEXT * len(trainer.train)


def test_of_chats_the_answers_alone_are_learned(model, tmp_path):
    chats = [make_chat(number, 1 + number % 3) for number in range(40)]
    options = {"samples": "chats", "context": 128, "layers": 4, "width": 128, "heads": 4}
    place = write_chats(tmp_path, chats)
    recipe, splits, described = prepared(tmp_path, place, pretrained=model, **options)
    assert described.startswith(f"chats from {place}; train: ")
    tokenizer, learned = read_tokenizer(tmp_path / "data" / "tokenizer"), ""
    for rows in splits:
        for _, labels in (rows[number] for number in range(len(rows))):
            learned += tokenizer._library.decode(
                labels[labels != -100].tolist(), skip_special_tokens=False
            )
    answers = [
        each["content"]
        for chat in chats
        for each in chat["messages"]
        if each["role"] == "assistant"
    ]
    assert sorted(learned.split("<|endoftext|>")) == sorted(["", *answers])
    text = splits[0][0][0][0]
    assert "What is" in tokenizer.decode(text.tolist())
    assert tokenizer.end in text.tolist()  # special tokens of the template are no text
    assert recipe.model()(recipe.inputs(splits[0][0][0][None])).shape == (1, 128, tokenizer.size)


def test_documents_are_in_shards_as_they_are_without(tmp_path):
    options = {"samples": "documents", "context": CONTEXT, "separator": "\f"}
    (tmp_path / "one.txt").write_text("\f".join(DOCUMENTS))
    shards = str(tmp_path / "shards")
    written = main([f"{tmp_path}/one.txt", shards, "--text", json.dumps(options)])
    assert "rows of 33 tokens" in written
    for name in "ab":
        (tmp_path / name).mkdir()
    plain, splits, _ = prepared(tmp_path / "a", tmp_path / "one.txt", **options)
    recipe, streamed, described = prepared(tmp_path / "b", shards, **options)
    assert described.endswith("documents in rows of 32 tokens")
    assert recipe._bytes_per_token["train"] == plain._bytes_per_token["train"]
    for one, other in zip(splits, streamed, strict=True):
        pairs = [texts_of(each, recipe._tokenizer)[1] for each in (one, other)]
        assert sorted(pairs[0]) == sorted(pairs[1])
    (tmp_path / "c").mkdir()
    with pytest.raises(ConfigError, match=r"recipe_options.samples: expected 'documents', as in"):
        prepared(tmp_path / "c", shards, context=CONTEXT)
    with pytest.raises(ConfigError, match="^source: expected text, got shards of it at "):
        main([shards, str(tmp_path / "again"), "--text", json.dumps(options)])


@pytest.mark.parametrize(
    ("chats", "error", "expected"),
    [
        ([make_chat(1), "{"], DataError, r"data: chat 2 of .*: expected .* got '{'"),
        ([make_chat(1), {"text": 1}], DataError, "data: chat 2 of .*: expected .*messages"),
        (
            [{"messages": make_chat(1)["messages"][:1]}],
            DataError,
            "data: chat 1 of .* with an answer of the assistant, got",
        ),
        ([make_chat(1)], ConfigError, "recipe_options.held_out: .* some of the chats, got 0.1"),
        ([""], DataError, "data: expected chats, got .*, which has none"),
    ],
)
def test_chats_that_cannot_be_used_are_one_line(chats, error, expected, model, tmp_path):
    place = write_chats(tmp_path, chats)
    with raises_one_line(error, match=expected):
        prepared(tmp_path, place, pretrained=model, samples="chats", **DEFAULT_SIZES)


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(
    model, tmp_path, monkeypatch
):
    """transformers would ask on the terminal whether to run the code."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "n")
    own = tmp_path / "own"
    shutil.copytree(model, own)
    code = {
        "auto_map": {"AutoTokenizer": ["other/model--code.Own", None]},
        "tokenizer_class": "Own",
    }
    settings = json.loads((own / SETTINGS).read_text())
    (own / SETTINGS).write_text(json.dumps(settings | code))
    place = write_chats(tmp_path, [make_chat(number) for number in range(30)])
    with raises_one_line(ConfigError, match="recipe_options.pretrained: .*code"):
        prepared(tmp_path, place, pretrained=str(own), samples="chats", **DEFAULT_SIZES)
    assert questions == []


def test_a_chat_template_that_is_missing_or_changes_earlier_text_is_one_line(model, tmp_path):
    place = write_chats(tmp_path, [make_chat(number) for number in range(30)])
    with raises_one_line(ConfigError, match="recipe_options.pretrained: .* chat template"):
        prepared(tmp_path, place, samples="chats")
    own = tmp_path / "own"
    shutil.copytree(model, own)
    for template, expected in (
        ("{{ messages | length }}" + TEMPLATE, "expected a chat template that only adds"),
        (
            TEMPLATE + "{{ '!' if messages | length == 2 }}",
            "expected a chat template that only adds",
        ),
        ("{{ raise_exception('no system') }}", "the chat template refuses it: .*no system"),
    ):
        settings = json.loads((own / SETTINGS).read_text())
        (own / SETTINGS).write_text(json.dumps({**settings, "chat_template": template}))
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        with raises_one_line(DataError, match=f"data: chat 1 of .*: {expected}"):
            prepared(tmp_path, place, pretrained=str(own), samples="chats", **DEFAULT_SIZES)
